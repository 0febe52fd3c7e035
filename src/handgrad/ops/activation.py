"""Activation: a_8 = g(a_7) and Δ_7 = Δ_8 ∘ g'(a_7) (Table 2), for ReLU, GELU, GPT-2's tanh form of GELU (R39)
and squared ReLU.

`backward` also returns a_8, which is not stored: g and g' share the expensive part. bfloat16 is computed in float32; in
mixed precision Δ_8 is float32 and the results, operands of products, bfloat16.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import calls

CUBIC = 0.044715
TWICE = 2 * math.sqrt(2 / math.pi)
SATURATED = 100.0  # from here on s or 1 − s is 0
ENTRIES_AT_ONCE = 1 << 18  # so that the elementwise steps below work in the CPU cache


def forward(x: Tensor, name: str) -> Tensor:
    """g(x)"""
    if name == "relu":
        return torch.relu(x)
    if name == "gelu":
        return F.gelu(x)
    if name == "relu2":
        return torch.relu(x).square_()
    if name != "gelu_tanh":
        raise ValueError(f"unknown activation {name!r}")
    value = torch.empty_like(x)
    if x.ndim == 2 and calls.fits(operands=(x, value)):
        calls.forward_activation(name, x, value)
        return value
    if x.dtype == torch.bfloat16:
        return F.gelu(x, approximate="tanh")  # computes in float32 inside; the steps below would each round
    for part, out in zip(parts(x), parts(value), strict=True):
        torch.mul(part, part, out=out).mul_(CUBIC * TWICE).add_(TWICE).mul_(part).sigmoid_().mul_(part)
    return value


def backward(delta: Tensor, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Δ_{i−1} = Δ_i ∘ g'(a_{i−1}), with ReLU'(0) = 0; and g(a_{i−1})"""
    if name == "relu":
        return torch.where(x <= 0, 0, delta).to(x.dtype), torch.relu(x)  # Δ where x is no number
    out, value = torch.empty_like(x), torch.empty_like(x)
    if name in calls.ACTIVATIONS and x.ndim == 2 and delta.shape == x.shape:
        given = delta.to(calls.COMPUTED.get(x.dtype, x.dtype))
        if calls.fits(given, operands=(x, out, value)):
            calls.backward_activation(name, given, x, out, value)
            return out, value
    slope = {"gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu2": _relu2}[name]
    for part in zip(parts(delta), parts(x), parts(out), parts(value), strict=True):
        if x.dtype == torch.bfloat16:  # in float32, so that only the results are rounded
            wide = [tensor.float() for tensor in part]
            slope(*wide)
            part[2].copy_(wide[2])
            part[3].copy_(wide[3])
        else:
            slope(*part)
    return out, value


def parts(x: Tensor) -> tuple[Tensor, ...]:
    """Groups of rows of at most ENTRIES_AT_ONCE entries."""
    return torch.split(x, max(1, ENTRIES_AT_ONCE // max(1, x.shape[1])))


def _gelu(delta: Tensor, x: Tensor, out: Tensor, value: Tensor) -> None:
    """g = x Φ,  g' = Φ + x φ"""
    cdf = torch.mul(x, math.sqrt(0.5), out=out).erf_().add_(1).mul_(0.5)
    torch.mul(x, cdf, out=value)
    x_density = (x * x).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi)).mul_(x)
    cdf.add_(x_density).mul_(delta)


def _gelu_tanh(delta: Tensor, x: Tensor, out: Tensor, value: Tensor) -> None:
    """g = x s,  g' = s + g (1 − s) 2u'"""
    square = x * x
    s = _sigmoid(x, square)
    torch.mul(x, s, out=value)
    rest = torch.addcmul(value, value, s, value=-1, out=out)  # g (1 − s)
    square.clamp_(max=SATURATED**2)  # `rest` is 0 from here on, and infinity must not multiply it
    rest.mul_(square.mul_(3 * CUBIC * TWICE).add_(TWICE)).add_(s).mul_(delta)


def _relu2(delta: Tensor, x: Tensor, out: Tensor, value: Tensor) -> None:
    """g = max(x, 0)²,  g' = 2 max(x, 0)"""
    positive = torch.clamp(x, min=0, out=value)
    torch.mul(positive, delta, out=out).mul_(2)
    positive.square_()


def _sigmoid(x: Tensor, square: Tensor) -> Tensor:
    """s = (1 + tanh u)/2 = sigmoid(2u)  with  u = √(2/π)(x + 0.044715 x³)"""
    return torch.addcmul(x, x, square, value=CUBIC).mul_(TWICE).sigmoid_()

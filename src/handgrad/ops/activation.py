"""Activation: a_8 = g(a_7) and Δ_7 = Δ_8 ∘ g'(a_7) (Table 2), for ReLU, GELU and GPT-2's tanh form of GELU (R39).

On the way back a_8 and the slope g'(a_7) are made together from a_7: they share the expensive part.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CUBIC = 0.044715
TWICE = 2 * math.sqrt(2 / math.pi)
ENTRIES_AT_ONCE = 1 << 18  # so that the many small steps below find their numbers in the cache


def forward(x: Tensor, name: str) -> Tensor:
    """g(x)"""
    if name == "relu":
        return torch.relu(x)
    if name == "gelu":
        return F.gelu(x)
    value = torch.empty_like(x)
    for part, out in zip(_parts(x), _parts(value), strict=True):
        s = _sigmoid(part, torch.mul(part, part, out=out))
        torch.mul(part, s, out=out)
    return value


def again(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """g(x) and g'(x), with ReLU'(0) = 0"""
    if name == "relu":
        return torch.relu(x), (x > 0).to(x.dtype)
    value, slope = torch.empty_like(x), torch.empty_like(x)
    for part in zip(_parts(x), _parts(value), _parts(slope), strict=True):
        (_gelu_tanh if name == "gelu_tanh" else _gelu)(*part)
    return value, slope


def backward(delta: Tensor, slope: Tensor) -> Tensor:
    """Δ_{i−1} = Δ_i ∘ g'(a_{i−1}), which takes the place of the slope"""
    return slope.mul_(delta)


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, max(1, ENTRIES_AT_ONCE // x.shape[1]))


def _gelu(x: Tensor, value: Tensor, slope: Tensor) -> None:
    """g = x Φ,  g' = Φ + x φ"""
    cdf = torch.mul(x, math.sqrt(0.5), out=slope).erf_().add_(1).mul_(0.5)
    x_density = (x * x).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi)).mul_(x)
    torch.mul(x, cdf, out=value)
    slope.add_(x_density)


def _gelu_tanh(x: Tensor, value: Tensor, slope: Tensor) -> None:
    """g = x s,  g' = s + g (1 − s) 2u'"""
    square = x * x
    s = _sigmoid(x, square)
    torch.mul(x, s, out=value)
    rest = torch.addcmul(value, value, s, value=-1, out=slope)  # g (1 − s)
    rest.mul_(square.mul_(3 * CUBIC * TWICE).add_(TWICE)).add_(s)


def _sigmoid(x: Tensor, square: Tensor) -> Tensor:
    """s = (1 + tanh u)/2 = sigmoid(2u)  with  u = √(2/π)(x + 0.044715 x³)"""
    return torch.addcmul(x, x, square, value=CUBIC).mul_(TWICE).sigmoid_()

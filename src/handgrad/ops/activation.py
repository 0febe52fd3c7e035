"""Activation: a_8 = g(a_7) and Δ_7 = Δ_8 ∘ g'(a_7) (Table 2), for ReLU, GELU and GPT-2's tanh form of GELU (R39)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CUBIC = 0.044715
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def forward(x: Tensor, name: str) -> Tensor:
    """g(x)"""
    if name == "relu":
        return torch.relu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def backward(delta: Tensor, x: Tensor, name: str) -> Tensor:
    """Δ_{i−1} = Δ_i ∘ g'(a_{i−1}), with ReLU'(0) = 0"""
    if name == "relu":
        return delta * (x > 0)
    slope = _slope_tanh(x) if name == "gelu_tanh" else _slope(x)
    return slope.mul_(delta)


def _slope(x: Tensor) -> Tensor:
    """Φ(x) + x φ(x)"""
    density = torch.exp(x * x * -0.5).mul_(1 / math.sqrt(2 * math.pi))
    return torch.erf(x * math.sqrt(0.5)).add_(1).mul_(0.5).addcmul_(x, density)


def _slope_tanh(x: Tensor) -> Tensor:
    """(1 + t)/2 + x/2 (1 − t²) u'  with  u = √(2/π)(x + 0.044715 x³),  t = tanh u"""
    square = x * x
    t = (square * CUBIC).add_(1).mul_(x).mul_(SQRT_2_OVER_PI).tanh_()
    x_du = square.mul_(3 * CUBIC).add_(1).mul_(x).mul_(SQRT_2_OVER_PI)  # x u'
    return x_du.mul_(1 - t * t).add_(t).add_(1).mul_(0.5)

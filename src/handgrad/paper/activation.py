"""Activation: a_8 = g(a_7), Δ_7 = Δ_8 ∘ g'(a_7) (Table 2). The paper does not specify g; GPT-2 uses the tanh form (R39)."""

import math

import torch
from torch import Tensor

NAMES = ("relu", "gelu", "gelu_tanh", "relu2")


def g(x: Tensor, name: str) -> Tensor:
    """relu: max(x, 0).  gelu: x Φ(x).  gelu_tanh: x/2 (1 + tanh(√(2/π)(x + 0.044715 x³))).  relu2: max(x, 0)²."""
    if name == "relu":
        return torch.where(x > 0, x, torch.zeros_like(x))
    if name == "gelu":
        return x * _cdf(x)
    if name == "gelu_tanh":
        return x / 2 * (1 + torch.tanh(_inner(x)))
    if name == "relu2":
        return torch.where(x > 0, x**2, torch.zeros_like(x))
    raise ValueError(f"unknown activation {name!r}; choose one of {', '.join(NAMES)}")


def g_prime(x: Tensor, name: str) -> Tensor:
    """relu: 1 where x > 0, and 0 at x = 0 (R39).  gelu: Φ + xφ.  gelu_tanh: (1+t)/2 + x/2 (1−t²) u', t = tanh(u).
    relu2: 2 max(x, 0), which is 0 at x = 0 without a choice."""
    if name == "relu":
        return (x > 0).to(x.dtype)
    if name == "gelu":
        return _cdf(x) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    if name == "gelu_tanh":
        t = torch.tanh(_inner(x))
        return (1 + t) / 2 + x / 2 * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    if name == "relu2":
        return torch.where(x > 0, 2 * x, torch.zeros_like(x))
    raise ValueError(f"unknown activation {name!r}; choose one of {', '.join(NAMES)}")


def delta_prev(delta: Tensor, x: Tensor, name: str) -> Tensor:
    """Δ_{i−1} = Δ_i ∘ g'(a_{i−1})"""
    return delta * g_prime(x, name)


def _cdf(x: Tensor) -> Tensor:
    return (1 + torch.erf(x / math.sqrt(2))) / 2


def _inner(x: Tensor) -> Tensor:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)

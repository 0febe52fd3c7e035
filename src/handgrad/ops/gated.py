"""Gated feed-forward: a_8 = g(gate) ∘ up, Δ_gate = Δ_8 ∘ up ∘ g'(gate) and Δ_up = Δ_8 ∘ g(gate).

    gate, up, a_8, Δ  (n, f)

g is SiLU or one of the two forms of GELU in `activation`. `backward` also returns a_8, which is not stored: the error
signals and a_8 share the expensive part. bfloat16 is computed in float32, so that only results are rounded.
"""

import torch
from torch import Tensor

from . import activation

NAMES = ("silu", "gelu", "gelu_tanh")


def forward(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """a_8 = g(gate) ∘ up"""
    if name not in NAMES:
        raise ValueError(f"unknown gate {name!r}; choose one of {', '.join(NAMES)}")
    a_8 = gate.new_empty(gate.shape)
    for x, u, out in zip(*(activation.parts(tensor) for tensor in (gate, up, a_8)), strict=True):
        x = _wide(x)
        value = torch.sigmoid(x).mul_(x) if name == "silu" else activation.forward(x, name)
        torch.mul(value, u, out=out)
    return a_8


def backward(delta: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Δ_gate = Δ_8 ∘ up ∘ g'(gate), Δ_up = Δ_8 ∘ g(gate); and a_8"""
    d_gate, d_up, a_8 = (gate.new_empty(gate.shape) for _ in range(3))
    slope = _silu if name == "silu" else activation.backward
    tensors = (delta, gate, up, d_gate, d_up, a_8)
    for d, x, u, out_gate, out_up, out in zip(*(activation.parts(tensor) for tensor in tensors), strict=True):
        x, d_times_up = _wide(x), _wide(d) * u
        signal, value = slope(d_times_up, x, name)
        out_gate.copy_(signal)
        torch.mul(value, d, out=out_up)
        torch.mul(value, u, out=out)
    return d_gate, d_up, a_8


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


def _silu(delta: Tensor, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Δ ∘ g' and g, with g = x σ and g' = σ + g (1 − σ)"""
    sigma = torch.sigmoid(x)
    value = x * sigma
    return torch.addcmul(value, value, sigma, value=-1).add_(sigma).mul_(delta), value

"""Gated feed-forward: a_8 = g(gate) ∘ up, with gate = a_6 w_gate and up = a_6 w_up.

    a_6  (n_T, d)      w_gate, w_up  (d, f)      gate, up, a_8, Δ_8  (n_T, f)

The paper has one branch, a_8 = g(a_7); this layer is beyond it. Llama's gate is SiLU ("SwiGLU"), Gemma's the tanh form of
GELU ("GEGLU").
"""

import torch
from torch import Tensor

from . import activation, linear

NAMES = ("silu", "gelu", "gelu_tanh")


def g(x: Tensor, name: str) -> Tensor:
    """silu: x σ(x), σ(x) = 1/(1 + e^(−x)).  gelu, gelu_tanh: those of `activation`."""
    if name not in NAMES:
        raise ValueError(f"unknown gate {name!r}; choose one of {', '.join(NAMES)}")
    return x * _sigma(x) if name == "silu" else activation.g(x, name)


def g_prime(x: Tensor, name: str) -> Tensor:
    """silu: σ(x) (1 + x (1 − σ(x)))"""
    if name not in NAMES:
        raise ValueError(f"unknown gate {name!r}; choose one of {', '.join(NAMES)}")
    return _sigma(x) * (1 + x * (1 - _sigma(x))) if name == "silu" else activation.g_prime(x, name)


def forward(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """a_8 = g(gate) ∘ up"""
    return g(gate, name) * up


def delta_gate(delta: Tensor, gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Δ_gate = Δ_8 ∘ up ∘ g'(gate)"""
    return delta * up * g_prime(gate, name)


def delta_up(delta: Tensor, gate: Tensor, name: str) -> Tensor:
    """Δ_up = Δ_8 ∘ g(gate)"""
    return delta * g(gate, name)


def delta_prev(d_gate: Tensor, d_up: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """Δ_6 = Δ_gate w_gateᵗ + Δ_up w_upᵗ: a_6 enters both branches"""
    return linear.delta_prev(d_gate, w_gate) + linear.delta_prev(d_up, w_up)


LIMIT, SLOPE = 7.0, 1.702  # of the clamped gate, as in gpt-oss


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """a_8 = (U + 1) G σ(1.702 G) with G = min(gate, 7) and U = up within ±7"""
    capped = torch.where(gate > LIMIT, LIMIT, gate)
    return (_within(up) + 1) * capped * _sigma(SLOPE * capped)


def delta_clamped(delta: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Δ_gate = Δ_8 ∘ (U + 1) σ (1 + 1.702 G (1 − σ)) where gate ≤ 7, Δ_up = Δ_8 ∘ G σ where |up| ≤ 7; 0 elsewhere"""
    capped = torch.where(gate > LIMIT, LIMIT, gate)
    sigma = _sigma(SLOPE * capped)
    d_gate = delta * (_within(up) + 1) * sigma * (1 + SLOPE * capped * (1 - sigma))
    return d_gate * (gate <= LIMIT), delta * capped * sigma * (up.abs() <= LIMIT)


def _within(x: Tensor) -> Tensor:
    return torch.where(x.abs() > LIMIT, LIMIT * torch.sign(x), x)


def _sigma(x: Tensor) -> Tensor:
    return torch.sigmoid(x)

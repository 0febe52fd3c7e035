"""Gated feed-forward: a_8 = g(gate) ∘ up, Δ_gate = Δ_8 ∘ up ∘ g'(gate) and Δ_up = Δ_8 ∘ g(gate).

    gate, up, a_8, Δ  (n, f)

g is SiLU or one of the two forms of GELU in `activation`. The clamped gate is (U + 1) G σ(1.702 G) with G = min(gate, 7) and
U = up within ±7. `backward` also returns a_8, which is not stored: the error
signals and a_8 share the expensive part. bfloat16 is computed in float32, so that only results are rounded; in mixed
precision Δ_8 is float32.
"""

import torch
from torch import Tensor

from ..kernels import calls
from . import activation

NAMES = ("silu", "gelu", "gelu_tanh")
CLAMPED = "clamped"  # gpt-oss: gate and up within a limit
LIMIT, SLOPE = 7.0, 1.702


def forward(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """a_8 = g(gate) ∘ up"""
    if name == CLAMPED:
        return _clamped(gate, up)[0]
    if name not in NAMES:
        raise ValueError(f"unknown gate {name!r}; choose one of {', '.join(NAMES)}")
    a_8 = gate.new_empty(gate.shape)
    if name in calls.ACTIVATIONS and gate.ndim == 2 and gate.shape == up.shape and calls.fits(operands=(gate, up, a_8)):
        calls.forward_gate(name, gate, up, a_8)
        return a_8
    for x, u, out in zip(*(activation.parts(tensor) for tensor in (gate, up, a_8)), strict=True):
        wide = _wide(x)
        if name == "silu":
            value = torch.sigmoid(wide, out=out if wide is x else None).mul_(wide)
        else:
            value = activation.forward(wide, name)
        torch.mul(value, u, out=out)
    return a_8


def backward(
    delta: Tensor, gate: Tensor, up: Tensor, name: str, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Δ_gate = Δ_8 ∘ up ∘ g'(gate), Δ_up = Δ_8 ∘ g(gate); and a_8

    Δ_gate and Δ_up are written `into` these tensors, which may be gate and up themselves: less memory traffic."""
    if name == CLAMPED:
        return _backward_clamped(delta, gate, up)
    a_8 = gate.new_empty(gate.shape)
    d_gate, d_up = (gate.new_empty(gate.shape) for _ in range(2)) if into is None else into
    operands = (gate, up, d_gate, d_up, a_8)
    if name in calls.ACTIVATIONS and gate.ndim == 2 and gate.shape == up.shape == delta.shape:
        wide = delta.to(calls.COMPUTED.get(gate.dtype, gate.dtype))
        if calls.fits(wide, operands=operands):
            calls.backward_gate(name, wide, *operands)
            return d_gate, d_up, a_8
    tensors = (delta, *operands)
    for d, x, u, out_gate, out_up, out in zip(*(activation.parts(tensor) for tensor in tensors), strict=True):
        x, signal = _wide(x), _wide(d) * u
        if name == "silu":
            sigma = torch.sigmoid(x)
            value = x * sigma
        else:
            signal, value = activation.backward(signal, x, name)
        torch.mul(value, u, out=out)  # the last use of up, which may be overwritten now
        torch.mul(value, d, out=out_up)
        if name == "silu":
            torch.mul(signal, value.addcmul_(value, sigma, value=-1).add_(sigma), out=out_gate)  # g' = σ + g (1 − σ)
        else:
            out_gate.copy_(signal)
    return d_gate, d_up, a_8


def _clamped(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a_8 = (U + 1) G σ(1.702 G); and G, σ and U + 1"""
    capped, within = _wide(gate).clamp(max=LIMIT), _wide(up).clamp(-LIMIT, LIMIT) + 1
    sigma = torch.sigmoid(SLOPE * capped)
    return (within * capped * sigma).to(gate.dtype), capped, sigma, within


def _backward_clamped(delta: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Δ_gate = Δ_8 ∘ (U + 1) σ (1 + 1.702 G (1 − σ)) where gate ≤ 7, Δ_up = Δ_8 ∘ G σ where |up| ≤ 7; and a_8"""
    a_8, capped, sigma, within = _clamped(gate, up)
    d_gate = delta * within * sigma * (1 + SLOPE * capped * (1 - sigma))
    d_up = delta * capped * sigma
    d_gate, d_up = torch.where(gate > LIMIT, 0, d_gate), torch.where(up.abs() > LIMIT, 0, d_up)
    return d_gate.to(gate.dtype), d_up.to(up.dtype), a_8


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x

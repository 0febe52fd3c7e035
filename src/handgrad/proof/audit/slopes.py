"""What may be wrong at the activation function: known mistakes of both passes, and the terms of its derivative.

g(x) = x s(x) with s = σ (SiLU), Φ (GELU) or its tanh form, so  g′ = s + x s′
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...model.mlp import MLP
from ...ops import activation
from ...ops import gated as gated_op

INNER = {"silu": "σ", "gelu": "Φ", "gelu_tanh": "s"}
Both = tuple[dict[str, Tensor], dict[str, Tensor]]  # terms, and what mistakes would have given


@torch.no_grad()
def activation_mistakes(mlp: MLP, a: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """What known mistakes would have made of a_8."""
    if not mlp.gated:
        kinds = [g for g in ("gelu", "gelu_tanh", "relu") if g != mlp.g]
        return {f"the activation were {g}": activation.forward(a("7"), g) for g in kinds}
    gate, up = a("gate"), a("up")
    found = {f"the gate were {g}": gated_op.forward(gate, up, g) for g in gated_op.NAMES if g != mlp.g}
    return found | {
        "gate and up were exchanged": gated_op.forward(up, gate, mlp.g),
        "the gate had no activation function": gate * up,
        "the gate were missing": up,
        "the factor up were missing": gated_op.forward(gate, torch.ones_like(up), mlp.g),
    }


@torch.no_grad()
def slope_causes(mlp: MLP, point: str, a: Callable[[str], Tensor], delta_8: Tensor) -> Both:
    """Causes of a wrong Δ_7, Δ_gate or Δ_up, from Δ_8 and what the activation function read."""
    if point == "up":
        gate = a("gate")
        return {}, {"the gate had no activation function": delta_8 * gate, "the gate were missing": delta_8}
    x, beside = (a("gate"), a("up")) if mlp.gated else (a("7"), torch.ones_like(delta_8))
    value, slope = _value_and_slope(x, mlp.g)
    signal = delta_8 * beside
    others = [g for g in ("silu", "gelu", "gelu_tanh", "relu") if g != mlp.g]
    mistakes = {f"the derivative were that of {g}": signal * _value_and_slope(x, g)[1] for g in others}
    mistakes["the activation function were not differentiated"] = signal
    mistakes["the derivative were the activation function itself"] = signal * value
    if mlp.gated:
        mistakes["the factor up were missing"] = delta_8 * slope
    if mlp.g not in INNER:
        return {}, mistakes
    s, inner = INNER[mlp.g], torch.where(x == 0, 0.5, value / x)
    whole = f"the derivative g′ = {s}(x) + x {s}′(x)"
    terms = {
        f"the term {s}(x) of {whole}": signal * inner,
        f"the term x {s}′(x) of {whole}": signal * (slope - inner),
    }
    return terms, mistakes


def _value_and_slope(x: Tensor, g: str) -> tuple[Tensor, Tensor]:
    ones = torch.ones_like(x)
    if g in gated_op.NAMES:
        slope, value, _ = gated_op.backward(ones, x, ones, g)
    else:
        slope, value = activation.backward(ones, x, g)
    return value, slope

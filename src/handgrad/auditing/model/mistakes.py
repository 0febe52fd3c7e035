"""What known mistakes would have made of a tensor: of a norm's output, of both passes of the activation function, and of a
weight's gradient; and the terms of which the right tensors are sums. Those of attention are in `heads.py`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...lora.layer import LoRA
from ...model.gpt import GPT
from ...model.layers.experts import Experts
from ...model.layers.linear import Affine, Linear
from ...model.layers.mlp import MLP
from ...model.layers.norms import Norm
from ...ops import activation, loss
from ...ops import gated as gated_op
from .balance import Balance
from .batch import AuditBatch
from .expect import expect
from .subject import Subject

INNER = {"silu": "σ", "gelu": "Φ", "gelu_tanh": "s"}  # g(x) = x s(x), so g′ = s + x s′
MAX_SEQUENCES = 16  # of a batch whose sequences are differentiated one by one
STEPS = {"next": 1, "previous": -1}
Both = tuple[dict[str, Tensor], dict[str, Tensor]]  # terms, and what mistakes would have given


# ── norms ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _normalized(norm: Norm, a: Tensor) -> tuple[Tensor, Tensor]:
    """ā and 1/σ of every row"""
    mean = a.mean(-1, keepdim=True) if hasattr(norm, "bias") else 0.0
    inverse = torch.rsqrt((a - mean).square().mean(-1, keepdim=True) + norm.eps)  # type: ignore[operator]
    return (a - mean) * inverse, inverse


@torch.no_grad()
def norm_mistakes(norm: Norm, a: Tensor) -> dict[str, Tensor]:
    a_bar, _ = _normalized(norm, a)
    w, b = norm.gain, getattr(norm, "bias", None)
    bias = 0.0 if b is None else b
    other = "1 were not added to the gain" if norm.offset else "1 were added to the gain"
    return {
        "the gain were left out": a_bar + bias,
        other: a_bar * (w - 1 if norm.offset else 1 + w) + bias,
        "the norm were left out": a,
        **({"the bias were left out": a_bar * w} if b is not None else {}),
    }


@torch.no_grad()
def norm_terms(norm: Norm, a: Tensor, delta: Tensor, branch: str) -> dict[str, Tensor]:
    """The terms of a norm's backward pass: 1/σ · (w ∘ Δ − mean(w ∘ Δ) − ā mean(w ∘ Δ ∘ ā)); RMSNorm has no second one."""
    a_bar, inverse = _normalized(norm, a)
    g = delta * norm.gain
    direct, along = inverse * g, -inverse * a_bar * (g * a_bar).mean(-1, keepdim=True)
    terms = {"the norm's direct term": direct, "the norm's term of the variance": along}
    whole = direct + along
    if hasattr(norm, "bias"):
        terms["the norm's term of the mean"] = -inverse * g.mean(-1, keepdim=True).expand_as(g)
        whole = whole + terms["the norm's term of the mean"]
    return {f"the {branch} branch": whole, **terms}


# ── the activation function ──────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def activation_mistakes(mlp: MLP | Experts, a: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """What known mistakes would have made of a_8."""
    if not mlp.gated:
        kinds = [g for g in ("gelu", "gelu_tanh", "relu") if g != mlp.g]
        return {f"the activation were {g}": activation.forward(a("a_7"), g) for g in kinds}
    gate, up = a("a_gate"), a("a_up")
    found = {f"the gate were {g}": gated_op.forward(gate, up, g) for g in gated_op.NAMES if g != mlp.g}
    return found | {
        "gate and up were exchanged": gated_op.forward(up, gate, mlp.g),
        "the gate had no activation function": gate * up,
        "the gate were missing": up,
        "the factor up were missing": gated_op.forward(gate, torch.ones_like(up), mlp.g),
    }


@torch.no_grad()
def slope_causes(mlp: MLP | Experts, point: str, a: Callable[[str], Tensor], delta_8: Tensor) -> Both:
    """Causes of a wrong Δ_7, Δ_gate or Δ_up, from Δ_8 and what the activation function read."""
    if point == "a_up":
        gate = a("a_gate")
        return {}, {"the gate had no activation function": delta_8 * gate, "the gate were missing": delta_8}
    x, beside = (a("a_gate"), a("a_up")) if mlp.gated else (a("a_7"), torch.ones_like(delta_8))
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


# ── linear layers ────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def layer_mistakes(layer: Affine, a: Tensor, columns: slice) -> dict[str, Tensor]:
    """What known mistakes would have made of some columns of a linear layer's output."""
    plain = layer.plain()
    w, b = layer.effective_weight()[:, columns], plain.added_bias()
    found = {}
    if layer.adapted:
        base = a @ plain.effective_weight()[:, columns]
        found["the adapter were bypassed"] = base if b is None else base + b[columns]
    if getattr(layer, "magnitude", None) is not None:
        branch: Any = layer
        plain_sum = a @ (plain.effective_weight() + branch.scale * branch.down @ branch.up)[:, columns]
        found["the magnitude were ignored"] = plain_sum if b is None else plain_sum + b[columns]
    if b is not None:
        found["the bias were left out"] = a @ w
    return found


@torch.no_grad()
def adapter_term(layer: Affine, a: Tensor, columns: slice) -> dict[str, Tensor]:
    """What the adapter adds to them."""
    if not layer.adapted:
        return {}
    return {"the adapter's part": a @ (layer.effective_weight() - layer.plain().effective_weight())[:, columns]}


@torch.no_grad()
def backward_terms(parts: dict[str, tuple[Any, Tensor]]) -> dict[str, Tensor]:
    """What each layer with the Δ of its output, and within it the adapter, adds to the error signal of their input."""
    terms: dict[str, Tensor] = {}
    for name, (layer, delta) in parts.items():
        whole = delta @ layer.effective_weight().t()
        if len(parts) > 1:
            terms[f"the {name} branch"] = whole
        if layer.adapted:
            of = f" of {name}" if name else ""
            terms[f"the adapter's part{of}"] = whole - delta @ layer.plain().effective_weight().t()
    return terms


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def parts_of_sequences(subject: Subject, batch: AuditBatch, name: str, balance: Balance | None) -> dict[str, Tensor]:
    """What each sequence adds to the gradient of our parameter `name`."""
    if not 2 <= len(batch.lengths) <= MAX_SEQUENCES:
        return {}
    rows = batch.rows.view(batch.shape).any(1).nonzero().flatten().tolist()
    found = {}
    for row in rows:
        grads = expect(subject, batch.only([row]), [batch.n_targets], balance).grads
        found[f"the part of sequence {row + 1} of {batch.shape[0]}"] = grads[name]
    return found


def from_other_rows(layer: Linear, a: Tensor, delta: Tensor, shape: tuple[int, int]) -> dict[str, Tensor]:
    """∂w = aᵗ Δ with each row of a replaced by the one after or before it, as the weight is stored; a and Δ (B · T, ·) with
    padding."""
    found = {}
    for which, step in STEPS.items():
        sequences = a.view(*shape, -1).roll(-step, 1)
        sequences[:, -1 if step > 0 else 0] = 0.0
        for where, moved in (("", a.roll(-step, 0)), (" of its sequence", sequences.flatten(0, 1))):
            grad = moved.t() @ delta
            found[f"its input were that of the {which} row{where}"] = grad if layer.in_out else grad.t()
    return found


def into_other_rows(w: Tensor, ids: Tensor, delta: Tensor) -> dict[str, Tensor]:
    """An embedding's gradient with the error signal of each token given to the one after or before it."""
    moved = {which: ids.flatten().cpu().roll(-step) for which, step in STEPS.items()}
    return {
        f"error signals went to the {which} token": torch.zeros_like(w).index_add_(0, tokens, delta)
        for which, tokens in moved.items()
    }


@torch.no_grad()
def delta_of_logits(model: GPT, a_11: Tensor, batch: AuditBatch) -> Tensor:
    """Δ_12 = (y_pred − y_gt) / number of targets (B · T, V), 0 where there is no target"""
    chosen = loss.rows_with_target(batch.targets)
    rows = batch.rows.nonzero().flatten()[chosen]
    logits = model.logit_map.forward(model.head.forward(a_11[rows]))
    delta = logits.new_zeros(len(a_11), logits.shape[1])
    of_map = loss.forward_and_delta(logits.clone(), batch.targets[chosen], 1 / batch.n_targets)[1]
    delta[rows] = model.logit_map.backward(of_map, logits)
    return delta


@torch.no_grad()
def logit_mistakes(model: GPT, a_11: Tensor, batch: AuditBatch) -> dict[str, Tensor]:
    """The loss if the logits were not scaled, or not capped; a_11 (B · T, d)."""
    chosen, right = loss.rows_with_target(batch.targets), model.logit_map
    a_12, found = model.head.forward(a_11[batch.rows.nonzero().flatten()[chosen]]), {}
    if right.scale != 1:
        found["the logits were not scaled"] = right._replace(scale=1.0)
    if right.cap is not None:
        found["the logits were not capped"] = right._replace(cap=None)
    targets, n = batch.targets[chosen], batch.n_targets
    return {name: loss.forward(x.forward(a_12.clone()), targets) / n for name, x in found.items()}


@torch.no_grad()
def with_undetached_norms(layer: LoRA, path: str, factor: str, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of DoRA's d or u if c, the norms of the columns of w' = w + s d u, were not taken as constants:

    ∂w' has the additional term −w' ∘ (∂m ∘ m / c²);   ∂d = s ∂w' uᵗ,   ∂u = s dᵗ ∂w'
    """
    of_magnitude, right = grads.get(f"{path}.magnitude"), grads.get(f"{path}.{factor}")
    if layer.magnitude is None or of_magnitude is None or right is None or factor not in ("down", "up"):
        return {}
    w = layer.base.effective_weight() + layer.scale * layer.down @ layer.up
    more = -w * (of_magnitude * layer.magnitude / layer.column_norms() ** 2)
    term = more @ layer.up.t() if factor == "down" else layer.down.t() @ more
    return {"DoRA's column norms were differentiated, not detached": right + layer.scale * term}

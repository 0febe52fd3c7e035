"""Section 3.2: one head of self-attention, backward (Table 1).

Each gradient is judged by torch's own attention. The saved forward pass is torch's too, so that a fault in the
forward formulas does not show here; only the checks that speak about the mask, and D-table1, run the paper's own.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...paper import attention, linear, notation
from ...paper.attention import Head
from ..oracles import (
    FINITE_DIFFERENCE_TOLERANCE,
    differentiate,
    directional_error,
    finite_difference,
    forward_mode,
    relative_error,
)
from .check import AUTOGRAD, EXACT, IDENTITY, Lab, check, mismatch, unless


def _draw(lab: Lab) -> tuple[Tensor, Head, Tensor]:
    """a (n_T, d), a head with d, d_ρ and d_h of their own, and an upstream Δ (n_T, d_h)"""
    n, d, d_rho, d_h = lab.size(3, 8), lab.size(2, 8), lab.size(2, 8), lab.size(1, 8)  # d_ρ = 1 would hide the √d_ρ
    return lab.matrix(n, d), lab.head(d, d_rho, d_h), lab.matrix(n, d_h)


def masked_by_torch(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)


def forward_by_torch(a: Tensor, head: Head, causal: bool = True) -> attention.Forward:
    """Everything the backward pass needs to know of the forward pass, from torch's functions."""
    q = F.linear(a, head.w_q.t(), head.b_q)
    k = F.linear(a, head.w_k.t(), head.b_k)
    v = F.linear(a, head.w_v.t(), head.b_v)
    raw = q @ k.t()
    scaled = raw / math.sqrt(q.shape[1])
    masked = masked_by_torch(scaled) if causal else scaled
    rho = F.softmax(masked, 1)
    return attention.Forward(q, k, v, raw, scaled, masked, rho, rho @ v)


def attention_by_torch(a_q: Tensor, a_k: Tensor, a_v: Tensor, head: Head) -> Tensor:
    """The head's output. The input comes three times, so that each of its three uses can be differentiated alone."""
    q = F.linear(a_q, head.w_q.t(), head.b_q)
    k = F.linear(a_k, head.w_k.t(), head.b_k)
    v = F.linear(a_v, head.w_v.t(), head.b_v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def gradient_error(ours: Tensor, f: Callable[[Tensor], Tensor], x: Tensor, delta: Tensor, lab: Lab) -> float:
    """Ours against autograd's ∂(Δ·f(x))/∂x; finite differences, the independent second oracle, must agree as well."""
    floor = 1e-3  # the inputs are of order one: what is smaller has cancelled, and kept the rounding of its terms
    differences = directional_error(lambda x: (f(x) * delta).sum().item(), x, ours, lab.generator, floor)
    error = relative_error(ours, differentiate(f, x, upstream=delta)[0], floor)
    return error if differences < FINITE_DIFFERENCE_TOLERANCE else math.inf


def _parameter_error(name: str, lab: Lab) -> float:
    """The gradient of one parameter of the head."""
    a, head, delta = _draw(lab)
    ours = getattr(attention.backward(delta, a, head, forward_by_torch(a, head)).grads, name)
    return gradient_error(
        ours, lambda x: attention_by_torch(a, a, a, head._replace(**{name: x})), getattr(head, name), delta, lab
    )


# ── the values ──────────────────────────────────────────────────────────────────────────────────────────────────────


@check("E-split", 4, "", IDENTITY)
def two_branches(lab: Lab) -> float:
    """Δ·d(ρ v) = (Δ vᵗ)·dρ + (ρᵗ Δ)·dv: the error splits into a branch of the weights and a branch of the values"""
    n, d = lab.size(3, 8), lab.size(2, 8)
    a, delta, d_rho, d_v = lab.matrix(n, d), lab.matrix(n, d), lab.matrix(n, n), lab.matrix(n, d)
    head = lab.head(d, lab.size(1, 8), d)._replace(w_v=torch.eye(d).double())  # so that Δ_v is ρᵗΔ itself
    saved = forward_by_torch(a, head)
    back = attention.backward(delta, a, head, saved)
    d_a = forward_mode(lambda rho: rho @ saved.v, saved.rho, d_rho)
    d_a += forward_mode(lambda v: saved.rho @ v, saved.v, d_v)
    ours = notation.frobenius(back.delta_rho, d_rho) + notation.frobenius(back.delta_v, d_v)
    return relative_error(ours, (delta * d_a).sum(), floor=(delta * d_a).abs().sum().item())


@check("E-val-branch", 4, "", AUTOGRAD)
def values_are_a_linear_layer(lab: Lab) -> float:
    """the linear layer's rules with ρᵗΔ for Δ: ∂w_v = aᵗρᵗΔ, ∂b_v = Σ_tok ρᵗΔ, Δ_v = ρᵗΔ w_vᵗ; the head's own agree"""
    a, head, delta = _draw(lab)
    saved = forward_by_torch(a, head)
    back = attention.backward(delta, a, head, saved)
    inner = saved.rho.t() @ delta
    truth = differentiate(
        lambda a_v, w, b: attention_by_torch(a, a, a_v, head._replace(w_v=w, b_v=b)),
        a, head.w_v, head.b_v, upstream=delta,
    )  # fmt: skip
    rules = linear.delta_prev(inner, head.w_v), linear.grad_w(inner, a), linear.grad_b(inner)
    own = back.delta_v, back.grads.w_v, back.grads.b_v
    return max(relative_error(x, y) for ours in (rules, own) for x, y in zip(ours, truth, strict=True))


@check("E-dbv-simple", 4, "21", IDENTITY)
def bias_of_the_values_simplified(lab: Lab) -> float:
    """Σ_tok ρᵗΔ = Σ_tok Δ because the rows of ρ sum to 1, masked or not; for rows with other sums it is false"""
    a, head, delta = _draw(lab)
    errors = []
    for causal in (True, False):
        saved = attention.forward(a, head, causal)
        simple = attention.backward(delta, a, head, saved).grads.b_v
        size = delta.abs().sum().item()
        errors.append(relative_error(simple, notation.sum_tokens(saved.rho.t() @ delta), floor=size))
        other = notation.sum_tokens((saved.rho * 1.5).t() @ delta)
        errors.append(unless(relative_error(other, simple), 0.4))  # it is off by exactly one half
    return max(errors)


@check("E-dv", 4, "22", AUTOGRAD)
def error_signal_of_the_values(lab: Lab) -> float:
    """Δ_v = ρᵗ Δ w_vᵗ ∈ (n_T, d): what reaches a_{i−1} through the values alone"""
    a, head, delta = _draw(lab)
    ours = attention.backward(delta, a, head, forward_by_torch(a, head)).delta_v
    return gradient_error(ours, lambda x: attention_by_torch(a, a, x, head), a, delta, lab)


@check("E-dwv", 4, "23", AUTOGRAD)
def gradient_of_the_values_weights(lab: Lab) -> float:
    """∂w_v = (ρ a_{i−1})ᵗ Δ ∈ (d, d_h)"""
    return _parameter_error("w_v", lab)


@check("E-dbv", 4, "24", AUTOGRAD)
def gradient_of_the_values_bias(lab: Lab) -> float:
    """∂b_v = Σ_tok Δ ∈ (d_h), whatever the attention weights are"""
    return _parameter_error("b_v", lab)


# ── the attention weights: softmax, mask, scale ─────────────────────────────────────────────────────────────────────


@check("E-softmax-diff", 4, "", IDENTITY)
def differential_of_softmax(lab: Lab) -> float:
    """dρ = ρ∘(dS − ~(ρ⊖dS)) for ρ = softmax(S): its Jacobian is symmetric, so the rule of Δ_causal computes dρ too"""
    n, m = lab.size(3, 8), lab.size(2, 8)
    s, ds = lab.matrix(n, m), lab.matrix(n, m)
    ours = attention.delta_causal(ds, F.softmax(s, 1))
    return relative_error(ours, forward_mode(lambda s: F.softmax(s, 1), s, ds))


@check("E-attn-dcausal", 4, "25", AUTOGRAD)
def error_signal_before_the_softmax(lab: Lab) -> float:
    """Δ_causal = [Δvᵗ − ~((Δvᵗ)⊖ρ)]∘ρ ∈ (n_T, n_T): the error signal of the masked scores"""
    a, head, delta = _draw(lab)
    saved = forward_by_torch(a, head)
    ours = attention.delta_causal(delta @ saved.v.t(), saved.rho)
    through = attention.backward(delta, a, head, saved).delta_causal
    error = gradient_error(ours, lambda s: F.softmax(s, 1) @ saved.v, saved.causal, delta, lab)
    return max(error, relative_error(through, ours))


@check("P-dcausal-rowsum", 4, "26", IDENTITY)
def rows_of_delta_causal_sum_to_zero(lab: Lab) -> float:
    """each row of Δ_causal sums to 0, as each row of ρ sums to 1: with the −∞ mask, no mask, or the printed 0/1 mask"""
    a, head, delta = _draw(lab)
    scaled = forward_by_torch(a, head).scaled
    errors = []
    for scores in (masked_by_torch(scaled), scaled, scaled.tril()):
        delta_rho = delta @ lab.matrix(len(a), delta.shape[1]).t()
        rows = attention.delta_causal(delta_rho, F.softmax(scores, 1)).sum(1)
        errors.append(relative_error(rows, torch.zeros(len(a)), floor=delta_rho.abs().max().item()))
    return max(errors)


@check("E-dscaled", 4, "27", EXACT)
def the_mask_needs_no_backward(lab: Lab) -> float:
    """Δ_scaled = m∘Δ_causal = Δ_causal exactly: −∞ left 0 in ρ; after the printed 0/1 product it is false (R2)"""
    a, head, delta = _draw(lab)
    saved = attention.forward(a, head)
    back = attention.backward(delta, a, head, saved)
    printed = attention.delta_causal(back.delta_rho, F.softmax(saved.scaled.tril(), 1))
    left_over = printed.triu(1).abs().max().item()
    masked = (back.delta_scaled - back.delta_causal.tril()).abs().max().item()
    return masked + (back.delta_scaled - back.delta_causal).abs().max().item() + unless(left_over, 1e-6)


@check("E-draw", 4, "28", AUTOGRAD)
def error_signal_of_the_raw_scores(lab: Lab) -> float:
    """Δ_raw = Δ_scaled/√d_ρ ∈ (n_T, n_T), and its rows sum to 0 as well"""
    a, head, delta = _draw(lab)
    saved = forward_by_torch(a, head)
    ours = attention.backward(delta, a, head, saved).delta_raw
    root = math.sqrt(saved.q.shape[1])
    error = gradient_error(ours, lambda x: F.softmax(masked_by_torch(x / root), 1) @ saved.v, saved.raw, delta, lab)
    rows = relative_error(ours.sum(1), torch.zeros(len(a)), floor=(delta @ saved.v.t()).abs().max().item())
    return max(error, rows)


# ── the queries and the keys ────────────────────────────────────────────────────────────────────────────────────────


@check("E-qk-split", 4, "", IDENTITY)
def queries_and_keys_part(lab: Lab) -> float:
    """Δ_raw·d(q kᵗ) = (Δ_raw k)·dq + (Δ_rawᵗ q)·dk: the branch of the weights splits once more"""
    n, d = lab.size(3, 8), lab.size(2, 8)
    d_h, eye = lab.size(1, 8), torch.eye(d).double()
    a, delta, d_q, d_k = lab.matrix(n, d), lab.matrix(n, d_h), lab.matrix(n, d), lab.matrix(n, d)
    head = lab.head(d, d, d_h)._replace(w_q=eye, w_k=eye)  # so that Δ_q is Δ_raw k itself, and Δ_k is Δ_rawᵗ q
    saved = forward_by_torch(a, head)
    back = attention.backward(delta, a, head, saved)
    d_raw = forward_mode(lambda q: q @ saved.k.t(), saved.q, d_q)
    d_raw += forward_mode(lambda k: saved.q @ k.t(), saved.k, d_k)
    ours = notation.frobenius(back.delta_q, d_q) + notation.frobenius(back.delta_k, d_k)
    flow = back.delta_raw * d_raw
    return relative_error(ours, flow.sum(), floor=flow.abs().sum().item())


@check("E-dbk-zero", 4, "29", IDENTITY)
def bias_of_the_keys_gets_nothing(lab: Lab) -> float:
    """∂b_k = Σ_tok Δ_rawᵗ q = 0 ∈ (d_ρ), because the rows of Δ_raw sum to 0; moving b_k does not move the loss"""
    a, head, delta = _draw(lab)
    assert head.b_k is not None
    saved = attention.forward(a, head)
    delta_raw = attention.backward(delta, a, head, saved).delta_raw
    size = (delta @ saved.v.t()).abs().max().item() * saved.q.abs().max().item()  # of the terms that cancel
    moved = finite_difference(
        lambda b_k: (attention.forward(a, head._replace(b_k=b_k)).a * delta).sum().item(),
        head.b_k, lab.matrix(*head.b_k.shape),
    )  # fmt: skip
    if abs(moved) > FINITE_DIFFERENCE_TOLERANCE * size:
        return math.inf
    total = notation.sum_tokens(delta_raw.t() @ saved.q)
    return relative_error(total, torch.zeros_like(total), floor=size)


@check("E-dq", 4, "30.a", AUTOGRAD)
def error_signal_of_the_queries(lab: Lab) -> float:
    """Δ_q = Δ_raw k w_qᵗ ∈ (n_T, d): what reaches a_{i−1} through the queries alone"""
    a, head, delta = _draw(lab)
    ours = attention.backward(delta, a, head, forward_by_torch(a, head)).delta_q
    return gradient_error(ours, lambda x: attention_by_torch(x, a, a, head), a, delta, lab)


@check("E-dk", 4, "30.b", AUTOGRAD)
def error_signal_of_the_keys(lab: Lab) -> float:
    """Δ_k = Δ_rawᵗ q w_kᵗ ∈ (n_T, d): what reaches a_{i−1} through the keys alone"""
    a, head, delta = _draw(lab)
    ours = attention.backward(delta, a, head, forward_by_torch(a, head)).delta_k
    return gradient_error(ours, lambda x: attention_by_torch(a, x, a, head), a, delta, lab)


@check("E-dwq", 4, "31.a", AUTOGRAD)
def gradient_of_the_queries_weights(lab: Lab) -> float:
    """∂w_q = a_{i−1}ᵗ Δ_raw k ∈ (d, d_ρ)"""
    return _parameter_error("w_q", lab)


@check("E-dwk", 4, "31.b", AUTOGRAD)
def gradient_of_the_keys_weights(lab: Lab) -> float:
    """∂w_k = (Δ_raw a_{i−1})ᵗ q ∈ (d, d_ρ)"""
    return _parameter_error("w_k", lab)


@check("E-dbq", 4, "32.a", AUTOGRAD)
def gradient_of_the_queries_bias(lab: Lab) -> float:
    """∂b_q = Σ_tok Δ_raw k ∈ (d_ρ)"""
    return _parameter_error("b_q", lab)


@check("E-dbk", 4, "32.b", AUTOGRAD)
def gradient_of_the_keys_bias(lab: Lab) -> float:
    """∂b_k = 0 ∈ (d_ρ), written as exact zeros where autograd has rounding noise (R32); a head without b_k gets none"""
    a, head, delta = _draw(lab)
    assert head.b_k is not None
    saved = forward_by_torch(a, head)
    ours = attention.backward(delta, a, head, saved).grads.b_k
    without = attention.backward(delta, a, head._replace(b_k=None), saved).grads.b_k
    truth = differentiate(lambda b: attention_by_torch(a, a, a, head._replace(b_k=b)), head.b_k, upstream=delta)[0]
    if ours is None or without is not None or ours.count_nonzero() > 0:
        return math.inf
    size = (delta @ saved.v.t()).abs().max().item() * saved.q.abs().max().item()
    return relative_error(ours, truth, floor=size)


# ── all of it ───────────────────────────────────────────────────────────────────────────────────────────────────────


@check("E-head-dx", 4, "33", AUTOGRAD)
def error_signal_of_the_head(lab: Lab) -> float:
    """Δ^h_{i−1} = Δ_v + Δ_q + Δ_k ∈ (n_T, d): the three branches that end at a_{i−1}, added"""
    a, head, delta = _draw(lab)
    ours = attention.backward(delta, a, head, forward_by_torch(a, head)).delta
    return gradient_error(ours, lambda x: attention_by_torch(x, x, x, head), a, delta, lab)


@check("D-table1", 4, "Table 1", AUTOGRAD)
def table_1(lab: Lab) -> float:
    """Table 1 as one pipeline: all rows down, all Δ up, all gradients; the terminal Δ_v, Δ_q, Δ_k end at a_{i−1}"""
    a, head, delta = _draw(lab)
    if lab.size(0, 1):
        head = head._replace(b_k=None)
    saved, exact = attention.forward(a, head), forward_by_torch(a, head)
    back = attention.backward(delta, a, head, saved)
    root = math.sqrt(saved.q.shape[1])

    down = [relative_error(x, y) for x, y in zip(saved, exact, strict=True) if x is not saved.causal]  # it holds −∞
    down.append(mismatch((saved.causal.isinf().tolist(), exact.causal.isinf().tolist())))

    tails: list[tuple[Tensor, Callable[[Tensor], Tensor], Tensor]] = [
        (back.delta_rho, lambda rho: rho @ exact.v, exact.rho),
        (back.delta_causal, lambda s: F.softmax(s, 1) @ exact.v, exact.causal),
        (back.delta_scaled, lambda s: F.softmax(masked_by_torch(s), 1) @ exact.v, exact.scaled),
        (back.delta_raw, lambda s: F.softmax(masked_by_torch(s / root), 1) @ exact.v, exact.raw),
        (back.delta_v, lambda x: attention_by_torch(a, a, x, head), a),
        (back.delta_q, lambda x: attention_by_torch(x, a, a, head), a),
        (back.delta_k, lambda x: attention_by_torch(a, x, a, head), a),
        (back.delta, lambda x: attention_by_torch(x, x, x, head), a),
    ]
    up = [relative_error(ours, differentiate(f, x, upstream=delta)[0]) for ours, f, x in tails]

    names = ["w_q", "b_q", "w_k", "w_v", "b_v"]  # b_k has E-dbk: its gradient is 0, and autograd's is rounding noise
    truths = differentiate(
        lambda *x: attention_by_torch(a, a, a, head._replace(**dict(zip(names, x, strict=True)))),
        *(getattr(head, name) for name in names), upstream=delta,
    )  # fmt: skip
    grads = [relative_error(getattr(back.grads, name), y) for name, y in zip(names, truths, strict=True)]
    return max(*down, *up, *grads)

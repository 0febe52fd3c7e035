"""Section 3.2: one head of self-attention, backward (Table 1).

Each gradient is compared with that of torch's own attention. The saved forward pass is torch's too, so that a mistake
in the forward formulas does not fail here; only the checks about the mask, and D-table1, run the paper's forward pass.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import attention, linear, notation
from ..paper.attention import Head
from ..proof.oracles import differentiate, finite_difference, forward_mode, relative_error
from ..tolerances import FINITE_DIFFERENCE_TOLERANCE
from . import by_torch
from .check import AUTOGRAD, EXACT, IDENTITY, RandomInputs, check, gradient_error, mismatch, shortfall


def _inputs(rng: RandomInputs) -> tuple[Tensor, Head, Tensor]:
    """a (n_T, d), a head with independent d, d_ρ and d_h, and an upstream Δ (n_T, d_h)"""
    n, d, d_rho, d_h = rng.size(3, 8), rng.size(2, 8), rng.size(2, 8), rng.size(1, 8)  # d_ρ = 1 would hide the √d_ρ
    return rng.matrix(n, d), rng.head(d, d_rho, d_h), rng.matrix(n, d_h)


def _signal_error(name: str, through: str, rng: RandomInputs) -> float:
    """The error of one Δ of the head: that of its input through queries, keys or values, by their letters."""
    a, head, delta = _inputs(rng)
    ours = getattr(attention.backward(delta, a, head, by_torch.head_forward(a, head)), name)
    return gradient_error(ours, lambda x: _output(x, a, head, through), a, delta, rng)


def _output(x: Tensor, a: Tensor, head: Head, through: str) -> Tensor:
    """The head's output with x as its input where queries, keys or values are computed, and a elsewhere."""
    a_q, a_k, a_v = (x if letter in through else a for letter in "qkv")
    return by_torch.head_output(a_q, a_k, a_v, head)


def _parameter_error(name: str, rng: RandomInputs) -> float:
    """The error of the gradient of one parameter of the head."""
    a, head, delta = _inputs(rng)
    ours = getattr(attention.backward(delta, a, head, by_torch.head_forward(a, head)).grads, name)
    return gradient_error(
        ours, lambda x: by_torch.head_output(a, a, a, head._replace(**{name: x})), getattr(head, name), delta, rng
    )


# ── the values ──────────────────────────────────────────────────────────────────────────────────────────────────────


@check("E-split", 4, "", IDENTITY)
def two_branches(rng: RandomInputs) -> float:
    """Δ·d(ρ v) = (Δ vᵗ)·dρ + (ρᵗ Δ)·dv: the error splits into a branch of the weights and a branch of the values"""
    n, d = rng.size(3, 8), rng.size(2, 8)
    a, delta, d_rho, d_v = rng.matrix(n, d), rng.matrix(n, d), rng.matrix(n, n), rng.matrix(n, d)
    head = rng.head(d, rng.size(1, 8), d)._replace(w_v=torch.eye(d).double())  # so that Δ_v = ρᵗΔ
    saved = by_torch.head_forward(a, head)
    back = attention.backward(delta, a, head, saved)
    d_a = forward_mode(lambda rho: rho @ saved.v, saved.rho, d_rho)
    d_a += forward_mode(lambda v: saved.rho @ v, saved.v, d_v)
    ours = notation.frobenius(back.delta_rho, d_rho) + notation.frobenius(back.delta_v, d_v)
    return relative_error(ours, (delta * d_a).sum(), floor=(delta * d_a).abs().sum().item())


@check("E-val-branch", 4, "", AUTOGRAD)
def values_are_a_linear_layer(rng: RandomInputs) -> float:
    """the linear layer's rules with ρᵗΔ for Δ: ∂w_v = aᵗρᵗΔ, ∂b_v = Σ_tok ρᵗΔ, Δ_v = ρᵗΔ w_vᵗ; the head's formulas agree"""
    a, head, delta = _inputs(rng)
    saved = by_torch.head_forward(a, head)
    back = attention.backward(delta, a, head, saved)
    inner = saved.rho.t() @ delta
    expected = differentiate(
        lambda a_v, w, b: by_torch.head_output(a, a, a_v, head._replace(w_v=w, b_v=b)),
        a, head.w_v, head.b_v, upstream=delta,
    )  # fmt: skip
    rules = linear.delta_prev(inner, head.w_v), linear.grad_w(inner, a), linear.grad_b(inner)
    head_formulas = back.delta_v, back.grads.w_v, back.grads.b_v
    return max(relative_error(x, y) for ours in (rules, head_formulas) for x, y in zip(ours, expected, strict=True))


@check("E-dbv-simple", 4, "21", IDENTITY)
def bias_of_the_values_simplified(rng: RandomInputs) -> float:
    """Σ_tok ρᵗΔ = Σ_tok Δ because the rows of ρ sum to 1, masked or not; for rows with other sums it does not hold"""
    a, head, delta = _inputs(rng)
    errors = []
    for causal in (True, False):
        saved = attention.forward(a, head, causal)
        simple = attention.backward(delta, a, head, saved).grads.b_v
        size = delta.abs().sum().item()
        errors.append(relative_error(simple, notation.sum_tokens(saved.rho.t() @ delta), floor=size))
        other = notation.sum_tokens((saved.rho * 1.5).t() @ delta)
        errors.append(shortfall(relative_error(other, simple), 0.4))  # off by exactly one half
    return max(errors)


check("E-dv", 4, "22", AUTOGRAD, "Δ_v = ρᵗ Δ w_vᵗ ∈ (n_T, d): the error signal of a_{i−1} through the values only")(
    partial(_signal_error, "delta_v", "v")
)
check("E-dwv", 4, "23", AUTOGRAD, "∂w_v = (ρ a_{i−1})ᵗ Δ ∈ (d, d_h)")(partial(_parameter_error, "w_v"))
check("E-dbv", 4, "24", AUTOGRAD, "∂b_v = Σ_tok Δ ∈ (d_h), for any attention weights")(partial(_parameter_error, "b_v"))


# ── the attention weights: softmax, mask, scale ─────────────────────────────────────────────────────────────────────


@check("E-softmax-diff", 4, "", IDENTITY)
def differential_of_softmax(rng: RandomInputs) -> float:
    """dρ = ρ∘(dS − ~(ρ⊖dS)) for ρ = softmax(S): its Jacobian is symmetric, so the rule of Δ_causal computes dρ too"""
    n, m = rng.size(3, 8), rng.size(2, 8)
    s, ds = rng.matrix(n, m), rng.matrix(n, m)
    ours = attention.delta_causal(ds, F.softmax(s, 1))
    return relative_error(ours, forward_mode(lambda s: F.softmax(s, 1), s, ds))


@check("E-attn-dcausal", 4, "25", AUTOGRAD)
def error_signal_before_the_softmax(rng: RandomInputs) -> float:
    """Δ_causal = [Δvᵗ − ~((Δvᵗ)⊖ρ)]∘ρ ∈ (n_T, n_T): the error signal of the masked scores"""
    a, head, delta = _inputs(rng)
    saved = by_torch.head_forward(a, head)
    ours = attention.delta_causal(delta @ saved.v.t(), saved.rho)
    through = attention.backward(delta, a, head, saved).delta_causal
    error = gradient_error(ours, lambda s: F.softmax(s, 1) @ saved.v, saved.causal, delta, rng)
    return max(error, relative_error(through, ours))


@check("P-dcausal-rowsum", 4, "26", IDENTITY)
def rows_of_delta_causal_sum_to_zero(rng: RandomInputs) -> float:
    """each row of Δ_causal sums to 0, as each row of ρ sums to 1: with the −∞ mask, no mask, or the printed 0/1 mask"""
    a, head, delta = _inputs(rng)
    scaled = by_torch.head_forward(a, head).scaled
    errors = []
    for scores in (by_torch.masked(scaled), scaled, scaled.tril()):
        delta_rho = delta @ rng.matrix(len(a), delta.shape[1]).t()
        rows = attention.delta_causal(delta_rho, F.softmax(scores, 1)).sum(1)
        errors.append(relative_error(rows, torch.zeros(len(a)), floor=delta_rho.abs().max().item()))
    return max(errors)


@check("E-dscaled", 4, "27", EXACT)
def the_mask_needs_no_backward(rng: RandomInputs) -> float:
    """Δ_scaled = m∘Δ_causal = Δ_causal exactly: −∞ makes ρ exactly 0; with the printed 0/1 product it does not hold (R2)"""
    a, head, delta = _inputs(rng)
    saved = attention.forward(a, head)
    back = attention.backward(delta, a, head, saved)
    printed = attention.delta_causal(back.delta_rho, F.softmax(saved.scaled.tril(), 1))
    remaining = printed.triu(1).abs().max().item()
    masked = (back.delta_scaled - back.delta_causal.tril()).abs().max().item()
    return masked + (back.delta_scaled - back.delta_causal).abs().max().item() + shortfall(remaining, 1e-6)


@check("E-draw", 4, "28", AUTOGRAD)
def error_signal_of_the_raw_scores(rng: RandomInputs) -> float:
    """Δ_raw = Δ_scaled/√d_ρ ∈ (n_T, n_T), and its rows sum to 0 as well"""
    a, head, delta = _inputs(rng)
    saved = by_torch.head_forward(a, head)
    ours = attention.backward(delta, a, head, saved).delta_raw
    root = math.sqrt(saved.q.shape[1])
    error = gradient_error(ours, lambda x: F.softmax(by_torch.masked(x / root), 1) @ saved.v, saved.raw, delta, rng)
    rows = relative_error(ours.sum(1), torch.zeros(len(a)), floor=(delta @ saved.v.t()).abs().max().item())
    return max(error, rows)


# ── the queries and the keys ────────────────────────────────────────────────────────────────────────────────────────


@check("E-qk-split", 4, "", IDENTITY)
def queries_and_keys_split(rng: RandomInputs) -> float:
    """Δ_raw·d(q kᵗ) = (Δ_raw k)·dq + (Δ_rawᵗ q)·dk: the branch of the weights splits into two"""
    n, d = rng.size(3, 8), rng.size(2, 8)
    d_h, eye = rng.size(1, 8), torch.eye(d).double()
    a, delta, d_q, d_k = rng.matrix(n, d), rng.matrix(n, d_h), rng.matrix(n, d), rng.matrix(n, d)
    head = rng.head(d, d, d_h)._replace(w_q=eye, w_k=eye)  # so that Δ_q = Δ_raw k and Δ_k = Δ_rawᵗ q
    saved = by_torch.head_forward(a, head)
    back = attention.backward(delta, a, head, saved)
    d_raw = forward_mode(lambda q: q @ saved.k.t(), saved.q, d_q)
    d_raw += forward_mode(lambda k: saved.q @ k.t(), saved.k, d_k)
    ours = notation.frobenius(back.delta_q, d_q) + notation.frobenius(back.delta_k, d_k)
    flow = back.delta_raw * d_raw
    return relative_error(ours, flow.sum(), floor=flow.abs().sum().item())


@check("E-dbk-zero", 4, "29", IDENTITY)
def bias_of_the_keys_gets_no_gradient(rng: RandomInputs) -> float:
    """∂b_k = Σ_tok Δ_rawᵗ q = 0 ∈ (d_ρ), because the rows of Δ_raw sum to 0; changing b_k does not change the loss"""
    a, head, delta = _inputs(rng)
    assert head.b_k is not None
    saved = attention.forward(a, head)
    delta_raw = attention.backward(delta, a, head, saved).delta_raw
    size = (delta @ saved.v.t()).abs().max().item() * saved.q.abs().max().item()  # of the terms that cancel
    change = finite_difference(
        lambda b_k: (attention.forward(a, head._replace(b_k=b_k)).a * delta).sum().item(),
        head.b_k, rng.matrix(*head.b_k.shape),
    )  # fmt: skip
    if abs(change) > FINITE_DIFFERENCE_TOLERANCE * size:
        return math.inf
    total = notation.sum_tokens(delta_raw.t() @ saved.q)
    return relative_error(total, torch.zeros_like(total), floor=size)


check(
    "E-dq", 4, "30.a", AUTOGRAD, "Δ_q = Δ_raw k w_qᵗ ∈ (n_T, d): the error signal of a_{i−1} through the queries only"
)(partial(_signal_error, "delta_q", "q"))
check("E-dk", 4, "30.b", AUTOGRAD, "Δ_k = Δ_rawᵗ q w_kᵗ ∈ (n_T, d): the error signal of a_{i−1} through the keys only")(
    partial(_signal_error, "delta_k", "k")
)
check("E-dwq", 4, "31.a", AUTOGRAD, "∂w_q = a_{i−1}ᵗ Δ_raw k ∈ (d, d_ρ)")(partial(_parameter_error, "w_q"))
check("E-dwk", 4, "31.b", AUTOGRAD, "∂w_k = (Δ_raw a_{i−1})ᵗ q ∈ (d, d_ρ)")(partial(_parameter_error, "w_k"))
check("E-dbq", 4, "32.a", AUTOGRAD, "∂b_q = Σ_tok Δ_raw k ∈ (d_ρ)")(partial(_parameter_error, "b_q"))


@check("E-dbk", 4, "32.b", AUTOGRAD)
def gradient_of_the_keys_bias(rng: RandomInputs) -> float:
    """∂b_k = 0 ∈ (d_ρ), written as exact zeros where autograd has rounding errors (R32); a head without b_k gets none"""
    a, head, delta = _inputs(rng)
    assert head.b_k is not None
    saved = by_torch.head_forward(a, head)
    ours = attention.backward(delta, a, head, saved).grads.b_k
    without = attention.backward(delta, a, head._replace(b_k=None), saved).grads.b_k
    expected = differentiate(lambda b: by_torch.head_output(a, a, a, head._replace(b_k=b)), head.b_k, upstream=delta)[0]
    if ours is None or without is not None or ours.count_nonzero() > 0:
        return math.inf
    size = (delta @ saved.v.t()).abs().max().item() * saved.q.abs().max().item()
    return relative_error(ours, expected, floor=size)


# ── the complete head ───────────────────────────────────────────────────────────────────────────────────────────────


check(
    "E-head-dx",
    4,
    "33",
    AUTOGRAD,
    "Δ^h_{i−1} = Δ_v + Δ_q + Δ_k ∈ (n_T, d): the three branches that end at a_{i−1}, added",
)(partial(_signal_error, "delta", "qkv"))


@check("D-table1", 4, "Table 1", AUTOGRAD)
def table_1(rng: RandomInputs) -> float:
    """Table 1 as one pass: every forward row, every Δ, every gradient; Δ_v, Δ_q and Δ_k end at a_{i−1}"""
    a, head, delta = _inputs(rng)
    if rng.size(0, 1):
        head = head._replace(b_k=None)
    saved, exact = attention.forward(a, head), by_torch.head_forward(a, head)
    back = attention.backward(delta, a, head, saved)
    root = math.sqrt(saved.q.shape[1])

    # ρ_causal holds −∞
    forward_errors = [relative_error(x, y) for x, y in zip(saved, exact, strict=True) if x is not saved.causal]
    forward_errors.append(mismatch((saved.causal.isinf().tolist(), exact.causal.isinf().tolist())))

    signals: list[tuple[Tensor, Callable[[Tensor], Tensor], Tensor]] = [
        (back.delta_rho, lambda rho: rho @ exact.v, exact.rho),
        (back.delta_causal, lambda s: F.softmax(s, 1) @ exact.v, exact.causal),
        (back.delta_scaled, lambda s: F.softmax(by_torch.masked(s), 1) @ exact.v, exact.scaled),
        (back.delta_raw, lambda s: F.softmax(by_torch.masked(s / root), 1) @ exact.v, exact.raw),
        (back.delta_v, lambda x: _output(x, a, head, "v"), a),
        (back.delta_q, lambda x: _output(x, a, head, "q"), a),
        (back.delta_k, lambda x: _output(x, a, head, "k"), a),
        (back.delta, lambda x: _output(x, a, head, "qkv"), a),
    ]
    signal_errors = [relative_error(ours, differentiate(f, x, upstream=delta)[0]) for ours, f, x in signals]

    names = ["w_q", "b_q", "w_k", "w_v", "b_v"]  # b_k has E-dbk: its gradient is 0, and autograd's is rounding
    expected_grads = differentiate(
        lambda *x: by_torch.head_output(a, a, a, head._replace(**dict(zip(names, x, strict=True)))),
        *(getattr(head, name) for name in names), upstream=delta,
    )  # fmt: skip
    gradient_errors = [
        relative_error(getattr(back.grads, name), y) for name, y in zip(names, expected_grads, strict=True)
    ]
    return max(*forward_errors, *signal_errors, *gradient_errors)

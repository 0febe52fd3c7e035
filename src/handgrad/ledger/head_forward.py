"""Section 3.1: the forward pass of one head, from the paper's three attempts at attention weights to its output."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import attention, notation
from ..paper.attention import Head
from ..proof.oracles import differentiate, forward_mode, relative_error
from . import by_torch
from .check import (
    AUTOGRAD,
    EXACT,
    IDENTITY,
    SAMPLED,
    RandomInputs,
    check,
    disagreement,
    mismatch,
    raises,
    shortfall,
)


def head_inputs(rng: RandomInputs, n_least: int = 3) -> tuple[Tensor, Head]:
    """a (n_T, d) and a head with independent d, d_ρ and d_h"""
    n, d, d_rho, d_h = rng.size(n_least, 8), rng.size(2, 8), rng.size(2, 8), rng.size(1, 8)
    return rng.matrix(n, d), rng.head(d, d_rho, d_h)


def _forward(rng: RandomInputs) -> attention.Forward:
    """The forward pass of a random head on a random input."""
    return attention.forward(*head_inputs(rng))


def output_by_torch(a: Tensor, *parameters: Tensor) -> Tensor:
    """torch's causal attention for one head; its parameters are separate arguments, to be differentiated"""
    q, k, v = (x[None] for x in by_torch.project(a, Head(*parameters)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]


# ── values, and the weighted sums of them ───────────────────────────────────────────────────────────────────────────


@check("E-val-fwd", 3, "4", IDENTITY)
def values(rng: RandomInputs) -> float:
    """v = a_{i−1} w_v + b_v~ ∈ (n_T, d_h) with w_v ∈ (d, d_h) and b_v ∈ (d_h)"""
    a, head = head_inputs(rng)
    return relative_error(attention.forward(a, head).v, F.linear(a, head.w_v.t(), head.b_v))


@check("P-val-indep", 3, "", EXACT)
def values_depend_on_one_token(rng: RandomInputs) -> float:
    """v(t), q(t) and k(t) depend on a_{i−1}(t) only: their Jacobians are block-diagonal in the tokens"""
    a, head = head_inputs(rng)
    error = 0.0
    for t in range(len(a)):
        da = torch.zeros_like(a)
        da[t] = rng.matrix(a.shape[1])
        change = forward_mode(lambda x: torch.cat(attention.forward(x, head)[:3], 1), a, da).abs().amax(1)
        others = torch.cat([change[:t], change[t + 1 :]])
        error = max(error, others.max().item(), shortfall(change[t].item(), 1e-9))
    return error


def _weighted(t: int, rng: RandomInputs) -> float:
    """The error of row t of a_i^h against its weighted sum of values, and of the sum of the weights against 1."""
    a, head = head_inputs(rng, n_least=4)
    f = attention.forward(a, head)
    t = t % len(a)
    average = torch.zeros_like(f.v[0])
    for beta in range(t + 1):
        average += f.rho[t, beta] * f.v[beta]
    weights = f.rho[t, : t + 1].sum()
    return max(relative_error(f.a[t], average, floor=f.v.abs().max().item()), abs(weights.item() - 1))


for _id, _equation, _t, _statement in (
    ("E-weighted-1", "5.a", 0, "a_i^h(1) = ρ_11 v(1) with ρ_11 = 1: the first token has no context"),
    ("E-weighted-2", "5.b", 1, "a_i^h(2) = ρ_21 v(1) + ρ_22 v(2) with ρ_21 + ρ_22 = 1"),
    ("E-weighted-3", "5.c", 2, "a_i^h(3) = ρ_31 v(1) + ρ_32 v(2) + ρ_33 v(3) with ρ_31 + ρ_32 + ρ_33 = 1"),
    ("E-weighted-4", "5.d", -1, "a_i^h(n_T) = Σ_β ρ_{n_T β} v(β) over all tokens, with weights that sum to 1"),
):
    check(_id, 3, _equation, IDENTITY, _statement)(partial(_weighted, _t))


@check("E-out-tri", 3, "6", EXACT)
def lower_triangular(rng: RandomInputs) -> float:
    """a_i^h = ρ v with ρ ∈ (n_T, n_T) lower triangular: exactly 0 for β > α, positive for β ≤ α"""
    f = _forward(rng)
    n = len(f.rho)
    below = torch.ones(n, n).tril().bool()
    future = f.rho.masked_fill(below, 0).abs().max().item()
    return future + shortfall(f.rho[below].min().item(), 1e-30) + (f.a - f.rho.tril() @ f.v).abs().max().item()


# ── three attempts ──────────────────────────────────────────────────────────────────────────────────────────────────


@check("P-try1", 3, "", IDENTITY)
def attempt_without_parameters(rng: RandomInputs) -> float:
    """attempt 1, ρ = a aᵗ: the scores of w_q = w_k = I, without parameters; ρ_αα is 1 only for rows of length 1"""
    a, head = head_inputs(rng)
    d = a.shape[1]
    unit = a / a.norm(dim=1, keepdim=True)
    one, zero = torch.eye(d).double(), torch.zeros(d).double()
    plain = head._replace(w_q=one, b_q=zero, w_k=one, b_k=zero)
    raw = attention.forward(a, plain).raw
    aligned, longer = attention.forward(unit, plain).raw.diag(), attention.forward(2 * unit, plain).raw.diag()
    return max(
        relative_error(raw, torch.einsum("td,sd->ts", a, a)),
        relative_error(aligned, torch.ones(len(a))),
        relative_error(longer, 4 * torch.ones(len(a))),
    )


@check("P-try2-sym", 3, "", IDENTITY)
def attempt_with_queries_only(rng: RandomInputs) -> float:
    """attempt 2, ρ = q qᵗ: symmetric for any w_q and b_q, because both sides use them"""
    a, head = head_inputs(rng)
    f = attention.forward(a, head._replace(w_k=head.w_q, b_k=head.b_q))
    return max(relative_error(f.raw, f.raw.t()), relative_error(f.raw.diag(), (f.q**2).sum(1)))


@check("E-pair", 3, "7", IDENTITY)
def pair_of_tokens(rng: RandomInputs) -> float:
    """attempt 3, ρ_αβ = q(α)·k(β), one number per pair of tokens"""
    f = _forward(rng)
    pairs = torch.stack([torch.stack([torch.dot(q, k) for k in f.k]) for q in f.q])
    return relative_error(f.raw, pairs)


@check("P-try3-asym", 3, "", IDENTITY)
def attempt_with_keys(rng: RandomInputs) -> tuple[float, str]:
    """q kᵗ is in general not symmetric; unequal parameters do not guarantee it: w_k = 2w_q, b_k = 2b_q is symmetric"""
    a, head = head_inputs(rng)
    raw = attention.forward(a, head).raw
    doubled = attention.forward(a, head._replace(w_k=2 * head.w_q, b_k=2 * head.b_q)).raw
    gap = relative_error(raw, raw.t())
    return max(shortfall(gap, 1e-3), relative_error(doubled, doubled.t())), f"|ρ_αβ − ρ_βα| reaches {gap:.2f} of max|ρ|"


# ── queries, keys, raw weights ──────────────────────────────────────────────────────────────────────────────────────


@check("D-qk", 3, "8", EXACT)
def shapes_of_queries_and_keys(rng: RandomInputs) -> float:
    """q, k ∈ (n_T, d_ρ) from w_q, w_k ∈ (d, d_ρ) and b_q, b_k ∈ (d_ρ); keys of another width are an error"""
    a, head = head_inputs(rng)
    (n, d), d_rho = a.shape, len(head.b_q)
    f = attention.forward(a, head)
    wider = head._replace(w_k=rng.matrix(d, d_rho + 1), b_k=rng.matrix(d_rho + 1))
    rejected = raises(RuntimeError, lambda: attention.forward(a, wider))
    return mismatch((f.q.shape, (n, d_rho)), (f.k.shape, (n, d_rho)), (rejected, True))


@check("E-q-fwd", 3, "9.a", IDENTITY)
def queries(rng: RandomInputs) -> float:
    """q = a_{i−1} w_q + b_q~"""
    a, head = head_inputs(rng)
    return relative_error(attention.forward(a, head).q, F.linear(a, head.w_q.t(), head.b_q))


@check("E-k-fwd", 3, "9.b", IDENTITY)
def keys(rng: RandomInputs) -> float:
    """k = a_{i−1} w_k + b_k~, and a_{i−1} w_k without b_k"""
    a, head = head_inputs(rng)
    bare = attention.forward(a, head._replace(b_k=None)).k
    return max(
        relative_error(attention.forward(a, head).k, F.linear(a, head.w_k.t(), head.b_k)),
        relative_error(bare, F.linear(a, head.w_k.t())),
    )


@check("E-raw", 3, "10", IDENTITY)
def raw_weights(rng: RandomInputs) -> float:
    """ρ_raw = q kᵗ ∈ (n_T, n_T)"""
    f = _forward(rng)
    return relative_error(f.raw, torch.einsum("tr,sr->ts", f.q, f.k))


@check("E-raw-row", 3, "11", IDENTITY)
def attention_vector(rng: RandomInputs) -> float:
    """row t* of ρ_raw ∈ (n_T) holds the weights of token t* with all tokens: k q(t*)"""
    f = _forward(rng)
    t = rng.size(0, len(f.raw) - 1)
    return relative_error(f.raw[t], torch.mv(f.k, f.q[t]), floor=f.raw.abs().max().item())


@check("P-drho-free", 3, "", AUTOGRAD)
def widths_are_independent(rng: RandomInputs) -> float:
    """d_ρ need not be d_h and may differ from head to head; ρ is (n_T, n_T) and all gradients are exact nevertheless"""
    n, d = rng.size(3, 6), rng.size(2, 6)
    a = rng.matrix(n, d)
    errors = []
    for d_rho, d_h in ((4, 4), (3, 5), (7, 2), (1, 1), (rng.size(1, 8), rng.size(1, 8))):
        head, delta = rng.head(d, d_rho, d_h), rng.matrix(n, d_h)
        f = attention.forward(a, head)
        back = attention.backward(delta, a, head, f)
        expected = differentiate(output_by_torch, a, *tensors_of(head), upstream=delta)
        errors.append(mismatch((f.rho.shape, (n, n)), (f.a.shape, (n, d_h))))
        errors += [
            _absolute_below_one(g, t) for g, t in zip((back.delta, *tensors_of(back.grads)), expected, strict=True)
        ]

    heads = [rng.head(d, *widths) for widths in ((3, 2), (5, 2), (1, 4))]
    delta = rng.matrix(n, 8)
    back_all = attention.backward_heads(delta, a, heads, attention.forward_heads(a, heads))
    (signal,) = differentiate(
        lambda x: torch.cat([output_by_torch(x, *tensors_of(h)) for h in heads], 1), a, upstream=delta
    )
    disagrees = disagreement(lambda x: attention.forward_heads(x, heads).a, a, back_all.delta, delta, rng)
    return max(*errors, _absolute_below_one(back_all.delta, signal), disagrees)


def tensors_of(head: Head) -> tuple[Tensor, ...]:
    """The parameters of a head, without a missing b_k."""
    return tuple(p for p in head if p is not None)


def _absolute_below_one(ours: Tensor, expected: Tensor) -> float:
    """The relative error, absolute for values below 1: ∂b_k is 0, and autograd's is rounding."""
    return relative_error(ours, expected, floor=1.0)


# ── scale, mask, softmax ────────────────────────────────────────────────────────────────────────────────────────────


@check("P-var-drho", 3, "", SAMPLED)
def variance_of_the_weights(rng: RandomInputs) -> tuple[float, str]:
    """independent standard normal q and k: ρ_raw has mean 0 and variance d_ρ, ρ_scaled has variance 1"""
    errors, variances = [], []
    for d_rho, n in ((1, 100_000), (4, 50_000), (16, 25_000)):
        raw = notation.row_dot(rng.matrix(n, d_rho), rng.matrix(n, d_rho))
        scaled = attention.scale(raw, d_rho)
        errors += [scaled.mean().abs().item(), abs(raw.var().item() / d_rho - 1), abs(scaled.var().item() - 1)]
        variances.append(f"{raw.var().item():.2f}")
    return max(errors), f"variance of ρ_raw for d_ρ = 1, 4, 16: {', '.join(variances)}"


@check("E-scaled", 3, "12", IDENTITY)
def scaled_weights(rng: RandomInputs) -> float:
    """ρ_scaled = ρ_raw / √d_ρ, with the d_ρ of this head, not its d_h or d"""
    d_rho = rng.size(2, 6)
    a = rng.matrix(rng.size(3, 8), d_rho + 1)
    f = attention.forward(a, rng.head(d_rho + 1, d_rho, d_rho + 2))
    return relative_error(f.scaled, f.raw * d_rho**-0.5)


@check("E-mask", 3, "13", EXACT)
def causal_mask(rng: RandomInputs) -> tuple[float, str]:
    """ρ_causal = ρ_scaled on and below the diagonal, −∞ above it; the printed 0/1 product does not hide the future"""
    n = rng.size(3, 8)
    scaled = rng.matrix(n, n)
    past = torch.tensor([[beta <= alpha for beta in range(n)] for alpha in range(n)])
    masked = attention.mask(scaled)
    leaked = F.softmax(past * scaled, 1)[0, 1:].sum().item()
    error = mismatch((torch.equal(masked, torch.where(past, scaled, -math.inf)), True)) + shortfall(leaked, 1e-3)
    return error, f"as printed, row 1 puts {leaked:.0%} of its weight on the future"


@check("E-rho-row", 3, "", IDENTITY)
def weights_of_one_token(rng: RandomInputs) -> float:
    """ρ(t*) = softmax of row t* of ρ_causal, a probability distribution in (n_T)"""
    f = _forward(rng)
    return max(relative_error(f.rho[t], F.softmax(f.causal[t], 0)) for t in range(len(f.rho)))


@check("P-rowsum", 3, "14", IDENTITY)
def weights_sum_to_one(rng: RandomInputs) -> float:
    """Σ_t' ρ_{t* t'} = 1 with weights ≥ 0 for every token, with and without the mask"""
    a, head = head_inputs(rng)
    rhos = [attention.forward(a, head, causal).rho for causal in (True, False)]
    return max(max(relative_error(rho.sum(1), torch.ones(len(a))), (rho < 0).sum().item()) for rho in rhos)


@check("E-rho", 3, "15", IDENTITY)
def attention_matrix(rng: RandomInputs) -> float:
    """ρ = row-wise softmax of ρ_causal, exactly 0 above the diagonal"""
    f = _forward(rng)
    return max(relative_error(f.rho, F.softmax(f.causal, 1)), f.rho.triu(1).abs().max().item())


@check("E-attn-out", 3, "16", IDENTITY)
def output(rng: RandomInputs) -> float:
    """a_i^h = ρ v ∈ (n_T, d_h)"""
    f = _forward(rng)
    return relative_error(f.a, torch.einsum("ts,sh->th", f.rho, f.v))

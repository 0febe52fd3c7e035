"""Section 3.1: the forward pass of one head, from the paper's three attempts at attention weights to composed layers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...paper import attention, linear, notation
from ...paper.attention import Head
from ..oracles import count_multiply_adds, differentiate, forward_mode, relative_error
from . import by_torch
from .check import (
    AUTOGRAD,
    COUNTED,
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


def _inputs(rng: RandomInputs, n_least: int = 3) -> tuple[Tensor, Head]:
    """a (n_T, d) and a head with independent d, d_ρ and d_h"""
    n, d, d_rho, d_h = rng.size(n_least, 8), rng.size(2, 8), rng.size(2, 8), rng.size(1, 8)
    return rng.matrix(n, d), rng.head(d, d_rho, d_h)


def _forward(rng: RandomInputs) -> attention.Forward:
    """The forward pass of a random head on a random input."""
    return attention.forward(*_inputs(rng))


def _unsaturated(rng: RandomInputs) -> tuple[Tensor, Head]:
    """A head far from saturation, so that every influence on its weights is measurable."""
    n, d = rng.size(5, 8), rng.size(3, 6)
    head = rng.head(d, rng.size(3, 6), rng.size(3, 6))
    return rng.matrix(n, d), head._replace(w_q=head.w_q / 2, b_q=head.b_q / 2, w_k=head.w_k / 2)


def _by_torch(a: Tensor, *parameters: Tensor) -> Tensor:
    """torch's causal attention for one head; its parameters are separate arguments, to be differentiated"""
    q, k, v = (x[None] for x in by_torch.project(a, Head(*parameters)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]


def _change(after: attention.Forward, before: attention.Forward) -> float:
    """Change of the output, relative to the largest value."""
    return relative_error(after.a, before.a, floor=before.v.abs().max().item())


# ── values, and the weighted sums of them ───────────────────────────────────────────────────────────────────────────


@check("E-val-fwd", 3, "4", IDENTITY)
def values(rng: RandomInputs) -> float:
    """v = a_{i−1} w_v + b_v~ ∈ (n_T, d_h) with w_v ∈ (d, d_h) and b_v ∈ (d_h)"""
    a, head = _inputs(rng)
    return relative_error(attention.forward(a, head).v, F.linear(a, head.w_v.t(), head.b_v))


@check("P-val-indep", 3, "", EXACT)
def values_depend_on_one_token(rng: RandomInputs) -> float:
    """v(t), q(t) and k(t) depend on a_{i−1}(t) only: their Jacobians are block-diagonal in the tokens"""
    a, head = _inputs(rng)
    error = 0.0
    for t in range(len(a)):
        da = torch.zeros_like(a)
        da[t] = rng.matrix(a.shape[1])
        change = forward_mode(lambda x: torch.cat(attention.forward(x, head)[:3], 1), a, da).abs().amax(1)
        others = torch.cat([change[:t], change[t + 1 :]])
        error = max(error, others.max().item(), shortfall(change[t].item(), 1e-9))
    return error


def _weighted(rng: RandomInputs, t: int) -> float:
    """The error of row t of a_i^h against its weighted sum of values, and of the sum of the weights against 1."""
    a, head = _inputs(rng, n_least=4)
    f = attention.forward(a, head)
    t = t % len(a)
    average = torch.zeros_like(f.v[0])
    for beta in range(t + 1):
        average += f.rho[t, beta] * f.v[beta]
    weights = f.rho[t, : t + 1].sum()
    return max(relative_error(f.a[t], average, floor=f.v.abs().max().item()), abs(weights.item() - 1))


@check("E-weighted-1", 3, "5.a", IDENTITY)
def first_token(rng: RandomInputs) -> float:
    """a_i^h(1) = ρ_11 v(1) with ρ_11 = 1: the first token has no context"""
    return _weighted(rng, 0)


@check("E-weighted-2", 3, "5.b", IDENTITY)
def second_token(rng: RandomInputs) -> float:
    """a_i^h(2) = ρ_21 v(1) + ρ_22 v(2) with ρ_21 + ρ_22 = 1"""
    return _weighted(rng, 1)


@check("E-weighted-3", 3, "5.c", IDENTITY)
def third_token(rng: RandomInputs) -> float:
    """a_i^h(3) = ρ_31 v(1) + ρ_32 v(2) + ρ_33 v(3) with ρ_31 + ρ_32 + ρ_33 = 1"""
    return _weighted(rng, 2)


@check("E-weighted-4", 3, "5.d", IDENTITY)
def last_token(rng: RandomInputs) -> float:
    """a_i^h(n_T) = Σ_β ρ_{n_T β} v(β) over all tokens, with weights that sum to 1"""
    return _weighted(rng, -1)


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
    a, head = _inputs(rng)
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
    a, head = _inputs(rng)
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
    a, head = _inputs(rng)
    raw = attention.forward(a, head).raw
    doubled = attention.forward(a, head._replace(w_k=2 * head.w_q, b_k=2 * head.b_q)).raw
    gap = relative_error(raw, raw.t())
    return max(shortfall(gap, 1e-3), relative_error(doubled, doubled.t())), f"|ρ_αβ − ρ_βα| reaches {gap:.2f} of max|ρ|"


# ── queries, keys, raw weights ──────────────────────────────────────────────────────────────────────────────────────


@check("D-qk", 3, "8", EXACT)
def shapes_of_queries_and_keys(rng: RandomInputs) -> float:
    """q, k ∈ (n_T, d_ρ) from w_q, w_k ∈ (d, d_ρ) and b_q, b_k ∈ (d_ρ); keys of another width are an error"""
    a, head = _inputs(rng)
    (n, d), d_rho = a.shape, len(head.b_q)
    f = attention.forward(a, head)
    wider = head._replace(w_k=rng.matrix(d, d_rho + 1), b_k=rng.matrix(d_rho + 1))
    rejected = raises(RuntimeError, lambda: attention.forward(a, wider))
    return mismatch((f.q.shape, (n, d_rho)), (f.k.shape, (n, d_rho)), (rejected, True))


@check("E-q-fwd", 3, "9.a", IDENTITY)
def queries(rng: RandomInputs) -> float:
    """q = a_{i−1} w_q + b_q~"""
    a, head = _inputs(rng)
    return relative_error(attention.forward(a, head).q, F.linear(a, head.w_q.t(), head.b_q))


@check("E-k-fwd", 3, "9.b", IDENTITY)
def keys(rng: RandomInputs) -> float:
    """k = a_{i−1} w_k + b_k~, and a_{i−1} w_k without b_k"""
    a, head = _inputs(rng)
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
        expected = differentiate(_by_torch, a, *_tensors(head), upstream=delta)
        errors.append(mismatch((f.rho.shape, (n, n)), (f.a.shape, (n, d_h))))
        errors += [
            _absolute_below_one(g, t) for g, t in zip((back.delta, *_tensors(back.grads)), expected, strict=True)
        ]

    heads = [rng.head(d, *widths) for widths in ((3, 2), (5, 2), (1, 4))]
    delta = rng.matrix(n, 8)
    back_all = attention.backward_heads(delta, a, heads, attention.forward_heads(a, heads))
    (signal,) = differentiate(lambda x: torch.cat([_by_torch(x, *_tensors(h)) for h in heads], 1), a, upstream=delta)
    disagrees = disagreement(lambda x: attention.forward_heads(x, heads).a, a, back_all.delta, delta, rng)
    return max(*errors, _absolute_below_one(back_all.delta, signal), disagrees)


def _tensors(head: Head) -> tuple[Tensor, ...]:
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
    a, head = _inputs(rng)
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


# ── the complete head ───────────────────────────────────────────────────────────────────────────────────────────────


@check("P-identity", 3, "", IDENTITY)
def identity_weights(rng: RandomInputs) -> float:
    """ρ = I ⇒ a_i^h = v, with a linear layer's gradients (in exact arithmetic only for n_T = 1: here the other entries of
    ρ underflow to 0)"""
    n, d_h = rng.size(3, 8), rng.size(1, 8)
    a = torch.linalg.qr(rng.matrix(n, n)).Q  # orthonormal rows: 10⁴ a aᵗ is large on the diagonal and 0 elsewhere
    large, zero = 100 * torch.eye(n).double(), torch.zeros(n).double()
    head = rng.head(n, n, d_h)._replace(w_q=large, b_q=zero, w_k=large, b_k=zero)
    f, delta = attention.forward(a, head), rng.matrix(n, d_h)
    back = attention.backward(delta, a, head, f)
    layer = differentiate(lambda a, w, b: F.linear(a, w.t(), b), a, head.w_v, head.b_v, upstream=delta)
    ours = (back.delta, back.grads.w_v, back.grads.b_v)
    zeros = max(g.abs().max().item() for g in _tensors(back.grads)[:4])
    return max(
        (f.rho - torch.eye(n)).abs().max().item(),
        relative_error(f.a, f.v),
        zeros,
        *(relative_error(g, t) for g, t in zip(ours, layer, strict=True)),
    )


@check("D-att-sig", 3, "17", EXACT)
def signature(rng: RandomInputs) -> float:
    """Att: (n_T, d) → (n_T, d_h) with w_q, b_q, w_k, w_v, b_v and no b_k: 2d d_ρ + d_ρ + d d_h + d_h parameters"""
    a, head = _inputs(rng)
    head = head._replace(b_k=None)
    (n, d), d_rho, d_h = a.shape, len(head.b_q), len(head.b_v)
    f = attention.forward(a, head)
    grads = attention.backward(rng.matrix(n, d_h), a, head, f).grads
    learned = sum(g.numel() for g in grads if g is not None)
    shapes = [None if g is None else tuple(g.shape) for g in grads]
    return mismatch(
        (f.a.shape, (n, d_h)),
        (learned, 2 * d * d_rho + d_rho + d * d_h + d_h),
        (shapes, [(d, d_rho), (d_rho,), (d, d_rho), None, (d, d_h), (d_h,)]),
    )


@check("E-attn-fwd", 3, "18", IDENTITY)
def complete_head(rng: RandomInputs) -> float:
    """a_i^h = softmax(mask(q kᵗ/√d_ρ)) v equals torch's causal scaled_dot_product_attention"""
    a, head = _inputs(rng)
    f = attention.forward(a, head)
    return relative_error(f.a, _by_torch(a, *_tensors(head)), floor=f.v.abs().max().item())


def _counts(rng: RandomInputs, n: int, d: int, d_rho: int, d_h: int) -> tuple[int, int]:
    """The multiply-adds of one head: after its three projections, and in the projections."""
    a, head = rng.matrix(n, d), rng.head(d, d_rho, d_h)
    layers = ((head.w_q, head.b_q), (head.w_k, head.b_k), (head.w_v, head.b_v))
    projections = count_multiply_adds(lambda: [linear.forward(a, w, b) for w, b in layers])
    return count_multiply_adds(lambda: attention.forward(a, head)) - projections, projections


@check("C-qk-quad", 3, "", COUNTED)
def cost_of_the_weights(rng: RandomInputs) -> float:
    """q kᵗ costs d_ρ n_T² multiply-adds: the additional cost of a larger d_ρ, without the projections"""
    n, d, d_rho, more, d_h = (rng.size(2, 8) for _ in range(5))
    small, large = _counts(rng, n, d, d_rho, d_h)[0], _counts(rng, n, d, d_rho + more, d_h)[0]
    return abs(large - small - more * n**2)


@check("C-mix-quad", 3, "", COUNTED)
def cost_of_the_mixing(rng: RandomInputs) -> float:
    """ρ v costs d_h n_T² multiply-adds, hence n_T²(d_ρ + d_h) with q kᵗ"""
    n, d, d_rho, d_h, more = (rng.size(2, 8) for _ in range(5))
    small, large = _counts(rng, n, d, d_rho, d_h)[0], _counts(rng, n, d, d_rho, d_h + more)[0]
    return abs(large - small - more * n**2) + abs(small - n**2 * (d_rho + d_h))


@check("C-attn-quad", 3, "", COUNTED)
def cost_of_the_head(rng: RandomInputs) -> tuple[float, str]:
    """twice the tokens cost a head four times as much, except its projections: n_T d (2d_ρ + d_h), twice as much"""
    d, d_rho = rng.size(1, 8), rng.size(1, 7)
    d_h = 8 - d_rho
    quadratic, projections = zip(*(_counts(rng, n, d, d_rho, d_h) for n in (8, 16, 32, 64)), strict=True)
    linear_part = tuple(n * d * (2 * d_rho + d_h) for n in (8, 16, 32, 64))
    error = mismatch((quadratic, (512, 2048, 8192, 32768)), (projections, linear_part))
    return error, f"n_T = 8, 16, 32, 64 with d_ρ + d_h = 8: {quadratic}"


# ── biases ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@check("P-bk-impotent", 3, "19", IDENTITY)
def key_bias_has_no_effect(rng: RandomInputs) -> float:
    """b_k shifts a row of q kᵗ by one number, which softmax ignores: any b_k, or none, gives the same, masked or not"""
    a, head = _inputs(rng)
    errors = []
    for causal in (True, False):
        f = attention.forward(a, head, causal)
        for b_k in (rng.matrix(len(head.b_q)) + 1.7, None):
            other = attention.forward(a, head._replace(b_k=b_k), causal)
            errors += [
                _change(other, f),
                relative_error(other.rho, f.rho),
                shortfall(relative_error(other.k, f.k), 1e-6),
            ]
    return max(errors)


@check("P-swap-bq", 3, "", IDENTITY)
def swapped_roles(rng: RandomInputs) -> float:
    """with ρ = softmax(k qᵗ) it is b_q that has no effect, and b_k has one"""
    a, h = _unsaturated(rng)
    b_k = rng.matrix(len(h.b_q)) / 2
    h = h._replace(b_k=b_k)
    swapped = h._replace(w_q=h.w_k, b_q=b_k, w_k=h.w_q, b_k=h.b_q)  # q and k swapped: raw is k qᵗ
    f = attention.forward(a, swapped)
    shift_q = attention.forward(a, swapped._replace(b_k=h.b_q + 1.7))
    shift_k = attention.forward(a, swapped._replace(b_q=b_k + 1.7))
    return max(
        relative_error(f.raw, attention.forward(a, h).raw.t()),
        _change(shift_q, f),
        shortfall(_change(shift_k, f), 1e-3),
    )


@check("P-bq-bv-live", 3, "", IDENTITY)
def other_biases_matter(rng: RandomInputs) -> float:
    """b_q changes the output, and b_v + s adds s to every row of it, because the weights sum to 1"""
    a, head = _unsaturated(rng)
    f = attention.forward(a, head)
    shift_q = attention.forward(a, head._replace(b_q=head.b_q + 1.7))
    s = rng.matrix(len(head.b_v)) + 1.7
    shift_v = attention.forward(a, head._replace(b_v=head.b_v + s))
    return max(shortfall(_change(shift_q, f), 1e-3), relative_error(shift_v.a, f.a + s))


# ── composed layers ─────────────────────────────────────────────────────────────────────────────────────────────────


def _square(rng: RandomInputs) -> tuple[Tensor, Head]:
    """a and a head with d_h = d, which can be applied to its own output"""
    n, d, d_rho = rng.size(3, 6), rng.size(2, 6), rng.size(2, 6)
    return rng.matrix(n, d), rng.head(d, d_rho, d)


@check("E-compose", 3, "", IDENTITY)
def composition(rng: RandomInputs) -> float:
    """a_{i+1} = Att(Att(a_{i−1})) ∈ (n_T, d): with d_h = d a head can be applied to its own output"""
    a, head = _square(rng)
    twice = attention.forward(attention.forward(a, head).a, head)
    p = _tensors(head)
    return relative_error(twice.a, _by_torch(_by_torch(a, *p), *p), floor=twice.v.abs().max().item())


@check("E-third-order", 3, "20", IDENTITY)
def third_order(rng: RandomInputs) -> float:
    """a_{i+1}(t*) = Σ_α Σ_β ρ⁽ⁱ⁾_{t*α} ρ⁽ⁱ⁻¹⁾_{αβ} a_{i−1}(β) w_v² for b_v = 0: two layers combine three tokens"""
    a, head = _square(rng)
    head = head._replace(b_v=torch.zeros_like(head.b_v))
    first = attention.forward(a, head)
    second = attention.forward(first.a, head)
    n = len(a)
    triple = torch.zeros_like(a)
    for t in range(n):
        for alpha in range(n):
            for beta in range(n):
                triple[t] += second.rho[t, alpha] * first.rho[alpha, beta] * (a[beta] @ head.w_v @ head.w_v)
    matrix = second.rho @ first.rho @ a @ torch.linalg.matrix_power(head.w_v, 2)
    floor = second.v.abs().max().item()
    return max(relative_error(second.a, triple, floor), relative_error(second.a, matrix, floor))


@check("C-growth", 3, "", SAMPLED)
def growth_without_normalization(rng: RandomInputs) -> tuple[float, str]:
    """heads with standard normal w_v and ρ = 1 (one token), composed: the variance grows as d^layers, exponentially"""
    d, n_layers = 200, 10
    a = rng.matrix(1, d)
    start, head = a.var().item(), rng.head(d, 1, 1)
    variances = []
    for _ in range(n_layers):
        a = attention.forward(a, head._replace(w_v=rng.matrix(d, d), b_v=torch.zeros(d).double())).a
        variances.append(a.var().item() / start)
    rate = math.log(variances[-1]) / (n_layers * math.log(d))
    return abs(rate - 1), f"d = {d}: ×{variances[0]:.0f}, ×{variances[1]:.1e}, … ×{variances[-1]:.1e} after {n_layers}"

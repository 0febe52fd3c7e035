"""Section 3.1: the forward pass of one head, from the first attempts at attention weights to composed layers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...paper import attention, linear, notation
from ...paper.attention import Head
from ..oracles import count_multiply_adds, differentiate, directional_error, forward_mode, relative_error
from .check import AUTOGRAD, COUNTED, EXACT, IDENTITY, SAMPLED, Lab, check, mismatch, refuses, unless


def _draw(lab: Lab, n_least: int = 3) -> tuple[Tensor, Head]:
    """a (n_T, d) and a head; d, d_ρ and d_h have nothing to do with each other"""
    n, d, d_rho, d_h = lab.size(n_least, 8), lab.size(2, 8), lab.size(2, 8), lab.size(1, 8)
    return lab.matrix(n, d), lab.head(d, d_rho, d_h)


def _gentle(lab: Lab) -> tuple[Tensor, Head]:
    """A head far from saturation, so that whatever has an influence on its weights has a visible one."""
    n, d = lab.size(5, 8), lab.size(3, 6)
    head = lab.head(d, lab.size(3, 6), lab.size(3, 6))
    return lab.matrix(n, d), head._replace(w_q=head.w_q / 2, b_q=head.b_q / 2, w_k=head.w_k / 2)


def _truth(a: Tensor, w_q: Tensor, b_q: Tensor, w_k: Tensor, b_k: Tensor, w_v: Tensor, b_v: Tensor) -> Tensor:
    """torch's own causal attention, for one head"""
    q, k, v = F.linear(a, w_q.t(), b_q), F.linear(a, w_k.t(), b_k), F.linear(a, w_v.t(), b_v)
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def _moved(after: attention.Forward, before: attention.Forward) -> float:
    """How far the output moved, measured by the values it is an average of."""
    return relative_error(after.a, before.a, floor=before.v.abs().max().item())


# ── values, and what is wanted of the weights ───────────────────────────────────────────────────────────────────────


@check("E-val-fwd", 3, "4", IDENTITY)
def values(lab: Lab) -> float:
    """v = a_{i−1} w_v + b_v~ ∈ (n_T, d_h) with w_v ∈ (d, d_h) and b_v ∈ (d_h)"""
    a, head = _draw(lab)
    return relative_error(attention.forward(a, head).v, F.linear(a, head.w_v.t(), head.b_v))


@check("P-val-indep", 3, "", EXACT)
def values_know_one_token(lab: Lab) -> float:
    """v(t), q(t) and k(t) depend on a_{i−1}(t) alone: their Jacobians are block-diagonal in the tokens"""
    a, head = _draw(lab)
    error = 0.0
    for t in range(len(a)):
        da = torch.zeros_like(a)
        da[t] = lab.matrix(a.shape[1])
        moved = forward_mode(lambda x: torch.cat(attention.forward(x, head)[:3], 1), a, da).abs().amax(1)
        others = torch.cat([moved[:t], moved[t + 1 :]])
        error = max(error, others.max().item(), unless(moved[t].item(), 1e-9))
    return error


def _weighted(lab: Lab, t: int) -> float:
    """Row t of a_i^h against the sum it stands for, and the sum of its weights against 1."""
    a, head = _draw(lab, n_least=4)
    f = attention.forward(a, head)
    t = t % len(a)
    average = torch.zeros_like(f.v[0])
    for beta in range(t + 1):
        average += f.rho[t, beta] * f.v[beta]
    weights = f.rho[t, : t + 1].sum()
    return max(relative_error(f.a[t], average, floor=f.v.abs().max().item()), abs(weights.item() - 1))


@check("E-weighted-1", 3, "5.a", IDENTITY)
def first_token(lab: Lab) -> float:
    """a_i^h(1) = ρ_11 v(1) with ρ_11 = 1: the first token has no context"""
    return _weighted(lab, 0)


@check("E-weighted-2", 3, "5.b", IDENTITY)
def second_token(lab: Lab) -> float:
    """a_i^h(2) = ρ_21 v(1) + ρ_22 v(2) with ρ_21 + ρ_22 = 1"""
    return _weighted(lab, 1)


@check("E-weighted-3", 3, "5.c", IDENTITY)
def third_token(lab: Lab) -> float:
    """a_i^h(3) = ρ_31 v(1) + ρ_32 v(2) + ρ_33 v(3) with ρ_31 + ρ_32 + ρ_33 = 1"""
    return _weighted(lab, 2)


@check("E-weighted-4", 3, "5.d", IDENTITY)
def last_token(lab: Lab) -> float:
    """a_i^h(n_T) = Σ_β ρ_{n_T β} v(β) over all tokens, with weights that sum to 1"""
    return _weighted(lab, -1)


@check("E-out-tri", 3, "6", EXACT)
def lower_triangular(lab: Lab) -> float:
    """a_i^h = ρ v with ρ ∈ (n_T, n_T) lower triangular: exactly 0 for β > α, positive for β ≤ α"""
    a, head = _draw(lab)
    f = attention.forward(a, head)
    n = len(a)
    below = torch.ones(n, n).tril().bool()
    future = f.rho.masked_fill(below, 0).abs().max().item()
    return future + unless(f.rho[below].min().item(), 1e-30) + (f.a - f.rho.tril() @ f.v).abs().max().item()


# ── three attempts ──────────────────────────────────────────────────────────────────────────────────────────────────


@check("P-try1", 3, "", IDENTITY)
def attempt_without_parameters(lab: Lab) -> float:
    """attempt 1, ρ = a aᵗ: the scores of w_q = w_k = I, nothing to learn; ρ_αα is 1 only for rows of length 1"""
    a, head = _draw(lab)
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
def attempt_with_queries_alone(lab: Lab) -> float:
    """attempt 2, ρ = q qᵗ: symmetric whatever w_q and b_q have learned, because both sides use them"""
    a, head = _draw(lab)
    f = attention.forward(a, head._replace(w_k=head.w_q, b_k=head.b_q))
    return max(relative_error(f.raw, f.raw.t()), relative_error(f.raw.diag(), (f.q**2).sum(1)))


@check("E-pair", 3, "7", IDENTITY)
def pair_of_tokens(lab: Lab) -> float:
    """attempt 3, ρ_αβ = q(α)·k(β), one number for each pair of tokens"""
    a, head = _draw(lab)
    f = attention.forward(a, head)
    pairs = torch.stack([torch.stack([torch.dot(q, k) for k in f.k]) for q in f.q])
    return relative_error(f.raw, pairs)


@check("P-try3-asym", 3, "", IDENTITY)
def attempt_with_keys(lab: Lab) -> tuple[float, str]:
    """q kᵗ is in general not symmetric; unequal parameters do not guarantee it: w_k = 2w_q, b_k = 2b_q is symmetric"""
    a, head = _draw(lab)
    raw = attention.forward(a, head).raw
    doubled = attention.forward(a, head._replace(w_k=2 * head.w_q, b_k=2 * head.b_q)).raw
    gap = relative_error(raw, raw.t())
    return max(unless(gap, 1e-3), relative_error(doubled, doubled.t())), f"|ρ_αβ − ρ_βα| reaches {gap:.2f} of max|ρ|"


# ── queries, keys, raw weights ──────────────────────────────────────────────────────────────────────────────────────


@check("D-qk", 3, "8", EXACT)
def shapes_of_queries_and_keys(lab: Lab) -> float:
    """q, k ∈ (n_T, d_ρ) from w_q, w_k ∈ (d, d_ρ) and b_q, b_k ∈ (d_ρ); keys of another width are refused"""
    a, head = _draw(lab)
    (n, d), d_rho = a.shape, len(head.b_q)
    f = attention.forward(a, head)
    wider = head._replace(w_k=lab.matrix(d, d_rho + 1), b_k=lab.matrix(d_rho + 1))
    refused = refuses(RuntimeError, lambda: attention.forward(a, wider))
    return mismatch((f.q.shape, (n, d_rho)), (f.k.shape, (n, d_rho)), (refused, True))


@check("E-q-fwd", 3, "9.a", IDENTITY)
def queries(lab: Lab) -> float:
    """q = a_{i−1} w_q + b_q~"""
    a, head = _draw(lab)
    return relative_error(attention.forward(a, head).q, F.linear(a, head.w_q.t(), head.b_q))


@check("E-k-fwd", 3, "9.b", IDENTITY)
def keys(lab: Lab) -> float:
    """k = a_{i−1} w_k + b_k~, and a_{i−1} w_k where b_k is left out"""
    a, head = _draw(lab)
    bare = attention.forward(a, head._replace(b_k=None)).k
    return max(
        relative_error(attention.forward(a, head).k, F.linear(a, head.w_k.t(), head.b_k)),
        relative_error(bare, F.linear(a, head.w_k.t())),
    )


@check("E-raw", 3, "10", IDENTITY)
def raw_weights(lab: Lab) -> float:
    """ρ_raw = q kᵗ ∈ (n_T, n_T)"""
    a, head = _draw(lab)
    f = attention.forward(a, head)
    return relative_error(f.raw, torch.einsum("tr,sr->ts", f.q, f.k))


@check("E-raw-row", 3, "11", IDENTITY)
def attention_vector(lab: Lab) -> float:
    """row t* of ρ_raw ∈ (n_T) holds the weights of token t* with all tokens: k q(t*)"""
    a, head = _draw(lab)
    f = attention.forward(a, head)
    t = lab.size(0, len(a) - 1)
    return relative_error(f.raw[t], torch.mv(f.k, f.q[t]), floor=f.raw.abs().max().item())


@check("P-drho-free", 3, "", AUTOGRAD)
def widths_are_free(lab: Lab) -> float:
    """d_ρ need not be d_h and may differ from head to head; ρ stays (n_T, n_T), and all gradients stay exact"""
    n, d = lab.size(3, 6), lab.size(2, 6)
    a = lab.matrix(n, d)
    errors = []
    for d_rho, d_h in ((4, 4), (3, 5), (7, 2), (1, 1), (lab.size(1, 8), lab.size(1, 8))):
        head, delta = lab.head(d, d_rho, d_h), lab.matrix(n, d_h)
        f = attention.forward(a, head)
        back = attention.backward(delta, a, head, f)
        truth = differentiate(_truth, a, *_tensors(head), upstream=delta)
        errors.append(mismatch((f.rho.shape, (n, n)), (f.a.shape, (n, d_h))))
        errors += [_close(g, t) for g, t in zip((back.delta, *_tensors(back.grads)), truth, strict=True)]

    heads = [lab.head(d, *widths) for widths in ((3, 2), (5, 2), (1, 4))]
    delta = lab.matrix(n, 8)
    back_all = attention.backward_heads(delta, a, heads, attention.forward_heads(a, heads))
    (signal,) = differentiate(lambda x: torch.cat([_truth(x, *_tensors(h)) for h in heads], 1), a, upstream=delta)
    differences = directional_error(
        lambda x: (attention.forward_heads(x, heads).a * delta).sum().item(), a, back_all.delta, lab.generator
    )
    return max(*errors, _close(back_all.delta, signal), 0.0 if differences < 1e-6 else math.inf)


def _tensors(head: Head) -> tuple[Tensor, ...]:
    """The parameters of a head that has its b_k."""
    return tuple(p for p in head if p is not None)


def _close(ours: Tensor, truth: Tensor) -> float:
    """∂b_k is 0, where autograd leaves some rounding: below 1 the error is absolute."""
    return relative_error(ours, truth, floor=1.0)


# ── scale, mask, softmax ────────────────────────────────────────────────────────────────────────────────────────────


@check("P-var-drho", 3, "", SAMPLED)
def variance_of_the_weights(lab: Lab) -> tuple[float, str]:
    """independent standard normal q and k: ρ_raw has mean 0 and variance d_ρ, ρ_scaled has variance 1"""
    errors, variances = [], []
    for d_rho, n in ((1, 100_000), (4, 50_000), (16, 25_000)):
        raw = notation.row_dot(lab.matrix(n, d_rho), lab.matrix(n, d_rho))
        scaled = attention.scale(raw, d_rho)
        errors += [scaled.mean().abs().item(), abs(raw.var().item() / d_rho - 1), abs(scaled.var().item() - 1)]
        variances.append(f"{raw.var().item():.2f}")
    return max(errors), f"variance of ρ_raw for d_ρ = 1, 4, 16: {', '.join(variances)}"


@check("E-scaled", 3, "12", IDENTITY)
def scaled_weights(lab: Lab) -> float:
    """ρ_scaled = ρ_raw / √d_ρ, with the d_ρ of this head and not its d_h or d"""
    d_rho = lab.size(2, 6)
    a = lab.matrix(lab.size(3, 8), d_rho + 1)
    f = attention.forward(a, lab.head(d_rho + 1, d_rho, d_rho + 2))
    return relative_error(f.scaled, f.raw * d_rho**-0.5)


@check("E-mask", 3, "13", EXACT)
def causal_mask(lab: Lab) -> tuple[float, str]:
    """ρ_causal = ρ_scaled on and below the diagonal, −∞ above it; the printed 0/1 product does not hide the future"""
    n = lab.size(3, 8)
    scaled = lab.matrix(n, n)
    past = torch.tensor([[beta <= alpha for beta in range(n)] for alpha in range(n)])
    masked = attention.mask(scaled)
    leaked = F.softmax(past * scaled, 1)[0, 1:].sum().item()
    kept = torch.equal(masked, torch.where(past, scaled, -math.inf))
    return mismatch((kept, True)) + unless(
        leaked, 1e-3
    ), f"as printed, row 1 puts {leaked:.0%} of its weight on the future"


@check("E-rho-row", 3, "", IDENTITY)
def weights_of_one_token(lab: Lab) -> float:
    """ρ(t*) = softmax of row t* of ρ_causal, a probability distribution in (n_T)"""
    a, head = _draw(lab)
    f = attention.forward(a, head)
    return max(relative_error(f.rho[t], F.softmax(f.causal[t], 0)) for t in range(len(a)))


@check("P-rowsum", 3, "14", IDENTITY)
def weights_sum_to_one(lab: Lab) -> float:
    """Σ_t' ρ_{t* t'} = 1 with weights ≥ 0 for every token, with and without the mask"""
    a, head = _draw(lab)
    rhos = [attention.forward(a, head, causal).rho for causal in (True, False)]
    return max(max(relative_error(rho.sum(1), torch.ones(len(a))), (rho < 0).sum().item()) for rho in rhos)


@check("E-rho", 3, "15", IDENTITY)
def attention_matrix(lab: Lab) -> float:
    """ρ = row-wise softmax of ρ_causal, exactly 0 above the diagonal"""
    a, head = _draw(lab)
    f = attention.forward(a, head)
    return max(relative_error(f.rho, F.softmax(f.causal, 1)), f.rho.triu(1).abs().max().item())


@check("E-attn-out", 3, "16", IDENTITY)
def output(lab: Lab) -> float:
    """a_i^h = ρ v ∈ (n_T, d_h)"""
    a, head = _draw(lab)
    f = attention.forward(a, head)
    return relative_error(f.a, torch.einsum("ts,sh->th", f.rho, f.v))


# ── remarks on the whole head ───────────────────────────────────────────────────────────────────────────────────────


@check("P-identity", 3, "", IDENTITY)
def identity_weights(lab: Lab) -> float:
    """ρ = I ⇒ a_i^h = v, with a plain layer's gradients (exact arithmetic gives I for n_T = 1 only: here the rest of ρ
    underflows to 0)"""
    n, d_h = lab.size(3, 8), lab.size(1, 8)
    a = torch.linalg.qr(lab.matrix(n, n)).Q  # orthonormal rows: 10⁴ a aᵗ is large on the diagonal and 0 elsewhere
    large, zero = 100 * torch.eye(n).double(), torch.zeros(n).double()
    head = lab.head(n, n, d_h)._replace(w_q=large, b_q=zero, w_k=large, b_k=zero)
    f, delta = attention.forward(a, head), lab.matrix(n, d_h)
    back = attention.backward(delta, a, head, f)
    layer = differentiate(lambda a, w, b: F.linear(a, w.t(), b), a, head.w_v, head.b_v, upstream=delta)
    ours = (back.delta, back.grads.w_v, back.grads.b_v)
    nothing = max(g.abs().max().item() for g in _tensors(back.grads)[:4])
    return max(
        (f.rho - torch.eye(n)).abs().max().item(),
        relative_error(f.a, f.v),
        nothing,
        *(relative_error(g, t) for g, t in zip(ours, layer, strict=True)),
    )


@check("D-att-sig", 3, "17", EXACT)
def signature(lab: Lab) -> float:
    """Att: (n_T, d) → (n_T, d_h) with w_q, b_q, w_k, w_v, b_v and no b_k: 2d d_ρ + d_ρ + d d_h + d_h parameters"""
    a, head = _draw(lab)
    head = head._replace(b_k=None)
    (n, d), d_rho, d_h = a.shape, len(head.b_q), len(head.b_v)
    f = attention.forward(a, head)
    grads = attention.backward(lab.matrix(n, d_h), a, head, f).grads
    learned = sum(g.numel() for g in grads if g is not None)
    shapes = [None if g is None else tuple(g.shape) for g in grads]
    return mismatch(
        (f.a.shape, (n, d_h)),
        (learned, 2 * d * d_rho + d_rho + d * d_h + d_h),
        (shapes, [(d, d_rho), (d_rho,), (d, d_rho), None, (d, d_h), (d_h,)]),
    )


@check("E-attn-fwd", 3, "18", IDENTITY)
def whole_head(lab: Lab) -> float:
    """a_i^h = softmax(mask(q kᵗ/√d_ρ)) v is torch's own causal scaled_dot_product_attention"""
    a, head = _draw(lab)
    f = attention.forward(a, head)
    return relative_error(f.a, _truth(a, *_tensors(head)), floor=f.v.abs().max().item())


def _counts(lab: Lab, n: int, d: int, d_rho: int, d_h: int) -> tuple[int, int]:
    """The multiply-adds of one head: those after its three projections, and those of the projections."""
    a, head = lab.matrix(n, d), lab.head(d, d_rho, d_h)
    layers = ((head.w_q, head.b_q), (head.w_k, head.b_k), (head.w_v, head.b_v))
    projections = count_multiply_adds(lambda: [linear.forward(a, w, b) for w, b in layers])
    return count_multiply_adds(lambda: attention.forward(a, head)) - projections, projections


@check("C-qk-quad", 3, "", COUNTED)
def cost_of_the_weights(lab: Lab) -> float:
    """q kᵗ costs d_ρ n_T² multiply-adds: what a head takes more when its d_ρ grows, projections apart"""
    n, d, d_rho, more, d_h = (lab.size(2, 8) for _ in range(5))
    small, large = _counts(lab, n, d, d_rho, d_h)[0], _counts(lab, n, d, d_rho + more, d_h)[0]
    return abs(large - small - more * n**2)


@check("C-mix-quad", 3, "", COUNTED)
def cost_of_the_mixing(lab: Lab) -> float:
    """ρ v costs d_h n_T² multiply-adds, hence n_T²(d_ρ + d_h) with q kᵗ"""
    n, d, d_rho, d_h, more = (lab.size(2, 8) for _ in range(5))
    small, large = _counts(lab, n, d, d_rho, d_h)[0], _counts(lab, n, d, d_rho, d_h + more)[0]
    return abs(large - small - more * n**2) + abs(small - n**2 * (d_rho + d_h))


@check("C-attn-quad", 3, "", COUNTED)
def cost_of_the_head(lab: Lab) -> tuple[float, str]:
    """twice the tokens cost a head four times as much, except its projections: n_T d (2d_ρ + d_h), twice as much"""
    d, d_rho = lab.size(1, 8), lab.size(1, 7)
    d_h = 8 - d_rho
    quadratic, projections = zip(*(_counts(lab, n, d, d_rho, d_h) for n in (8, 16, 32, 64)), strict=True)
    linear_part = tuple(n * d * (2 * d_rho + d_h) for n in (8, 16, 32, 64))
    error = mismatch((quadratic, (512, 2048, 8192, 32768)), (projections, linear_part))
    return error, f"n_T = 8, 16, 32, 64 with d_ρ + d_h = 8: {quadratic}"


# ── biases ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@check("P-bk-impotent", 3, "19", IDENTITY)
def key_bias_has_no_effect(lab: Lab) -> float:
    """b_k shifts a row of q kᵗ by one number, which softmax ignores: any b_k, or none, gives the same, masked or not"""
    a, head = _draw(lab)
    errors = []
    for causal in (True, False):
        f = attention.forward(a, head, causal)
        for b_k in (lab.matrix(len(head.b_q)) + 1.7, None):
            other = attention.forward(a, head._replace(b_k=b_k), causal)
            errors += [_moved(other, f), relative_error(other.rho, f.rho), unless(relative_error(other.k, f.k), 1e-6)]
    return max(errors)


@check("P-swap-bq", 3, "", IDENTITY)
def swapped_roles(lab: Lab) -> float:
    """with ρ = softmax(k qᵗ) it is b_q that has no effect, and b_k has one"""
    a, h = _gentle(lab)
    b_k = lab.matrix(len(h.b_q)) / 2
    h = h._replace(b_k=b_k)
    swapped = h._replace(w_q=h.w_k, b_q=b_k, w_k=h.w_q, b_k=h.b_q)  # q and k change places: raw is k qᵗ
    f = attention.forward(a, swapped)
    shift_q = attention.forward(a, swapped._replace(b_k=h.b_q + 1.7))
    shift_k = attention.forward(a, swapped._replace(b_q=b_k + 1.7))
    return max(
        relative_error(f.raw, attention.forward(a, h).raw.t()), _moved(shift_q, f), unless(_moved(shift_k, f), 1e-3)
    )


@check("P-bq-bv-live", 3, "", IDENTITY)
def other_biases_matter(lab: Lab) -> float:
    """b_q does change the output; and b_v + s adds s to every row of it, because the weights sum to 1"""
    a, head = _gentle(lab)
    f = attention.forward(a, head)
    shift_q = attention.forward(a, head._replace(b_q=head.b_q + 1.7))
    s = lab.matrix(len(head.b_v)) + 1.7
    shift_v = attention.forward(a, head._replace(b_v=head.b_v + s))
    return max(unless(_moved(shift_q, f), 1e-3), relative_error(shift_v.a, f.a + s))


# ── composed layers ─────────────────────────────────────────────────────────────────────────────────────────────────


def _square(lab: Lab) -> tuple[Tensor, Head]:
    """a and a head with d_h = d, which can be applied again to its own output"""
    n, d, d_rho = lab.size(3, 6), lab.size(2, 6), lab.size(2, 6)
    return lab.matrix(n, d), lab.head(d, d_rho, d)


@check("E-compose", 3, "", IDENTITY)
def composition(lab: Lab) -> float:
    """a_{i+1} = Att(Att(a_{i−1})) ∈ (n_T, d): with d_h = d a head can be applied to its own output"""
    a, head = _square(lab)
    twice = attention.forward(attention.forward(a, head).a, head)
    p = _tensors(head)
    return relative_error(twice.a, _truth(_truth(a, *p), *p), floor=twice.v.abs().max().item())


@check("E-third-order", 3, "20", IDENTITY)
def third_order(lab: Lab) -> float:
    """a_{i+1}(t*) = Σ_α Σ_β ρ⁽ⁱ⁾_{t*α} ρ⁽ⁱ⁻¹⁾_{αβ} a_{i−1}(β) w_v² for b_v = 0: three tokens meet after two layers"""
    a, head = _square(lab)
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
def growth_without_normalization(lab: Lab) -> tuple[float, str]:
    """heads with standard normal w_v and ρ = 1 (one token), composed: the variance grows as d^layers, exponentially"""
    d, n_layers = 200, 10
    a = lab.matrix(1, d)
    start, head = a.var().item(), lab.head(d, 1, 1)
    variances = []
    for _ in range(n_layers):
        a = attention.forward(a, head._replace(w_v=lab.matrix(d, d), b_v=torch.zeros(d).double())).a
        variances.append(a.var().item() / start)
    rate = math.log(variances[-1]) / (n_layers * math.log(d))
    return abs(rate - 1), f"d = {d}: ×{variances[0]:.0f}, ×{variances[1]:.1e}, … ×{variances[-1]:.1e} after {n_layers}"

"""The errata that numbers can show: the printed form is wrong by a stated amount, the right one is right.

Each check holds the printed formula itself, in a line or two, draws its material so that the misprint shows for every
seed, and takes the right form from `paper/`. R28 and R38 are typographical and have no check.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...paper import attention, embedding, kv_cache, layernorm, linear, lora, loss, notation, transformer
from ...paper.attention import Head
from ...paper.transformer import Network
from ..oracles import FINITE_DIFFERENCE_TOLERANCE, differentiate, directional_error, relative_error
from .check import AUTOGRAD, EXACT, IDENTITY, Lab, check, mismatch, unless

EPS = 1e-5


def _verdict(right: float, printed: float, at_least: float) -> tuple[float, str]:
    """The error of the right form, plus what the printed form's falls short of `at_least`"""
    return right + unless(printed, at_least), f"printed: off by {printed:.2g}; right: {right:.0e}"


def _fits(operation: Callable[[], object]) -> float:
    """1 if an operation works that shapes must forbid, otherwise 0"""
    try:
        operation()
    except RuntimeError:
        return 0.0
    return 1.0


def _differences(f: Callable[[Tensor], float], x: Tensor, grad: Tensor, lab: Lab) -> float:
    """The second oracle for a gradient: 0 if finite differences agree with it, otherwise infinite"""
    return 0.0 if directional_error(f, x, grad, lab.generator) < FINITE_DIFFERENCE_TOLERANCE else math.inf


def _future(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def _causal_softmax(scaled: Tensor) -> Tensor:
    return torch.softmax(scaled.masked_fill(_future(len(scaled)), -math.inf), 1)


def _printed_rho(scaled: Tensor) -> Tensor:
    """(13) and (15) as printed: a product with ones and zeros, then softmax"""
    return torch.softmax(scaled.tril(), 1)


def _mild_head(lab: Lab) -> tuple[Tensor, Head, Tensor]:
    """An input of 5 to 8 tokens, a head and its q kᵗ/√d_ρ, which stays within ±1 so that no weight is negligible"""
    n, d, d_rho, d_h = lab.size(5, 8), lab.size(3, 6), lab.size(2, 4), lab.size(2, 4)
    a, head = lab.matrix(n, d), lab.head(d, d_rho, d_h)
    scaled = F.linear(a, head.w_q.t(), head.b_q) @ F.linear(a, head.w_k.t(), head.b_k).t() / math.sqrt(d_rho)
    top = scaled.abs().max()
    return a, head._replace(w_q=head.w_q / top, b_q=head.b_q / top), scaled / top


# ── class A: the printed form changes results ───────────────────────────────────────────────────────────────────────


@check("R1", 15, "13", IDENTITY)
def mask(lab: Lab) -> tuple[float, str]:
    """printed: mask by a product with 0/1, which leaves exp(0) = 1 on the future; right: −∞, and ρ is triangular"""
    n = lab.size(5, 8)
    scaled = torch.tanh(lab.matrix(n, n))  # below 1, so that row 1 keeps at most e/(e+4) = 0.40 of its printed weight
    rho = notation.softmax(attention.mask(scaled))
    right = relative_error(rho, _causal_softmax(scaled)) + rho[_future(n)].abs().max().item()
    printed = _printed_rho(scaled)[0, 1:].sum().item()
    return right + unless(printed, 0.59), f"printed: {printed:.0%} of row 1's weight on the future; right: 0"


@check("R2", 15, "27", AUTOGRAD)
def backward_of_the_mask(lab: Lab) -> tuple[float, str]:
    """printed: (27) Δ_scaled = Δ_causal and (29) ∂b_k = 0 beside a 0/1 mask; right: both, but only for the −∞ mask"""
    a, head, scaled = _mild_head(lab)
    f, delta = attention.forward(a, head), lab.matrix(len(a), head.w_v.shape[1])
    ours = attention.backward(delta, a, head, f).delta_scaled
    (truth,) = differentiate(lambda s: _causal_softmax(s) @ f.v, f.scaled, upstream=delta)
    right = relative_error(ours, truth)

    delta_rho = delta @ f.v.t()
    (delta_causal,) = differentiate(lambda s: torch.softmax(s, 1), scaled.tril(), upstream=delta_rho)
    (delta_scaled,) = differentiate(_printed_rho, scaled, upstream=delta_rho)
    printed = relative_error(delta_causal, delta_scaled)

    # a shift of b_k that adds 1 to the score of token 1 with itself: it must not matter, and in print it does
    assert head.b_k is not None
    q = F.linear(a, head.w_q.t(), head.b_q)
    shift = q[0] * math.sqrt(q.shape[1]) / q[0].dot(q[0])
    right += relative_error(attention.forward(a, head._replace(b_k=head.b_k + shift)).rho, f.rho)
    added = (q @ shift / math.sqrt(q.shape[1]))[:, None]
    moved = (_printed_rho(scaled + added) - _printed_rho(scaled)).abs().max().item()
    error, note = _verdict(right, printed, 0.05)
    return error + unless(moved, 0.07), f"{note}; b_k moves the printed ρ by {moved:.2f}"


@check("R3", 15, "", AUTOGRAD)
def frozen_is_not_blocked(lab: Lab) -> tuple[float, str]:
    """printed: Δ_11 = α Δ_12 (d u)ᵗ beside a frozen layer; right: Δ_12 w_11ᵗ is added, or a new adapter blocks all"""
    n, d, n_vocab = lab.size(3, 6), lab.size(3, 6), lab.size(4, 8)
    p = lab.network(n_vocab, n, d, [(2, 2)], rank=lab.size(1, 3))
    a_11, delta_12 = lab.matrix(n, d), lab.matrix(n, n_vocab)

    def errors(p: Network) -> tuple[float, float]:
        assert p.w_11 is not None and p.adapter is not None
        w_11, (d_11, u_11, scale) = p.w_11, p.adapter

        def layer(x: Tensor) -> Tensor:
            return F.linear(x, w_11.t(), p.b_11) + scale * F.linear(F.linear(x, d_11.t()), u_11.t())

        ours = transformer.delta_before_logits(delta_12, p)
        (truth,) = differentiate(layer, a_11, upstream=delta_12)
        differences = _differences(lambda x: (layer(x) * delta_12).sum().item(), a_11, ours, lab)
        return relative_error(ours, truth) + differences, relative_error(scale * delta_12 @ (d_11 @ u_11).t(), truth)

    assert p.adapter is not None
    fresh = p.adapter._replace(u_11=torch.zeros_like(p.adapter.u_11))  # as adapters begin: the printed Δ_11 is 0
    right, printed = errors(p)
    right_fresh, printed_fresh = errors(p._replace(adapter=fresh))
    error, note = _verdict(max(right, right_fresh), printed, 0.02)
    return error + mismatch((printed_fresh, 1.0)), f"{note}; with a new adapter printed: 0"


@check("R4", 15, "", IDENTITY)
def cached_row_is_scaled(lab: Lab) -> tuple[float, str]:
    """printed: the cached attention row is softmax(q [k_cache⊕k]ᵗ); right: divided by √d_ρ first, as in (18)"""
    n, d, d_rho = lab.size(3, 7), lab.size(3, 6), lab.size(3, 6)
    a, head = lab.matrix(n + 1, d), lab.head(d, d_rho, lab.size(1, 4))
    k, v = F.linear(a, head.w_k.t(), head.b_k), F.linear(a, head.w_v.t(), head.b_v)
    raw = F.linear(a[-1], head.w_q.t(), head.b_q) @ k.t()
    # scores over a range of 4: then e⁴ between the largest and the smallest weight, instead of at most e^2.3
    stretch = 4 / (raw.max() - raw.min())
    head, raw = head._replace(w_q=head.w_q * stretch, b_q=head.b_q * stretch), raw * stretch
    step = kv_cache.append(a[-1], head, kv_cache.Cache(k[:-1], v[:-1]))
    truth = torch.softmax(raw / math.sqrt(d_rho), 0)
    right = max(relative_error(step.rho, truth), relative_error(step.a, truth @ v, v.abs().max().item()))
    return _verdict(right, (torch.softmax(raw, 0) - truth).abs().max().item(), 0.005)


@check("R5", 15, "", AUTOGRAD)
def the_last_row_has_no_target(lab: Lab) -> tuple[float, str]:
    """printed: Δ_12 = y_pred − y_gt on all n_T rows, no L_seq; right: L_seq sums n_T−1 rows, row n_T of Δ_12 is 0"""
    n, n_vocab = lab.size(3, 8), lab.size(2, 8)
    a_12, ids = lab.matrix(n, n_vocab), lab.ids(n, n_vocab)
    targets = torch.cat([ids[1:], torch.tensor([loss.NO_TARGET])])
    y_pred = torch.softmax(a_12, 1)

    def total(x: Tensor) -> Tensor:
        return F.cross_entropy(x[:-1], ids[1:], reduction="sum")

    ours = loss.delta_logits(y_pred, targets)
    (truth,) = differentiate(total, a_12)
    mean = F.cross_entropy(a_12[:-1], ids[1:])
    right = max(relative_error(ours, truth), relative_error(loss.forward(a_12, targets), (n - 1) * mean))
    right += _differences(lambda x: total(x).item(), a_12, ours, lab)
    y_gt = torch.zeros_like(y_pred)
    y_gt[torch.arange(n - 1), ids[1:]] = 1
    return _verdict(right, relative_error(y_pred - y_gt, truth), 0.124)  # some entry of row n_T is 1/n_vocab or more


@check("R6", 15, "", EXACT)
def the_next_position_not_the_next_id(lab: Lab) -> tuple[float, str]:
    """printed: the target of token t is t + 1; right: the id at the next position (t + 1 may not even be an id)"""
    n, n_vocab = lab.size(3, 8), lab.size(2, 8)
    a_0 = lab.ids(n, n_vocab)
    a_0[:2] = n_vocab - 1  # the same id twice, and the last one: t + 1 is wrong, and outside the vocabulary
    found, next_ids, printed = loss.next_tokens(a_0).tolist(), a_0.tolist()[1:], (a_0 + 1).tolist()[:-1]
    right = mismatch(*zip(found[:-1], next_ids, strict=True), (found[-1], loss.NO_TARGET))
    wrong = mismatch(*zip(printed, next_ids, strict=True))
    error = right + unless(wrong, 1) + mismatch((printed[0], n_vocab))
    return error, f"printed: {wrong:.0f} of {n - 1} targets wrong; right: {right:.0f}"


def _final_norm(a: Tensor, p: Network) -> Tensor:
    """a_1 → a_11 with torch's own layers"""
    for b in p.blocks:
        x = F.layer_norm(a, b.w_1.shape, b.w_1, b.b_1, EPS)
        heads = [
            F.scaled_dot_product_attention(
                F.linear(x, h.w_q.t(), h.b_q), F.linear(x, h.w_k.t(), h.b_k), F.linear(x, h.w_v.t(), h.b_v),
                is_causal=True,
            )
            for h in b.heads
        ]  # fmt: skip
        a = a + F.linear(torch.cat(heads, 1), b.w_3.t(), b.b_3)
        x = F.layer_norm(a, b.w_5.shape, b.w_5, b.b_5, EPS)
        a = a + F.linear(F.gelu(F.linear(x, b.w_6.t(), b.b_6), approximate="tanh"), b.w_8.t(), b.b_8)
    return F.layer_norm(a, p.w_10.shape, p.w_10, p.b_10, EPS)


@check("R9", 15, "", AUTOGRAD)
def tied_weights_add_up(lab: Lab) -> tuple[float, str]:
    """printed: no rule for w_11 = w_tokᵗ; right: ∂w_tok = ohe(a_0)ᵗ Δ_1 + Δ_12ᵗ a_11, so absent tokens learn too"""
    n, d, n_vocab = lab.size(4, 6), lab.size(6, 8), lab.size(6, 9)
    p = lab.network(n_vocab, n, d, [(2, 3), (3, 2)], tied=True)
    a_0 = lab.ids(n, n_vocab - 1)  # the last token is absent

    def ending(a_12: Tensor) -> Tensor:
        return F.cross_entropy(a_12[:-1], a_0[1:], reduction="sum")

    def network(w_tok: Tensor) -> Tensor:
        return ending(_final_norm(F.embedding(a_0, w_tok) + p.w_pos, p) @ w_tok.t())

    (truth,) = differentiate(network, p.w_tok)
    a_1 = F.embedding(a_0, p.w_tok) + p.w_pos
    a_11 = _final_norm(a_1, p)
    (delta_12,) = differentiate(ending, a_11 @ p.w_tok.t())
    (delta_1,) = differentiate(lambda a: ending(_final_norm(a, p) @ p.w_tok.t()), a_1)
    saved = transformer.forward(a_0, p, transformer.Options(eps=EPS))._replace(a_11=a_11)
    ours = transformer.grad_w_tok(delta_1, delta_12, saved, p)
    right = relative_error(ours, truth) + _differences(lambda w: network(w).item(), p.w_tok, ours, lab)
    embedding_alone = torch.zeros_like(p.w_tok).index_add(0, a_0, delta_1)
    error, note = _verdict(right, relative_error(embedding_alone, truth), 0.01)
    return error + mismatch((ours[-1].count_nonzero().item(), d)), note.replace("printed", "embedding alone")


@check("R8", 15, "36", AUTOGRAD)
def epsilon(lab: Lab) -> tuple[float, str]:
    """printed: no ε, so a constant row divides 0 by 0; right: σ = √(var + ε), with which (40) stays exact"""
    n, d = lab.size(2, 8), lab.size(4, 8)
    a, w, b, delta = lab.matrix(n, d), 1 + 0.3 * lab.matrix(d), lab.matrix(d), lab.matrix(n, d)
    a = 1e-3 * a / a.std(1, correction=0, keepdim=True)  # a variance of 1e−6, small beside ε

    def layer(x: Tensor) -> Tensor:
        return F.layer_norm(x, w.shape, w, b, EPS)

    f, without = layernorm.forward(a, w, b, EPS), layernorm.forward(a, w, b, 0.0)
    (truth,) = differentiate(layer, a, upstream=delta)
    flat = torch.full((1, d), 0.5, dtype=a.dtype)
    right = max(
        relative_error(layernorm.delta_prev(delta, f.a_bar, f.sigma, w), truth),
        relative_error(f.a, layer(a)),
        relative_error(layernorm.forward(flat, w, b, EPS).a, b[None]),
    )
    printed = relative_error(layernorm.delta_prev(delta, without.a_bar, without.sigma, w), truth)
    not_nan = torch.isfinite(layernorm.forward(flat, w, b, 0.0).a).sum().item()
    error, note = _verdict(right, printed, 0.1)  # ‖error‖ ≥ ‖truth‖: of 64 entries at most, the largest is off by 1/8
    return error + not_nan, f"{note}; a constant row printed: NaN"


@check("R11", 15, "43", IDENTITY)
def scale_of_an_adapter(lab: Lab) -> tuple[float, str]:
    """printed: a factor α, "usually α = r", r times the branch; right: the usual scale is α/r, so α = r means 1"""
    n, f_in, f_out, r = lab.size(2, 8), lab.size(2, 8), lab.size(2, 8), lab.size(2, 6)
    a, d, u, alpha = lab.matrix(n, f_in), lab.matrix(f_in, r), lab.matrix(r, f_out), float(r)
    truth = F.linear(a, (d @ u).t())  # the branch itself
    right = relative_error(lora.forward(a, d, u, alpha / r), truth)
    return _verdict(right, relative_error(alpha * a @ d @ u, truth), 0.99)


# ── class B: a wrong shape, index or symbol ─────────────────────────────────────────────────────────────────────────


@check("R7", 15, "17", EXACT)
def shape_of_the_value_weights(lab: Lab) -> tuple[float, str]:
    """printed: w_v ∈ (d_h), which a_{i−1} (n_T, d) cannot multiply; right: (d, d_h), the shape of (23)"""
    n, d_h = lab.size(3, 8), lab.size(1, 4)
    d = d_h + lab.size(1, 4)
    a, head = lab.matrix(n, d), lab.head(d, lab.size(1, 4), d_h)
    f = attention.forward(a, head)
    back = attention.backward(lab.matrix(n, d_h), a, head, f)
    right = mismatch((f.v.shape, (n, d_h)), (back.grads.w_v.shape, (d, d_h)))
    printed = _fits(lambda: attention.forward(a, head._replace(w_v=lab.matrix(d_h))))
    return right + printed, f"printed: ({n}×{d})({d_h}) does not multiply; right: {d}×{d_h}"


@check("R12", 15, "", EXACT)
def shape_of_the_new_row(lab: Lab) -> tuple[float, str]:
    """printed: the new token's output ∈ (n_T+1, d_h); right: one row, (d_h)"""
    n, d, d_h = lab.size(2, 7), lab.size(1, 8), lab.size(1, 8)
    head, cache = lab.head(d, d_rho := lab.size(1, 8), d_h), kv_cache.Cache(lab.matrix(n, d_rho), lab.matrix(n, d_h))
    step = kv_cache.append(lab.matrix(d), head, cache)
    right = mismatch((step.a.shape, (d_h,)), (step.rho.shape, (n + 1,)), (step.cache.v.shape, (n + 1, d_h)))
    return right, f"printed: {n + 1}×{d_h}; right: {tuple(step.a.shape)}"


@check("R14", 15, "", EXACT)
def where_the_chain_starts(lab: Lab) -> tuple[float, str]:
    """printed: the chain to Δ_causal starts at Δ^h_{i−1} (n_T, d), where it ends; right: at Δ^h_i (n_T, d_h)"""
    n, d_h = lab.size(3, 8), lab.size(1, 4)
    d = d_h + lab.size(1, 4)
    a, head = lab.matrix(n, d), lab.head(d, lab.size(1, 4), d_h)
    f = attention.forward(a, head)
    back = attention.backward(lab.matrix(n, d_h), a, head, f)
    square = (n, n)
    right = mismatch(
        (back.delta_causal.shape, square), (back.delta_scaled.shape, square), (back.delta_raw.shape, square),
        (back.delta.shape, (n, d)),
    )  # fmt: skip
    printed = _fits(lambda: attention.backward(back.delta, a, head, f))
    return right + printed, f"printed: ({n}×{d})({d_h}×{n}) does not multiply; right: ({n}×{d_h})({d_h}×{n})"


@check("R15", 15, "", EXACT)
def first_row_of_the_embedding(lab: Lab) -> tuple[float, str]:
    """printed: row 1 of a_i is w_emb(1), and ohe(a_{i−1}) is filled with a_0; right: w_emb(t_1), and a_{i−1} itself"""
    n, d = lab.size(3, 8), lab.size(4, 8)
    n_rows = lab.size(n, 9)
    w, a_0, positions = lab.matrix(n_rows, d), lab.ids(n, n_rows), torch.arange(n)
    a_0[0] = lab.size(1, n_rows - 1)  # not the first id
    tokens, places = embedding.forward(a_0, w), embedding.forward(positions, w)
    right = (tokens - w[a_0]).abs().max().item() + (places - w[:n]).abs().max().item()
    printed = (w[0] - w[a_0[0]]).abs().max().item()  # the same for positions, filled with a_0 in print
    return _verdict(right, printed, 1e-3)


@check("R16", 15, "13", EXACT)
def what_the_mask_empties(lab: Lab) -> tuple[float, str]:
    """printed: ρ_scaled is 0 for β > α; right: ρ_scaled is full, ρ_causal is cut, and m has its ones where β ≤ α"""
    a, head, _ = _mild_head(lab)
    f, future = attention.forward(a, head), _future(len(a))
    kept = (f.causal - f.scaled)[~future].abs().max().item()
    right = mismatch((f.causal.isinf().tolist(), future.tolist())) + kept + f.rho[future].abs().max().item()
    return _verdict(right, f.scaled[future].abs().max().item(), 1e-3)


@check("R17", 15, "19", IDENTITY)
def without_the_key_bias(lab: Lab) -> tuple[float, str]:
    """printed: (19) without b_q~, 1/√d_ρ and mask, hence not the ρ of (18); right: b_k drops out with all three"""
    a, head, _ = _mild_head(lab)
    n, d_rho = len(a), head.w_q.shape[1]
    assert head.b_k is not None
    f, bare = attention.forward(a, head), attention.forward(a, head._replace(b_k=None))
    h = a @ head.w_q + notation.tilde_rows(head.b_q, n)  # b_q alone has another shape than a w_q
    shape = mismatch((notation.tilde_rows(head.b_q, n).shape, (n, d_rho)))
    raw = bare.raw + h @ notation.tilde_rows(head.b_k, n).t()
    right = max(relative_error(f.raw, raw, bare.raw.abs().max().item()), relative_error(f.rho, bare.rho))
    right = max(right, relative_error(f.rho, _causal_softmax(bare.scaled)), shape)
    # |q kᵗ| ≤ √d_ρ ≤ 2, so that unmasked, row 1 gives its future 4e⁻⁴/(1+4e⁻⁴) = 0.068 or more
    return _verdict(right, (torch.softmax(bare.raw, 1) - f.rho).abs().max().item(), 0.068)


@check("R18", 15, "25", AUTOGRAD)
def which_term_is_rewritten(lab: Lab) -> tuple[float, str]:
    """printed: the steps to (25) rewrite "the left-most term"; right: the right-most, Δ·[ρ∘~(ρ⊖dS)] = [~(Δ⊖ρ)∘ρ]·dS"""
    n = lab.size(5, 8)
    s, delta = torch.tanh(lab.matrix(n, n)), lab.matrix(n, n)
    rho = torch.softmax(s, 1)
    (ds,) = differentiate(
        lambda x: torch.softmax(x, 1), s, upstream=delta
    )  # along the gradient, or the terms might agree
    size = ((delta * rho).norm() * ds.norm()).item()
    left_most = notation.frobenius(delta, rho * ds)
    right_most = notation.frobenius(delta, rho * notation.tilde_columns(notation.row_dot(rho, ds), n))
    rewritten = notation.frobenius(notation.tilde_columns(notation.row_dot(delta, rho), n) * rho, ds)
    truth = (ds * ds).sum()  # Δ·dρ, since Δ·dρ = (∂(Δ·ρ)/∂S)·dS
    right = max(
        relative_error(rewritten, right_most, size),
        relative_error(left_most - rewritten, truth, size),
        relative_error(notation.frobenius(attention.delta_causal(delta, rho), ds), truth, size),
    )
    return _verdict(right, relative_error(rewritten, left_most, size), 0.05)


@check("R19", 15, "40", AUTOGRAD)
def transposed_batch_normalization(lab: Lab) -> tuple[float, str]:
    """printed: transpose the backward pass of LN, sums not broadcast; right: that of BN, sums broadcast over d rows"""
    n, d = lab.size(4, 8), lab.size(4, 8)
    a, w, delta = lab.matrix(n, d), 1 + 0.3 * lab.matrix(d), lab.matrix(n, d)
    g = (delta * w).t()  # diag(w) Δᵗ ∈ (d, n_T)
    f = layernorm.forward(a, w, torch.zeros_like(w), EPS)
    ours = layernorm.delta_prev(delta, f.a_bar, f.sigma, w)
    (bn,) = differentiate(lambda x: F.batch_norm(x, None, None, training=True, eps=EPS), a.t(), upstream=g)
    (ln,) = differentiate(lambda x: F.layer_norm(x, (n,), eps=EPS), a.t(), upstream=g)
    sums = notation.sum_tokens(g)  # Σ_feat G has one entry per token: to subtract it from G it must be broadcast
    shapes = mismatch((sums.shape, (n,)), (notation.tilde_rows(sums, d).shape, g.shape))
    return _verdict(relative_error(ours, bn.t()) + shapes, relative_error(ln.t(), bn.t()), 0.05)


@check("R20", 15, "50", IDENTITY)
def all_terms_of_a_row_product(lab: Lab) -> tuple[float, str]:
    """printed: row i of ~(A⊖B) as a_i1 b_i1 + a_in b_in; right: the whole sum from 1 to n (the same only for n = 2)"""
    n = lab.size(3, 8)
    a, b = lab.matrix(n, n).abs() + 0.5, lab.matrix(n, n).abs() + 0.5  # each term left out is 0.25 or more

    def printed(a: Tensor, b: Tensor) -> Tensor:
        return (a[:, 0] * b[:, 0] + a[:, -1] * b[:, -1])[:, None].expand(-1, len(a))

    def ours(a: Tensor, b: Tensor) -> Tensor:
        return notation.tilde_columns(notation.row_dot(a, b), len(a))

    truth = (a * b) @ torch.ones_like(a)
    two = a[:2, :2], b[:2, :2]
    right = relative_error(ours(a, b), truth) + relative_error(printed(*two), ours(*two))
    return _verdict(right, (printed(a, b) - truth).abs().max().item(), 0.25)


@check("R21", 15, "51", IDENTITY)
def last_entry_of_the_broadcast(lab: Lab) -> tuple[float, str]:
    """printed, in the proof of (51): entry (n, n) is a_1·b_1, and AB for A∘B; right: a_n·b_n, and A∘B"""
    n = lab.size(4, 8)
    a, b, c = lab.matrix(n, n), lab.matrix(n, n), lab.matrix(n, n)
    b[-1, -1] = c[-1, -1] = 1
    a[0], a[-1] = b[0], -b[-1]  # a_1·b_1 − a_n·b_n is then 1 or more
    rows = notation.tilde_columns(notation.row_dot(b, c), n)
    dots = notation.tilde_columns(notation.row_dot(a, b), n)
    truth = torch.einsum("ij,ij,ik,ik->i", a, b, b, c)
    size = torch.einsum("ij,ij,ik,ik->i", a.abs(), b.abs(), b.abs(), c.abs()).max().item()
    right = max(
        relative_error(notation.row_dot(a * b, rows), truth, size),
        relative_error(notation.row_dot(dots * b, c), truth, size),
        relative_error(notation.frobenius(dots * b, c), truth.sum(), n * size),
    )
    entry = (a * b).sum(1)[:, None].repeat(1, n)
    entry[-1, -1] = a[0].dot(b[0])
    printed = abs(((entry * b * c).sum() - truth.sum()).item())
    product = ((a @ b * (b * c).sum(1)[:, None]).sum(1) - truth).abs().max().item()
    error, note = _verdict(right, printed, 0.99)
    return error + unless(product, 0.01), f"{note}; AB for A∘B: off by {product:.2g}"


@check("R22", 15, "54", IDENTITY)
def symbols_of_appendix_b(lab: Lab) -> tuple[float, str]:
    """printed: λ_i = v_i·b, one token's output ∈ (n_T, d_h), "B = Aᵗ"; right: h_i·b, (d_h), both on S: softmax(PSPᵗ)"""
    n, d, width = lab.size(5, 8), lab.size(3, 6), lab.size(2, 4)
    a, head, p = lab.matrix(n, d), lab.head(d, width, width), lab.permutation(n)  # d_ρ = d_h, or v_i·b has no meaning
    f, b = attention.forward(a, head, causal=False), lab.matrix(width)
    b = b / b.norm()
    permuted = attention.forward(p @ a, head, causal=False)
    s = f.scaled
    right = max(
        relative_error(f.q @ notation.tilde_rows(b, n).t(), torch.mv(f.q, b).outer(torch.ones(n).double())),
        relative_error(permuted.rho, p @ torch.softmax(s, 1) @ p.t()),
        mismatch((permuted.a[0].shape, (width,))),
    )
    lambdas = (torch.mv(f.v, b) - torch.mv(f.q, b)).abs().max().item()
    transposed = (torch.softmax(s.t(), 1) - torch.softmax(s, 1).t()).abs().max().item()
    error, note = _verdict(right, lambdas, 0.01)
    return error + unless(transposed, 0.01), f"{note}; softmax(Sᵗ) is off softmax(S)ᵗ by {transposed:.2g}"


@check("R36", 15, "Table 3", AUTOGRAD)
def shape_of_the_projection(lab: Lab) -> tuple[float, str]:
    """printed: w_3 ∈ (d, d); right: (Σ_h d_h, d), for heads of any width"""
    n, d = lab.size(3, 6), lab.size(3, 8)
    heads = [(lab.size(1, 4), lab.size(1, 4)) for _ in range(lab.size(1, 3))]
    width = sum(d_h for _, d_h in heads)
    if width == d:
        heads, width = [*heads, (1, 2)], width + 2
    p, o, a_1 = lab.block(d, heads, 4 * d), transformer.Options(eps=EPS), lab.matrix(n, d)
    f = transformer.forward_block(a_1, p, o)
    deltas, grads = transformer.backward_block(lab.matrix(n, d), p, f, o)
    (truth,) = differentiate(lambda w: F.linear(f.a_3, w.t(), p.b_3), p.w_3, upstream=deltas.delta_4)
    right = relative_error(grads.w_3, truth) + mismatch((grads.w_3.shape, (width, d)), (f.a_3.shape, (n, width)))
    printed = _fits(lambda: linear.forward(f.a_3, lab.matrix(d, d), p.b_3))
    return right + printed, f"printed: ({n}×{width})({d}×{d}) does not multiply; right: {right:.0e}"

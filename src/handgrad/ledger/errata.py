"""The errata that can be measured: the printed form is wrong by a stated amount, the corrected form is right.

Each check contains the printed formula, chooses inputs on which the misprint has an effect for every seed, and takes the
corrected form from `paper/`. R28 and R38 are typographical and have no check.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import attention, embedding, kv_cache, layernorm, linear, lora, loss, notation, transformer
from ..paper.attention import Head
from ..paper.transformer import Network
from ..proof.oracles import differentiate, relative_error
from . import by_torch
from .check import AUTOGRAD, EXACT, IDENTITY, RandomInputs, check, disagreement, mismatch, raises, shortfall

EPS = 1e-5


def _compare(right: float, printed: float, at_least: float) -> tuple[float, str]:
    """The error of the corrected form, plus the amount by which the printed form's error is below `at_least`"""
    return right + shortfall(printed, at_least), f"printed: off by {printed:.2g}; right: {right:.0e}"


def _shapes_fit(operation: Callable[[], object]) -> float:
    """1 if an operation runs on shapes that must be rejected, else 0"""
    return mismatch((raises(RuntimeError, operation), True))


def _causal_softmax(scaled: Tensor) -> Tensor:
    return torch.softmax(by_torch.masked(scaled), 1)


def _printed_rho(scaled: Tensor) -> Tensor:
    """(13) and (15) as printed: a product with 0/1, then softmax"""
    return torch.softmax(scaled.tril(), 1)


def _unsaturated_head(rng: RandomInputs) -> tuple[Tensor, Head, Tensor]:
    """An input of 5 to 8 tokens, a head, and its q kᵗ/√d_ρ, scaled to ±1 so that no weight is negligible"""
    n, d, d_rho, d_h = rng.size(5, 8), rng.size(3, 6), rng.size(2, 4), rng.size(2, 4)
    a, head = rng.matrix(n, d), rng.head(d, d_rho, d_h)
    q, k, _ = by_torch.project(a, head)
    scaled = q @ k.t() / math.sqrt(d_rho)
    top = scaled.abs().max()
    return a, head._replace(w_q=head.w_q / top, b_q=head.b_q / top), scaled / top


def _narrow_head(rng: RandomInputs) -> tuple[Tensor, Head, attention.Forward, attention.Backward]:
    """A head with d_h < d, its input, and both passes"""
    n, d_h = rng.size(3, 8), rng.size(1, 4)
    d = d_h + rng.size(1, 4)
    a, head = rng.matrix(n, d), rng.head(d, rng.size(1, 4), d_h)
    f = attention.forward(a, head)
    return a, head, f, attention.backward(rng.matrix(n, d_h), a, head, f)


# ── class A: the printed form changes results ───────────────────────────────────────────────────────────────────────


@check("R1", 15, "13", IDENTITY)
def mask(rng: RandomInputs) -> tuple[float, str]:
    """printed: mask by a product with 0/1, which leaves exp(0) = 1 on the future; right: −∞, and ρ is triangular"""
    n = rng.size(5, 8)
    scaled = torch.tanh(rng.matrix(n, n))  # below 1, so that ρ_11 is at most e/(e+4) = 0.40 in the printed form
    rho = notation.softmax(attention.mask(scaled))
    right = relative_error(rho, _causal_softmax(scaled)) + rho[by_torch.future(n)].abs().max().item()
    printed = _printed_rho(scaled)[0, 1:].sum().item()
    return right + shortfall(printed, 0.59), f"printed: {printed:.0%} of row 1's weight on the future; right: 0"


@check("R2", 15, "27", AUTOGRAD)
def backward_of_the_mask(rng: RandomInputs) -> tuple[float, str]:
    """printed: (27) Δ_scaled = Δ_causal and (29) ∂b_k = 0 with a 0/1 mask; right: both, but only for the −∞ mask"""
    a, head, scaled = _unsaturated_head(rng)
    f, delta = attention.forward(a, head), rng.matrix(len(a), head.w_v.shape[1])
    ours = attention.backward(delta, a, head, f).delta_scaled
    (expected,) = differentiate(lambda s: _causal_softmax(s) @ f.v, f.scaled, upstream=delta)
    right = relative_error(ours, expected)

    delta_rho = delta @ f.v.t()
    (delta_causal,) = differentiate(lambda s: torch.softmax(s, 1), scaled.tril(), upstream=delta_rho)
    (delta_scaled,) = differentiate(_printed_rho, scaled, upstream=delta_rho)
    printed = relative_error(delta_causal, delta_scaled)

    # a shift of b_k that adds 1 to the score of token 1 with itself: it must have no effect, and in print it has one
    assert head.b_k is not None
    q = F.linear(a, head.w_q.t(), head.b_q)
    shift = q[0] * math.sqrt(q.shape[1]) / q[0].dot(q[0])
    right += relative_error(attention.forward(a, head._replace(b_k=head.b_k + shift)).rho, f.rho)
    added = (q @ shift / math.sqrt(q.shape[1]))[:, None]
    change = (_printed_rho(scaled + added) - _printed_rho(scaled)).abs().max().item()
    error, note = _compare(right, printed, 0.05)
    return error + shortfall(change, 0.07), f"{note}; b_k changes the printed ρ by {change:.2f}"


@check("R3", 15, "", AUTOGRAD)
def frozen_is_not_blocked(rng: RandomInputs) -> tuple[float, str]:
    """printed: Δ_11 = α Δ_12 (d u)ᵗ on a frozen layer; right: Δ_12 w_11ᵗ is added, or a new adapter blocks every signal"""
    n, d, n_vocab = rng.size(3, 6), rng.size(3, 6), rng.size(4, 8)
    p = rng.network(n_vocab, n, d, [(2, 2)], rank=rng.size(1, 3))
    a_11, delta_12 = rng.matrix(n, d), rng.matrix(n, n_vocab)

    def errors(p: Network) -> tuple[float, float]:
        assert p.w_11 is not None and p.adapter is not None
        w_11, (d_11, u_11, scale) = p.w_11, p.adapter

        def layer(x: Tensor) -> Tensor:
            return F.linear(x, w_11.t(), p.b_11) + scale * F.linear(F.linear(x, d_11.t()), u_11.t())

        ours = transformer.delta_before_logits(delta_12, p)
        (expected,) = differentiate(layer, a_11, upstream=delta_12)
        disagrees = disagreement(layer, a_11, ours, delta_12, rng)
        return relative_error(ours, expected) + disagrees, relative_error(
            scale * delta_12 @ (d_11 @ u_11).t(), expected
        )

    assert p.adapter is not None
    fresh = p.adapter._replace(u_11=torch.zeros_like(p.adapter.u_11))  # as adapters start: the printed Δ_11 is 0
    right, printed = errors(p)
    right_fresh, printed_fresh = errors(p._replace(adapter=fresh))
    error, note = _compare(max(right, right_fresh), printed, 0.02)
    return error + mismatch((printed_fresh, 1.0)), f"{note}; with a new adapter printed: 0"


@check("R4", 15, "", IDENTITY)
def cached_row_is_scaled(rng: RandomInputs) -> tuple[float, str]:
    """printed: the cached attention row is softmax(q [k_cache⊕k]ᵗ); right: divided by √d_ρ first, as in (18)"""
    n, d, d_rho = rng.size(3, 7), rng.size(3, 6), rng.size(3, 6)
    a, head = rng.matrix(n + 1, d), rng.head(d, d_rho, rng.size(1, 4))
    _, k, v = by_torch.project(a, head)
    raw = F.linear(a[-1], head.w_q.t(), head.b_q) @ k.t()
    # scores over a range of 4: a factor of e⁴ between the largest and the smallest weight, instead of at most e^2.3
    stretch = 4 / (raw.max() - raw.min())
    head, raw = head._replace(w_q=head.w_q * stretch, b_q=head.b_q * stretch), raw * stretch
    step = kv_cache.append(a[-1], head, kv_cache.Cache(k[:-1], v[:-1]))
    expected = torch.softmax(raw / math.sqrt(d_rho), 0)
    right = max(relative_error(step.rho, expected), relative_error(step.a, expected @ v, v.abs().max().item()))
    return _compare(right, (torch.softmax(raw, 0) - expected).abs().max().item(), 0.005)


@check("R5", 15, "", AUTOGRAD)
def the_last_row_has_no_target(rng: RandomInputs) -> tuple[float, str]:
    """printed: Δ_12 = y_pred − y_gt on all n_T rows, no L_seq; right: L_seq sums n_T−1 rows, row n_T of Δ_12 is 0"""
    n, n_vocab = rng.size(3, 8), rng.size(2, 8)
    a_12, ids = rng.matrix(n, n_vocab), rng.ids(n, n_vocab)
    targets = torch.cat([ids[1:], torch.tensor([loss.NO_TARGET])])
    y_pred = torch.softmax(a_12, 1)

    def total(x: Tensor) -> Tensor:
        return F.cross_entropy(x[:-1], ids[1:], reduction="sum")

    ours = loss.delta_logits(y_pred, targets)
    (expected,) = differentiate(total, a_12)
    mean = F.cross_entropy(a_12[:-1], ids[1:])
    right = max(relative_error(ours, expected), relative_error(loss.forward(a_12, targets), (n - 1) * mean))
    right += disagreement(total, a_12, ours, 1.0, rng)
    y_gt = torch.zeros_like(y_pred)
    y_gt[torch.arange(n - 1), ids[1:]] = 1
    return _compare(right, relative_error(y_pred - y_gt, expected), 0.124)  # some entry of row n_T is 1/n_vocab or more


@check("R6", 15, "", EXACT)
def the_next_position_not_the_next_id(rng: RandomInputs) -> tuple[float, str]:
    """printed: the target of token t is t + 1; right: the id at the next position (t + 1 may not even be an id)"""
    n, n_vocab = rng.size(3, 8), rng.size(2, 8)
    a_0 = rng.ids(n, n_vocab)
    a_0[:2] = n_vocab - 1  # the same id twice, and the last one: t + 1 is wrong, and outside the vocabulary
    found, next_ids, printed = loss.next_tokens(a_0).tolist(), a_0.tolist()[1:], (a_0 + 1).tolist()[:-1]
    right = mismatch(*zip(found[:-1], next_ids, strict=True), (found[-1], loss.NO_TARGET))
    wrong = mismatch(*zip(printed, next_ids, strict=True))
    error = right + shortfall(wrong, 1) + mismatch((printed[0], n_vocab))
    return error, f"printed: {wrong:.0f} of {n - 1} targets wrong; right: {right:.0f}"


def _final_norm(a: Tensor, p: Network) -> Tensor:
    """a_1 → a_11 with torch's layers"""
    for b in p.blocks:
        x = F.layer_norm(a, b.w_1.shape, b.w_1, b.b_1, EPS)
        heads = [by_torch.head_output(x, x, x, h) for h in b.heads]
        a = a + F.linear(torch.cat(heads, 1), b.w_3.t(), b.b_3)
        x = F.layer_norm(a, b.w_5.shape, b.w_5, b.b_5, EPS)
        a = a + F.linear(F.gelu(F.linear(x, b.w_6.t(), b.b_6), approximate="tanh"), b.w_8.t(), b.b_8)
    return F.layer_norm(a, p.w_10.shape, p.w_10, p.b_10, EPS)


@check("R9", 15, "", AUTOGRAD)
def tied_weights_add_up(rng: RandomInputs) -> tuple[float, str]:
    """printed: no rule for w_11 = w_tokᵗ; right: ∂w_tok = ohe(a_0)ᵗ Δ_1 + Δ_12ᵗ a_11, so absent tokens get a gradient too"""
    n, d, n_vocab = rng.size(4, 6), rng.size(6, 8), rng.size(6, 9)
    p = rng.network(n_vocab, n, d, [(2, 3), (3, 2)], tied=True)
    a_0 = rng.ids(n, n_vocab - 1)  # the last token is absent

    def loss_of(a_12: Tensor) -> Tensor:
        return F.cross_entropy(a_12[:-1], a_0[1:], reduction="sum")

    def network(w_tok: Tensor) -> Tensor:
        return loss_of(_final_norm(F.embedding(a_0, w_tok) + p.w_pos, p) @ w_tok.t())

    (expected,) = differentiate(network, p.w_tok)
    a_1 = F.embedding(a_0, p.w_tok) + p.w_pos
    a_11 = _final_norm(a_1, p)
    (delta_12,) = differentiate(loss_of, a_11 @ p.w_tok.t())
    (delta_1,) = differentiate(lambda a: loss_of(_final_norm(a, p) @ p.w_tok.t()), a_1)
    saved = transformer.forward(a_0, p, transformer.Options(eps=EPS))._replace(a_11=a_11)
    ours = transformer.grad_w_tok(delta_1, delta_12, saved, p)
    right = relative_error(ours, expected) + disagreement(network, p.w_tok, ours, 1.0, rng)
    embedding_alone = torch.zeros_like(p.w_tok).index_add(0, a_0, delta_1)
    error, note = _compare(right, relative_error(embedding_alone, expected), 0.01)
    return error + mismatch((ours[-1].count_nonzero().item(), d)), note.replace("printed", "embedding alone")


@check("R8", 15, "36", AUTOGRAD)
def epsilon(rng: RandomInputs) -> tuple[float, str]:
    """printed: no ε, so a constant row divides 0 by 0; right: σ = √(var + ε), with which (40) is still exact"""
    n, d = rng.size(2, 8), rng.size(4, 8)
    a, w, b, delta = rng.matrix(n, d), 1 + 0.3 * rng.matrix(d), rng.matrix(d), rng.matrix(n, d)
    a = 1e-3 * a / a.std(1, correction=0, keepdim=True)  # a variance of 1e−6, smaller than ε

    def layer(x: Tensor) -> Tensor:
        return F.layer_norm(x, w.shape, w, b, EPS)

    f, without = layernorm.forward(a, w, b, EPS), layernorm.forward(a, w, b, 0.0)
    (expected,) = differentiate(layer, a, upstream=delta)
    flat = torch.full((1, d), 0.5, dtype=a.dtype)
    right = max(
        relative_error(layernorm.delta_prev(delta, f.a_bar, f.sigma, w), expected),
        relative_error(f.a, layer(a)),
        relative_error(layernorm.forward(flat, w, b, EPS).a, b[None]),
    )
    printed = relative_error(layernorm.delta_prev(delta, without.a_bar, without.sigma, w), expected)
    not_nan = torch.isfinite(layernorm.forward(flat, w, b, 0.0).a).sum().item()
    # ‖error‖ ≥ ‖expected‖: of 64 entries at most, the largest is off by 1/8
    error, note = _compare(right, printed, 0.1)
    return error + not_nan, f"{note}; a constant row printed: NaN"


@check("R11", 15, "43", IDENTITY)
def scale_of_an_adapter(rng: RandomInputs) -> tuple[float, str]:
    """printed: a factor α, "usually α = r", r times the branch; right: the usual scale is α/r, so α = r means 1"""
    n, f_in, f_out, r = rng.size(2, 8), rng.size(2, 8), rng.size(2, 8), rng.size(2, 6)
    a, d, u, alpha = rng.matrix(n, f_in), rng.matrix(f_in, r), rng.matrix(r, f_out), float(r)
    expected = F.linear(a, (d @ u).t())  # the branch with a factor of 1
    right = relative_error(lora.forward(a, d, u, alpha / r), expected)
    return _compare(right, relative_error(alpha * a @ d @ u, expected), 0.99)


# ── class B: a wrong shape, index or symbol ─────────────────────────────────────────────────────────────────────────


@check("R7", 15, "17", EXACT)
def shape_of_the_value_weights(rng: RandomInputs) -> tuple[float, str]:
    """printed: w_v ∈ (d_h), which a_{i−1} (n_T, d) cannot be multiplied with; right: (d, d_h), the shape of (23)"""
    a, head, f, back = _narrow_head(rng)
    (n, d), d_h = a.shape, len(head.b_v)
    right = mismatch((f.v.shape, (n, d_h)), (back.grads.w_v.shape, (d, d_h)))
    printed = _shapes_fit(lambda: attention.forward(a, head._replace(w_v=rng.matrix(d_h))))
    return right + printed, f"printed: ({n}×{d})({d_h}) does not multiply; right: {d}×{d_h}"


@check("R12", 15, "", EXACT)
def shape_of_the_new_row(rng: RandomInputs) -> tuple[float, str]:
    """printed: the new token's output ∈ (n_T+1, d_h); right: one row, (d_h)"""
    n, d, d_h = rng.size(2, 7), rng.size(1, 8), rng.size(1, 8)
    head, cache = rng.head(d, d_rho := rng.size(1, 8), d_h), kv_cache.Cache(rng.matrix(n, d_rho), rng.matrix(n, d_h))
    step = kv_cache.append(rng.matrix(d), head, cache)
    right = mismatch((step.a.shape, (d_h,)), (step.rho.shape, (n + 1,)), (step.cache.v.shape, (n + 1, d_h)))
    return right, f"printed: {n + 1}×{d_h}; right: {tuple(step.a.shape)}"


@check("R14", 15, "", EXACT)
def where_the_chain_starts(rng: RandomInputs) -> tuple[float, str]:
    """printed: the chain to Δ_causal starts at Δ^h_{i−1} (n_T, d), where it ends; right: at Δ^h_i (n_T, d_h)"""
    a, head, f, back = _narrow_head(rng)
    (n, d), d_h, square = a.shape, len(head.b_v), (len(a), len(a))
    right = mismatch(
        (back.delta_causal.shape, square), (back.delta_scaled.shape, square), (back.delta_raw.shape, square),
        (back.delta.shape, (n, d)),
    )  # fmt: skip
    printed = _shapes_fit(lambda: attention.backward(back.delta, a, head, f))
    return right + printed, f"printed: ({n}×{d})({d_h}×{n}) does not multiply; right: ({n}×{d_h})({d_h}×{n})"


@check("R15", 15, "", EXACT)
def first_row_of_the_embedding(rng: RandomInputs) -> tuple[float, str]:
    """printed: row 1 of a_i is w_emb(1), and ohe(a_{i−1}) is filled with a_0; right: w_emb(t_1), and a_{i−1} itself"""
    n, d = rng.size(3, 8), rng.size(4, 8)
    n_rows = rng.size(n, 9)
    w, a_0, positions = rng.matrix(n_rows, d), rng.ids(n, n_rows), torch.arange(n)
    a_0[0] = rng.size(1, n_rows - 1)  # not the first id
    tokens, positions_embedded = embedding.forward(a_0, w), embedding.forward(positions, w)
    right = (tokens - w[a_0]).abs().max().item() + (positions_embedded - w[:n]).abs().max().item()
    printed = (w[0] - w[a_0[0]]).abs().max().item()  # the same for positions, filled with a_0 in print
    return _compare(right, printed, 1e-3)


@check("R16", 15, "13", EXACT)
def which_scores_are_masked(rng: RandomInputs) -> tuple[float, str]:
    """printed: ρ_scaled is 0 for β > α; right: ρ_scaled is full, ρ_causal is masked, and m is 1 where β ≤ α"""
    a, head, _ = _unsaturated_head(rng)
    f, future = attention.forward(a, head), by_torch.future(len(a))
    past = (f.causal - f.scaled)[~future].abs().max().item()
    right = mismatch((f.causal.isinf().tolist(), future.tolist())) + past + f.rho[future].abs().max().item()
    return _compare(right, f.scaled[future].abs().max().item(), 1e-3)


@check("R17", 15, "19", IDENTITY)
def without_the_key_bias(rng: RandomInputs) -> tuple[float, str]:
    """printed: (19) without b_q~, 1/√d_ρ and mask, hence not the ρ of (18); right: b_k cancels with all three"""
    a, head, _ = _unsaturated_head(rng)
    n, d_rho = len(a), head.w_q.shape[1]
    assert head.b_k is not None
    f, bare = attention.forward(a, head), attention.forward(a, head._replace(b_k=None))
    h = a @ head.w_q + notation.tilde_rows(head.b_q, n)  # b_q itself has another shape than a w_q
    shape = mismatch((notation.tilde_rows(head.b_q, n).shape, (n, d_rho)))
    raw = bare.raw + h @ notation.tilde_rows(head.b_k, n).t()
    right = max(relative_error(f.raw, raw, bare.raw.abs().max().item()), relative_error(f.rho, bare.rho))
    right = max(right, relative_error(f.rho, _causal_softmax(bare.scaled)), shape)
    # |q kᵗ| ≤ √d_ρ ≤ 2, so that unmasked, row 1 gives its future 4e⁻⁴/(1+4e⁻⁴) = 0.068 or more
    return _compare(right, (torch.softmax(bare.raw, 1) - f.rho).abs().max().item(), 0.068)


@check("R18", 15, "25", AUTOGRAD)
def which_term_is_rewritten(rng: RandomInputs) -> tuple[float, str]:
    """printed: the steps to (25) rewrite "the left-most term"; right: the right-most, Δ·[ρ∘~(ρ⊖dS)] = [~(Δ⊖ρ)∘ρ]·dS"""
    n = rng.size(5, 8)
    s, delta = torch.tanh(rng.matrix(n, n)), rng.matrix(n, n)
    rho = torch.softmax(s, 1)
    # along the gradient, so that the terms differ
    (ds,) = differentiate(lambda x: torch.softmax(x, 1), s, upstream=delta)
    size = ((delta * rho).norm() * ds.norm()).item()
    left_most = notation.frobenius(delta, rho * ds)
    right_most = notation.frobenius(delta, rho * notation.tilde_columns(notation.row_dot(rho, ds), n))
    rewritten = notation.frobenius(notation.tilde_columns(notation.row_dot(delta, rho), n) * rho, ds)
    expected = (ds * ds).sum()  # Δ·dρ, since Δ·dρ = (∂(Δ·ρ)/∂S)·dS
    right = max(
        relative_error(rewritten, right_most, size),
        relative_error(left_most - rewritten, expected, size),
        relative_error(notation.frobenius(attention.delta_causal(delta, rho), ds), expected, size),
    )
    return _compare(right, relative_error(rewritten, left_most, size), 0.05)


@check("R19", 15, "40", AUTOGRAD)
def transposed_batch_normalization(rng: RandomInputs) -> tuple[float, str]:
    """printed: transpose the backward pass of LN, sums not broadcast; right: that of BN, sums broadcast over d rows"""
    n, d = rng.size(4, 8), rng.size(4, 8)
    a, w, delta = rng.matrix(n, d), 1 + 0.3 * rng.matrix(d), rng.matrix(n, d)
    g = (delta * w).t()  # diag(w) Δᵗ ∈ (d, n_T)
    f = layernorm.forward(a, w, torch.zeros_like(w), EPS)
    ours = layernorm.delta_prev(delta, f.a_bar, f.sigma, w)
    (bn,) = differentiate(lambda x: F.batch_norm(x, None, None, training=True, eps=EPS), a.t(), upstream=g)
    (ln,) = differentiate(lambda x: F.layer_norm(x, (n,), eps=EPS), a.t(), upstream=g)
    sums = notation.sum_tokens(g)  # Σ_feat G has one entry per token: to subtract it from G it must be broadcast
    shapes = mismatch((sums.shape, (n,)), (notation.tilde_rows(sums, d).shape, g.shape))
    return _compare(relative_error(ours, bn.t()) + shapes, relative_error(ln.t(), bn.t()), 0.05)


@check("R20", 15, "50", IDENTITY)
def all_terms_of_a_row_product(rng: RandomInputs) -> tuple[float, str]:
    """printed: row i of ~(A⊖B) as a_i1 b_i1 + a_in b_in; right: the full sum from 1 to n (equal only for n = 2)"""
    n = rng.size(3, 8)
    a, b = rng.matrix(n, n).abs() + 0.5, rng.matrix(n, n).abs() + 0.5  # each omitted term is 0.25 or more

    def printed(a: Tensor, b: Tensor) -> Tensor:
        return (a[:, 0] * b[:, 0] + a[:, -1] * b[:, -1])[:, None].expand(-1, len(a))

    def ours(a: Tensor, b: Tensor) -> Tensor:
        return notation.tilde_columns(notation.row_dot(a, b), len(a))

    expected = (a * b) @ torch.ones_like(a)
    two = a[:2, :2], b[:2, :2]
    right = relative_error(ours(a, b), expected) + relative_error(printed(*two), ours(*two))
    return _compare(right, (printed(a, b) - expected).abs().max().item(), 0.25)


@check("R21", 15, "51", IDENTITY)
def last_entry_of_the_broadcast(rng: RandomInputs) -> tuple[float, str]:
    """printed, in the proof of (51): entry (n, n) is a_1·b_1, and AB for A∘B; right: a_n·b_n, and A∘B"""
    n = rng.size(4, 8)
    a, b, c = rng.matrix(n, n), rng.matrix(n, n), rng.matrix(n, n)
    b[-1, -1] = c[-1, -1] = 1
    a[0], a[-1] = b[0], -b[-1]  # a_1·b_1 − a_n·b_n is then 1 or more
    rows = notation.tilde_columns(notation.row_dot(b, c), n)
    dots = notation.tilde_columns(notation.row_dot(a, b), n)
    expected = torch.einsum("ij,ij,ik,ik->i", a, b, b, c)
    size = torch.einsum("ij,ij,ik,ik->i", a.abs(), b.abs(), b.abs(), c.abs()).max().item()
    right = max(
        relative_error(notation.row_dot(a * b, rows), expected, size),
        relative_error(notation.row_dot(dots * b, c), expected, size),
        relative_error(notation.frobenius(dots * b, c), expected.sum(), n * size),
    )
    entry = (a * b).sum(1)[:, None].repeat(1, n)
    entry[-1, -1] = a[0].dot(b[0])
    printed = abs(((entry * b * c).sum() - expected.sum()).item())
    product = ((a @ b * (b * c).sum(1)[:, None]).sum(1) - expected).abs().max().item()
    error, note = _compare(right, printed, 0.99)
    return error + shortfall(product, 0.01), f"{note}; AB for A∘B: off by {product:.2g}"


@check("R22", 15, "54", IDENTITY)
def symbols_of_appendix_b(rng: RandomInputs) -> tuple[float, str]:
    """printed: λ_i = v_i·b, one token's output ∈ (n_T, d_h), "B = Aᵗ"; right: h_i·b, (d_h), both on S: softmax(PSPᵗ)"""
    n, d, width = rng.size(5, 8), rng.size(3, 6), rng.size(2, 4)
    a, head, p = rng.matrix(n, d), rng.head(d, width, width), rng.permutation(n)  # d_ρ = d_h, so that v_i·b is defined
    f, b = attention.forward(a, head, causal=False), rng.matrix(width)
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
    error, note = _compare(right, lambdas, 0.01)
    return error + shortfall(transposed, 0.01), f"{note}; softmax(Sᵗ) is off softmax(S)ᵗ by {transposed:.2g}"


@check("R36", 15, "Table 3", AUTOGRAD)
def shape_of_the_projection(rng: RandomInputs) -> tuple[float, str]:
    """printed: w_3 ∈ (d, d); right: (Σ_h d_h, d), for heads of any width"""
    n, d = rng.size(3, 6), rng.size(3, 8)
    heads = [(rng.size(1, 4), rng.size(1, 4)) for _ in range(rng.size(1, 3))]
    width = sum(d_h for _, d_h in heads)
    if width == d:
        heads, width = [*heads, (1, 2)], width + 2
    p, o, a_1 = rng.block(d, heads, 4 * d), transformer.Options(eps=EPS), rng.matrix(n, d)
    f = transformer.forward_block(a_1, p, o)
    deltas, grads = transformer.backward_block(rng.matrix(n, d), p, f, o)
    (expected,) = differentiate(lambda w: F.linear(f.a_3, w.t(), p.b_3), p.w_3, upstream=deltas.delta_4)
    right = relative_error(grads.w_3, expected) + mismatch((grads.w_3.shape, (width, d)), (f.a_3.shape, (n, width)))
    printed = _shapes_fit(lambda: linear.forward(f.a_3, rng.matrix(d, d), p.b_3))
    return right + printed, f"printed: ({n}×{width})({d}×{d}) does not multiply; right: {right:.0e}"

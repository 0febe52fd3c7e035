"""Sections 3 and 4, equations 18 and 22–35: causal self-attention of all heads, in tiles.

    q  (m, h, d_ρ)      k  (n, h_kv, d_ρ)      v  (n, h_kv, d_h)      a, Δ  (m, h, d_h)      lse  (m, h)

No n×n matrix is stored: the backward pass rebuilds ρ = exp(s − lse), s = q kᵗ/√d_ρ, one tile of keys at a time, for the
queries that can see them, from lse, the log-sum-exp of each row of scores; memory is linear in the tokens. `Spans` says
where the packed sequences end and which rows have queries: all of them (m = n), or only some.

h_kv = h in the paper. With fewer key heads (grouped queries; h_kv divides h), the r = h/h_kv query heads i with
i // r = g share key and value head g. The tiles have their queries as r neighboring rows of equal position, so a product
such as ρᵗ Δ also sums over the group.

`Scores` says what a score is and which keys a query sees: with a `window` the keys t − window + 1 … t only; with a `scale` σ
s = σ q kᵗ; with a `cap` c tanh(s/c) takes the place of s, so Δ_s = Δ_causal ∘ (1 − tanh²(s/c)). A head may have a sink, a
learned score b without a key, in the denominator of its softmax: lse' = log(exp lse + exp b), a' = a exp(lse − lse'), and
with these the backward pass is unchanged, since the sink's value is 0; ∂b = −Σ_t exp(b − lse'_t) (Δ_t ⊖ a'_t).

Sequences that share a prefix may have it once in the stream: a span then names the rows `before` its own. Its queries see
keys [prefix | own], and Δ_k and Δ_v of the prefix are the sums over all spans that see it.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import HandgradError
from ..kernels import calls
from ..kernels.calls import Scores as Scores
from . import _tiles
from ._scores import at_least_float32, tanh_of_scores, with_sinks
from ._scores import attend_with_mask as attend_with_mask
from ._scores import scores_of as scores_of
from ._spans import Span as Span
from ._spans import Spans as Spans
from ._spans import joined, sum_into_sources, without_prefixes
from ._spans import spans_of as spans_of

FLOAT32_SCORES = 1024.0  # rounding a larger score to float32 changes ρ by more than 1e-4 of its value
PLAIN = Scores()  # of the paper


class Saved(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    lse: Tensor
    sinks: Tensor | None = None  # (h)


def forward(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, scores: Scores = PLAIN, sinks: Tensor | None = None
) -> tuple[Tensor, Saved]:
    """a^h = softmax(mask(q kᵗ/√d_ρ)) v for every head and every sequence   (18), (34)"""
    if any(span.before for span in spans):
        spans, sources = without_prefixes(spans)
        a, saved = forward(q, joined(k, sources), joined(v, sources), spans, scores, sinks)
        return a, saved._replace(k=k, v=v)  # the copies of a prefix are made again
    _check(q, k, v, scores)
    a = v.new_empty(*q.shape[:2], v.shape[2])
    lse = torch.empty(q.shape[:2], dtype=at_least_float32(v.dtype), device=v.device)
    sinks = None if sinks is None else sinks.detach().to(lse.dtype).contiguous()
    saved = Saved(q, k, v, a, lse, sinks)
    if _rows_in(span.queries for span in spans) < len(q):  # a row that is no query, as of padding, sees no key
        a.zero_()
        lse.zero_()
    if spans and calls.fits(lse, operands=(q, k, v)):
        calls.forward_attention(_sequences(spans, len(q)), scores, q, k, v, sinks, a, lse)
        return a, saved
    for span in spans:
        operands = (q, span.queries), (k, span.keys), (v, span.keys)
        seen = _within(scores, span)
        library = v.device.type == "cpu" and q.shape[2] == v.shape[2] and span.positions is None
        if library and scores.cap is None:
            queries, keys, values = (_by_head(x, rows, span) for x, rows in operands)
            out, row_lse = _forward_by_library(queries, keys, values, seen)
            if sinks is not None:
                out, row_lse = with_sinks(out, row_lse, sinks[:, None])
            _by_head(a, span.queries, span).copy_(out)
            _by_head(lse, span.queries, span).copy_(row_lse)
        else:
            queries, keys, values = (_stack(x, rows, span, k.shape[1], lse.dtype) for x, rows in operands)
            row_sinks = _stacked_sinks(saved, span, lse.dtype)
            out, row_lse = _forward_in_tiles(queries, keys, values, span.positions, seen, row_sinks)
            _unstack(out, a, span.queries, span, k.shape[1])
            _unstack(row_lse, lse, span.queries, span, k.shape[1])
    return a, saved


def backward(
    delta: Tensor, saved: Saved, spans: Spans, into: tuple[Tensor, Tensor, Tensor], scores: Scores = PLAIN
) -> None:
    """Δ → the error signals of q, k and v: Δ_raw k, Δ_rawᵗ q and ρᵗ Δ, the last two summed over the query heads that share
    a key, written `into` tensors of their shapes"""
    k, a, lse = saved.k, saved.a, saved.lse
    if any(span.before for span in spans):
        spans, sources = without_prefixes(spans)
        copied = saved._replace(k=joined(k, sources), v=joined(saved.v, sources))
        parts = [into[i].new_empty(len(copied.k), *into[i].shape[1:]) for i in (1, 2)]
        backward(delta, copied, spans, (into[0], parts[0], parts[1]), scores)
        for target, part in zip(into[1:], parts, strict=True):
            sum_into_sources(part, target, sources)
        return
    if _rows_in(span.queries for span in spans) < len(saved.q):
        into[0].zero_()
    if _rows_in(span.keys for span in spans) < len(k):
        into[1].zero_()  # a sequence without queries gives its keys and values no gradient
        into[2].zero_()
    if _backward_by_kernel(delta, saved, spans, into, scores):
        return
    # (Δ vᵗ) ⊖ ρ = Δ ⊖ a: the softmax correction of (25) needs only the output and its error signal
    correction = _correction(delta, a, lse.dtype)
    for span in spans:
        seen = _within(scores, span)
        grads = _backward_in_tiles(_operands(delta, saved, correction, span, seen), span.positions, seen)
        for target, rows, grad in zip(into, (span.queries, span.keys, span.keys), grads, strict=True):
            _unstack(grad, target, rows, span, k.shape[1])


def sink_signals(delta: Tensor, saved: Saved, spans: Spans) -> Tensor:
    """−ρ_sink (Δ ⊖ a) of every query, 0 in other rows: what it adds to the gradient of the heads' sinks. (m, h)

    ρ_sink = exp(b − lse) is the sink's part of the softmax, and its Δ_ρ is 0, since it has no value."""
    assert saved.sinks is not None
    found = torch.zeros_like(saved.lse)
    for span in spans:
        lse, a, errors = (x[span.queries] for x in (saved.lse, saved.a, delta))
        found[span.queries] = _correction(errors, a, lse.dtype).mul_((saved.sinks - lse).exp_()).neg_()
    return found


def maps(
    delta: Tensor, saved: Saved, lengths: tuple[int, ...], scores: Scores = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """ρ and the error signals of what the softmax reads, Δ_causal, and of q kᵗ, Δ_raw, of every head over the packed stream
    (h, n, n), zero between sequences, for inspection. The same tiles as in the backward pass, as large as a sequence."""
    a, lse = saved.a, saved.lse
    n, n_heads = lse.shape
    repeat = n_heads // saved.k.shape[1]
    correction = _correction(delta, a, lse.dtype)
    found = lse.new_zeros(3, n_heads, n, n)
    window = scores.window
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        span = Span(rows, rows, 1, None)
        queries, keys, values, errors, shift, norm = _operands(delta, saved, correction, span, scores)
        masks = [(slice(None), _tiles.upto(range(length), length, repeat, queries))] if scores.causal else []
        if window is not None:
            masks.append((slice(None), _tiles.after(range(-window, length - window), length, repeat, queries)))
        rho, slope = rho_tile(queries, keys, norm, masks, scores)  # (h_kv, length · r, length)
        signal = causal_signal_tile(errors, values, shift, rho)
        raw = signal * scores.factor(queries.shape[2])  # (28)
        for tile, target in zip((rho, signal, raw if slope is None else raw * slope), found, strict=True):
            by_head = tile.view(-1, length, repeat, length).transpose(1, 2)
            target[:, rows, rows] = by_head.flatten(0, 1)
        start += length
    return found[0], found[1], found[2]


# ── one tile ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rho_tile(q: Tensor, k: Tensor, lse: Tensor, masks: _tiles.Masks, of: Scores) -> tuple[Tensor, Tensor | None]:
    """ρ = exp(q kᵗ/√d_ρ − lse), and 0 where a key is not visible to a query (R1); and the slope of the cap, 1 − tanh², if
    there is one. (g, rows, columns)

    The zeros are written after the exponential, which is many times slower on −∞; the clamp before it keeps invisible
    entries from overflowing. A visible score never exceeds its row's log-sum-exp, so the clamp does not change it."""
    factor, slope = of.factor(q.shape[2]), None
    if of.cap is None:
        scores = torch.baddbmm(lse[..., None], q, k.transpose(1, 2), beta=-1, alpha=factor)
    else:
        tanh = tanh_of_scores(torch.bmm(q, k.transpose(1, 2)).mul_(factor / of.cap))
        slope = 1 - tanh * tanh
        scores = tanh.mul_(of.cap).sub_(lse[..., None])
    for rows, _ in masks:
        scores[:, rows].clamp_(max=0)
    scores.exp_()
    for rows, visible in masks:
        scores[:, rows].mul_(visible)
    return scores, slope


def causal_signal_tile(delta: Tensor, v: Tensor, correction: Tensor, rho: Tensor) -> Tensor:
    """Δ_causal = [Δ vᵗ − ~(Δ ⊖ a)] ∘ ρ   (25)"""
    return torch.baddbmm(correction[..., None], delta, v.transpose(1, 2), beta=-1).mul_(rho)


def _backward_in_tiles(
    operands: tuple[Tensor, ...], positions: list[int] | None, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """(g, rows, width) each, g = sequences × key heads. A tile is a range of keys and all queries that see one of them."""
    q, k, v, delta, shift, lse = operands
    causal, window, scale = scores.causal, scores.window, scores.factor(q.shape[2])  # Δ_raw = Δ_causal/√d_ρ   (28)
    grad_k, grad_v = k.new_empty(k.shape), v.new_empty(v.shape)
    grad_q = q.new_empty(q.shape) if window is None else q.new_zeros(q.shape)
    for cols, rows, masks in _tiles.of_keys(q, k, positions, causal, window):
        if rows.start == rows.stop:  # no query sees these keys
            grad_k[:, cols], grad_v[:, cols] = 0, 0
            continue
        queries, errors, keys = q[:, rows], delta[:, rows], k[:, cols]
        rho, slope = rho_tile(queries, keys, lse[:, rows], masks, scores)
        grad_v[:, cols] = torch.bmm(rho.transpose(1, 2), errors)  # ρᵗ Δ
        signal = causal_signal_tile(errors, v[:, cols], shift[:, rows], rho)  # (25)
        if slope is not None:
            signal.mul_(slope)
        grad_k[:, cols] = torch.bmm(signal.transpose(1, 2), queries)
        if cols.start == 0 and window is None:  # the first tile has all queries
            torch.bmm(signal, keys, out=grad_q)
        else:
            grad_q[:, rows].baddbmm_(signal, keys)
    return grad_q.mul_(scale), grad_k.mul_(scale), grad_v  # Δ_raw k, Δ_rawᵗ q, ρᵗ Δ


def _forward_by_library(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """torch's forward kernel for the CPU, which also returns the log-sum-exp; k and v may have fewer heads than q.
    (B, h, T, w) → (B, h, T, w), (B, h, T)"""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if scores.window is None:
        out, lse = kernel(q, k, v, 0.0, scores.causal, scale=scores.scale)
        return _with_overflow(q, k, out, lse)
    tiles = []
    for rows, seen, hidden in _tiles.of_queries(q[:, 0], k[:, 0], None, scores.causal, scores.window):
        mask = q.new_zeros(rows.stop - rows.start, seen.stop - seen.start)
        for columns, part in hidden:
            mask[:, columns].masked_fill_(part, -math.inf)
        operands = q[:, :, rows], k[:, :, seen], v[:, :, seen]
        tiles.append(kernel(*operands, 0.0, False, attn_mask=mask, scale=scores.scale))
    out, lse = torch.cat([out for out, _ in tiles], 2), torch.cat([lse for _, lse in tiles], 2)
    return _with_overflow(q, k, out, lse)


def _with_overflow(q: Tensor, k: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The library gives a row whose scores are not finite 0 and a log-sum-exp of 0, as if it saw no key: make it NaN."""
    if (zero := lse == 0).any():
        most = q.shape[-1] * q.abs().amax(-1).to(lse.dtype) * k.abs().amax().to(lse.dtype)  # no score is larger
        overflowed = zero & ~torch.isfinite(most)
        return out.masked_fill(overflowed[..., None], torch.nan), lse.masked_fill(overflowed, torch.nan)
    return out, lse


def _forward_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, positions: list[int] | None, of: Scores, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same with matrix products only: for any device, for d_ρ ≠ d_h, capped scores and queries in some rows only.
    (g, rows, width) as in the backward pass, sinks (g, rows) → (g, rows, d_h), (g, rows)"""
    out, lse = v.new_empty(*q.shape[:2], v.shape[2]), v.new_empty(q.shape[:2])
    for rows, seen, hidden in _tiles.of_queries(q, k, positions, of.causal, of.window):
        scores = scores_of(q[:, rows], k[:, seen], of)
        for columns, mask in hidden:
            scores[:, :, columns].masked_fill_(mask, -math.inf)
        lse[:, rows] = torch.logsumexp(scores, 2)
        rho = torch.softmax(scores, 2) if _needs_float64(lse[:, rows]) else scores.sub_(lse[:, rows, None]).exp_()
        out[:, rows] = torch.bmm(rho, v[:, seen])
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def _stacked_sinks(saved: Saved, span: Span, dtype: torch.dtype) -> Tensor | None:
    """The sink of every stacked query (g, rows)."""
    if saved.sinks is None:
        return None
    return _stack(saved.sinks.expand(saved.lse.shape), span.queries, span, saved.k.shape[1], dtype)


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _backward_by_kernel(
    delta: Tensor, saved: Saved, spans: Spans, into: tuple[Tensor, Tensor, Tensor], scores: Scores
) -> bool:
    """The same by a compiled kernel, for all sequences at once; False if no kernel takes these tensors."""
    q, k, v, a, lse, _ = saved
    if not spans or not calls.fits(lse) or _needs_float64(lse):
        return False
    delta = delta.to(q.dtype)
    if not calls.fits(lse, operands=(delta, q, k, v, a)):
        delta, q, k, v, a = (x.to(lse.dtype) for x in (delta, q, k, v, a))  # bfloat16 is computed in float32
        if not calls.fits(delta, q, k, v, a):
            return False
    # the kernel writes the signals of k and v for every query head: they add up in a group
    heads = q.shape[1]
    every_row = _rows_in(span.queries for span in spans) == len(q) and _rows_in(span.keys for span in spans) == len(k)
    new = lse.new_empty if every_row else lse.new_zeros
    found = [x if x.shape[1] == heads and calls.fits(lse, x) else new(len(x), heads, x.shape[2]) for x in into]
    calls.backward_attention(_sequences(spans, len(q)), scores, delta, q, k, v, a, lse, found)
    for target, x in zip(into, found, strict=True):
        if x is target:
            continue
        if calls.fits(x, target):
            calls.sum_heads(x, target)
        else:
            target.copy_(x.view(len(x), target.shape[1], -1, x.shape[2]).sum(2))
    return True


def _sequences(spans: Spans, m: int) -> calls.Sequences:
    """The rows of each sequence's keys and queries, and the positions of m rows of queries unless every token is one."""
    rows: list[tuple[int, int, int, int]] = []
    at: list[int] | None = None if all(span.positions is None for span in spans) else [0] * m
    for span in spans:
        keys, queries = span.length, (span.queries.stop - span.queries.start) // span.sequences
        for i in range(span.sequences):
            first, query = span.keys.start + i * keys, span.queries.start + i * queries
            rows.append((first, first + keys, query, query + queries))
            if at is not None:  # the kernel looks a position up by its row of q, which need not follow the one before
                positions = range(keys) if span.positions is None else span.positions
                if len(positions) != queries:
                    raise HandgradError(f"{queries} rows of queries with {len(positions)} positions")
                at[query : query + queries] = positions
    listed = None if at is None else torch.tensor(at, dtype=torch.int32, device="cpu")
    return calls.Sequences(calls.table(tuple(rows)), listed)


# ── packing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _by_head(x: Tensor, rows: slice, span: Span) -> Tensor:
    """(count · T, h, …) → (count, h, T, …), a view"""
    part = x[rows]
    return part.view(span.sequences, -1, *part.shape[1:]).transpose(1, 2)


def _by_group(x: Tensor, rows: slice, span: Span, n_groups: int) -> Tensor:
    """(count · T, h, …) → (count, h_kv, T, r, …), a view; r = 1 for keys and values"""
    part = x[rows]
    return part.view(span.sequences, -1, n_groups, part.shape[1] // n_groups, *part.shape[2:]).transpose(1, 2)


def _stack(x: Tensor, rows: slice, span: Span, n_groups: int, dtype: torch.dtype) -> Tensor:
    """(count · T, h, …) → (count · h_kv, T · r, …) in this dtype; a view where possible, which the products read as fast"""
    return _by_group(x, rows, span, n_groups).to(dtype).flatten(0, 1).flatten(1, 2)


def _unstack(result: Tensor, into: Tensor, rows: slice, span: Span, n_groups: int) -> None:
    """Write (count · h_kv, T · r, …) into these rows of (…, h, …)."""
    target = _by_group(into, rows, span, n_groups)
    target.copy_(result.view(target.shape))


def _operands(
    delta: Tensor, saved: Saved, correction: Tensor, span: Span, scores: Scores
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, Δ, Δ ⊖ a and lse of a span, stacked, for the tiles of the backward pass.

    The tiles recompute the scores and subtract lse. In float32 the two may differ by the rounding of numbers as large as
    the scores, which the exponential turns into a factor: large scores are recomputed in float64."""
    q, k, v, _, lse, _ = saved
    dtype = torch.float64 if _needs_float64(lse[span.queries]) else lse.dtype
    queries, errors = (_stack(x, span.queries, span, k.shape[1], dtype) for x in (q, delta))
    keys, values = (_stack(x, span.keys, span, k.shape[1], dtype) for x in (k, v))
    if dtype == lse.dtype:
        shift, norm = (_stack(x, span.queries, span, k.shape[1], dtype).contiguous() for x in (correction, lse))
    else:
        row_sinks = _stacked_sinks(saved, span, dtype)
        out, norm = _forward_in_tiles(queries, keys, values, span.positions, scores, row_sinks)
        shift = (errors * out).sum(2)
    return queries, keys, values, errors, shift, norm


def _check(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> None:
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads on {k.shape[1]} key heads and {v.shape[1]} value heads: "
            "the number of key heads and value heads must be equal and divide the number of query heads"
        )
    scores.numbers(q.shape[2])
    causal, window, *_ = scores
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window} with causal={causal}: a window is at least 1, and only for causal attention")


def _rows_in(slices: Iterable[slice]) -> int:
    return sum(rows.stop - rows.start for rows in slices)


def _within(scores: Scores, span: Span) -> Scores:
    """Without a window if every query sees all keys up to its own anyway."""
    return scores if scores.window is None or scores.window < span.length else scores._replace(window=None)


def _needs_float64(lse: Tensor) -> bool:
    """Whether float32 rounds the scores of these rows too much."""
    wide = lse.dtype != torch.float32 or lse.is_meta  # a plan counts tensors on the meta device
    return not wide and torch.linalg.vector_norm(lse, math.inf).item() > FLOAT32_SCORES


def _correction(delta: Tensor, a: Tensor, dtype: torch.dtype) -> Tensor:
    """Δ ⊖ a (m, h), with products in this dtype: where softmax saturates it cancels against numbers of equal size."""
    return (delta.to(dtype) * a).sum(2)

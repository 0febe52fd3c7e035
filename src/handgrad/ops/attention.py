"""Sections 3 and 4, equations 18 and 22–35: causal self-attention of all heads, in tiles.

    q  (m, h, d_ρ)      k  (n, h, d_ρ)      v  (n, h, d_h)      a, Δ  (m, h, d_h)      lse  (m, h)

No n×n matrix is stored: the backward pass rebuilds ρ = exp(q kᵗ/√d_ρ − lse) one tile of keys at a time, for the queries
that can see them, from lse, the log-sum-exp of each row of scores; memory is linear in the tokens. `Spans` says where
the packed sequences end and which rows have queries: all of them (m = n), or only some.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 128  # queries per tile in the forward pass
COLUMNS = 128  # keys per tile in the backward pass; all later queries belong to the tile
FLOAT32_SCORES = 1024.0  # rounding a larger score to float32 changes ρ by more than 1e-4 of its value


class Span(NamedTuple):
    """Neighbouring sequences of equal length, and their queries."""

    keys: slice  # their rows of k and v
    queries: slice  # their rows of q
    sequences: int
    positions: list[int] | None  # of the queries in their sequence, ascending; None: every token is a query

    @property
    def length(self) -> int:
        return (self.keys.stop - self.keys.start) // self.sequences  # type: ignore[no-any-return]


Spans = tuple[Span, ...]


def spans_of(lengths: tuple[int, ...], rows: Tensor | None = None) -> Spans:
    """The spans of sequences packed end to end; with `rows` (ascending), only those rows of the stream are queries."""
    spans: list[Span] = []
    if rows is not None:
        n_queries = 0
        start = 0
        for length, inside in zip(lengths, _rows_of_each(lengths, rows), strict=True):
            queries = slice(n_queries, n_queries + len(inside))
            spans.append(Span(slice(start, start + length), queries, 1, inside))
            start += length
            n_queries += len(inside)
        return tuple(span for span in spans if span.positions)
    start = i = 0
    while i < len(lengths):
        count = 1
        while i + count < len(lengths) and lengths[i + count] == lengths[i]:
            count += 1
        all_rows = slice(start, start + count * lengths[i])
        spans.append(Span(all_rows, all_rows, count, None))
        start += count * lengths[i]
        i += count
    return tuple(spans)


class Saved(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    lse: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, causal: bool) -> tuple[Tensor, Saved]:
    """a^h = softmax(mask(q kᵗ/√d_ρ)) v for every head and every sequence   (18), (34)"""
    a = v.new_empty(len(q), *v.shape[1:])
    lse = torch.empty(q.shape[:2], dtype=_at_least_float32(v.dtype), device=v.device)
    for span in spans:
        queries, keys, values = (
            _by_head(x, rows, span) for x, rows in ((q, span.queries), (k, span.keys), (v, span.keys))
        )
        library = span.positions is None and v.device.type == "cpu" and queries.shape[3] == values.shape[3]
        out, row_lse = (_forward_by_library if library else _forward_in_tiles)(
            queries, keys, values, span.positions, causal
        )
        _by_head(a, span.queries, span).copy_(out)
        _by_head(lse, span.queries, span).copy_(row_lse)
    return a, Saved(q, k, v, a, lse)


def backward(delta: Tensor, saved: Saved, spans: Spans, causal: bool, into: tuple[Tensor, Tensor, Tensor]) -> None:
    """Δ → the error signals of q, k and v: Δ_raw k, Δ_rawᵗ q and ρᵗ Δ, written `into` tensors of their shapes"""
    k, a, lse = saved.k, saved.a, saved.lse
    # (Δ vᵗ) ⊖ ρ = Δ ⊖ a: the softmax correction of (25) needs only the output and its error signal
    correction = _correction(delta, a, lse.dtype)
    if sum(span.keys.stop - span.keys.start for span in spans) < len(k):
        into[1].zero_()  # a sequence without queries gives its keys and values no gradient
        into[2].zero_()
    for span in spans:
        grads = _backward_in_tiles(*_operands(delta, saved, correction, span, causal), span.positions, causal)
        for target, rows, grad in zip(into, (span.queries, span.keys, span.keys), grads, strict=True):
            view = _by_head(target, rows, span)
            view.copy_(grad.view(view.shape))


def maps(delta: Tensor, saved: Saved, lengths: tuple[int, ...], causal: bool) -> tuple[Tensor, Tensor]:
    """ρ and Δ_causal of every head over the packed stream, (h, n, n), zero between sequences, for inspection. The same
    tiles as in the backward pass, each as large as a sequence."""
    a, lse = saved.a, saved.lse
    n, n_heads = lse.shape
    correction = _correction(delta, a, lse.dtype)
    rho, signal = lse.new_zeros(2, n_heads, n, n)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        span = Span(rows, rows, 1, None)
        queries, keys, values, errors, shift, norm = _operands(delta, saved, correction, span, causal)
        visible = _visible(range(length), length, queries) if causal else None
        rho[:, rows, rows] = rho_tile(queries, keys, norm, visible)
        signal[:, rows, rows] = causal_signal_tile(errors, values, shift, rho[:, rows, rows])
        start += length
    return rho, signal


# ── one tile ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rho_tile(q: Tensor, k: Tensor, lse: Tensor, visible: Tensor | None) -> Tensor:
    """ρ = exp(q kᵗ/√d_ρ − lse), and 0 where a key is not visible to one of the first queries (R1). (g, rows, columns)

    The zeros are written after the exponential, which is many times slower on −∞; the clamp before it keeps invisible
    entries from overflowing. A visible score never exceeds its row's log-sum-exp, so the clamp does not change it."""
    scores = torch.baddbmm(lse[..., None], q, k.transpose(1, 2), beta=-1, alpha=1 / math.sqrt(q.shape[2]))
    if visible is None:
        return scores.exp_()
    first = scores[:, : len(visible)]
    first.clamp_(max=0)
    scores.exp_()
    first.mul_(visible)
    return scores


def causal_signal_tile(delta: Tensor, v: Tensor, correction: Tensor, rho: Tensor) -> Tensor:
    """Δ_causal = [Δ vᵗ − ~(Δ ⊖ a)] ∘ ρ   (25)"""
    return torch.baddbmm(correction[..., None], delta, v.transpose(1, 2), beta=-1).mul_(rho)


def _backward_in_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    shift: Tensor,
    lse: Tensor,
    positions: list[int] | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(g, tokens, width) each, g = sequences × heads. A tile is a range of keys and all queries from its first key on."""
    m, n_keys = q.shape[1], k.shape[1]
    scale = 1 / math.sqrt(q.shape[2])  # Δ_raw = Δ_causal/√d_ρ   (28)
    grad_k, grad_v = k.new_empty(k.shape), v.new_empty(v.shape)
    query_positions = range(m) if positions is None else positions
    triangle = _visible(range(min(COLUMNS, n_keys)), min(COLUMNS, n_keys), q) if causal and positions is None else None
    for j in range(0, n_keys, COLUMNS):
        cols = slice(j, min(j + COLUMNS, n_keys))
        first = bisect_left(query_positions, j) if causal else 0
        if first == m:  # no query can see these keys
            grad_k[:, j:], grad_v[:, j:] = 0, 0
            break
        rows = slice(first, m)
        visible = None
        if triangle is not None:
            visible = triangle[: cols.stop - j, : cols.stop - j]
        elif causal:
            inside = query_positions[first : bisect_left(query_positions, cols.stop)]
            visible = _visible([p - j for p in inside], cols.stop - j, q)
        queries, errors, keys = q[:, rows], delta[:, rows], k[:, cols]
        rho = rho_tile(queries, keys, lse[:, rows], visible)
        grad_v[:, cols] = torch.bmm(rho.transpose(1, 2), errors)  # ρᵗ Δ
        signal = causal_signal_tile(errors, v[:, cols], shift[:, rows], rho)  # (25)
        grad_k[:, cols] = torch.bmm(signal.transpose(1, 2), queries)
        if j == 0:
            grad_q = torch.bmm(signal, keys)
        else:
            grad_q[:, rows].baddbmm_(signal, keys)
    return grad_q.mul_(scale), grad_k.mul_(scale), grad_v  # Δ_raw k, Δ_rawᵗ q, ρᵗ Δ


def _forward_by_library(
    q: Tensor, k: Tensor, v: Tensor, positions: list[int] | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """torch's forward kernel for the CPU, which also returns the log-sum-exp. (B, h, T, w) → (B, h, T, w), (B, h, T)"""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _forward_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, positions: list[int] | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """The same with matrix products only: for any device, for d_ρ ≠ d_h, and for queries in some rows only."""
    batch, n_heads, m, _ = q.shape
    dtype = _at_least_float32(v.dtype)
    q, k, v = (x.flatten(0, 1).to(dtype) for x in (q, k, v))
    out, lse = v.new_empty(len(v), m, v.shape[2]), v.new_empty(len(v), m)
    zero = lse.new_zeros(1, 1, 1)
    for rows, seen, future in _tiles(m, k.shape[1], positions, causal, q.device):
        scores = torch.baddbmm(zero, q[:, rows], k[:, :seen].transpose(1, 2), beta=0, alpha=1 / math.sqrt(q.shape[2]))
        if future is not None:
            scores[:, :, -future.shape[1] :].masked_fill_(future, -math.inf)
        lse[:, rows] = torch.logsumexp(scores, 2)
        rho = torch.softmax(scores, 2) if _needs_float64(lse[:, rows]) else scores.sub_(lse[:, rows, None]).exp_()
        out[:, rows] = torch.bmm(rho, v[:, :seen])
    return out.view(batch, n_heads, m, -1), lse.view(batch, n_heads, m)


def _tiles(
    m: int, n_keys: int, positions: list[int] | None, causal: bool, device: torch.device
) -> list[tuple[slice, int, Tensor | None]]:
    """Queries in groups of ROWS: their rows, the number of keys they see, and the mask of the last of those columns."""
    tiles: list[tuple[slice, int, Tensor | None]] = []
    for i in range(0, m, ROWS):
        rows = slice(i, min(i + ROWS, m))
        if not causal:
            tiles.append((rows, n_keys, None))
            continue
        here = range(rows.start, rows.stop) if positions is None else positions[rows]
        seen = here[-1] + 1
        tiles.append((rows, seen, _future([p - here[0] for p in here], seen - here[0], device)))
    return tiles


# ── packing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rows_of_each(lengths: tuple[int, ...], rows: Tensor) -> list[list[int]]:
    """Positions within their sequence of the given rows of the packed stream, one list per sequence."""
    inside: list[list[int]] = []
    start = i = 0
    listed = rows.tolist()
    for length in lengths:
        mine = []
        while i < len(listed) and listed[i] < start + length:
            mine.append(listed[i] - start)
            i += 1
        inside.append(mine)
        start += length
    return inside


def _by_head(x: Tensor, rows: slice, span: Span) -> Tensor:
    """(count · T, h, …) → (count, h, T, …), a view"""
    part = x[rows]
    return part.view(span.sequences, -1, *part.shape[1:]).transpose(1, 2)


def _stack(x: Tensor, rows: slice, span: Span, dtype: torch.dtype) -> Tensor:
    """(count · T, h, …) → (count · h, T, …) in this dtype; a view where possible, which the products read as fast"""
    return _by_head(x, rows, span).to(dtype).flatten(0, 1)


def _future(positions: list[int] | range, columns: int, device: torch.device) -> Tensor:
    """True where a column is after the query's position"""
    own = torch.tensor(list(positions), device=device)
    return torch.arange(columns, device=device)[None, :] > own[:, None]


def _visible(positions: list[int] | range, columns: int, like: Tensor) -> Tensor:
    """0 where a column is after the query's position, else 1"""
    return _future(positions, columns, like.device).logical_not_().to(like.dtype)


def _operands(
    delta: Tensor, saved: Saved, correction: Tensor, span: Span, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, Δ, Δ ⊖ a and lse of a span, stacked, for the tiles of the backward pass.

    The tiles recompute the scores and subtract lse. In float32 the two may differ by the rounding of numbers as large as
    the scores, which the exponential turns into a factor: large scores are recomputed in float64."""
    q, k, v, _, lse = saved
    dtype = torch.float64 if _needs_float64(lse[span.queries]) else lse.dtype
    queries, errors = (_stack(x, span.queries, span, dtype) for x in (q, delta))
    keys, values = (_stack(x, span.keys, span, dtype) for x in (k, v))
    if dtype == lse.dtype:
        shift, norm = (_stack(x, span.queries, span, dtype).contiguous() for x in (correction, lse))
    else:
        out, row_lse = _forward_in_tiles(queries[None], keys[None], values[None], span.positions, causal)
        shift, norm = (errors * out[0]).sum(2), row_lse[0]
    return queries, keys, values, errors, shift, norm


def _needs_float64(lse: Tensor) -> bool:
    """Whether float32 rounds the scores of these rows too much."""
    return lse.dtype == torch.float32 and lse.abs().amax().item() > FLOAT32_SCORES


def _correction(delta: Tensor, a: Tensor, dtype: torch.dtype) -> Tensor:
    """Δ ⊖ a (m, h), with products in this dtype: where softmax saturates it cancels against numbers of equal size."""
    return (delta.to(dtype) * a).sum(2)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and their log-sum-exp."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

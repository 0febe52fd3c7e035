"""Sections 3 and 4, equations 18 and 22–35: causal self-attention of all heads, in tiles.

    q  (m, h, d_ρ)      k  (n, h, d_ρ)      v  (n, h, d_h)      a, Δ  (m, h, d_h)      lse  (m, h)

No n×n matrix is kept: the backward pass rebuilds ρ = exp(q kᵗ/√d_ρ − lse) one tile of keys at a time, for the queries
that can see them, from lse, the log-sum-exp of each row of scores; memory is linear in the tokens. `Spans` tells where
the packed sequences end and which rows ask: all of them (m = n), or only some.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 128  # queries of a tile on the way down
COLUMNS = 128  # keys of a tile on the way up; all queries after them belong to the tile
SHARP = 1024.0  # scores beyond this are rounded in float32 by more than exp allows: 1e-4 of every ρ


class Span(NamedTuple):
    """Neighbouring sequences of one length, and the queries they ask."""

    keys: slice  # their rows of k and v
    queries: slice  # their rows of q
    sequences: int
    positions: list[int] | None  # of the queries in their sequence, ascending; None: every token asks

    @property
    def length(self) -> int:
        return (self.keys.stop - self.keys.start) // self.sequences  # type: ignore[no-any-return]


Spans = tuple[Span, ...]


def spans_of(lengths: tuple[int, ...], rows: Tensor | None = None) -> Spans:
    """Sequences packed end to end; with `rows` (ascending), only those rows of the stream ask."""
    spans: list[Span] = []
    if rows is not None:
        asked = 0
        start = 0
        for length, inside in zip(lengths, _rows_of_each(lengths, rows), strict=True):
            spans.append(Span(slice(start, start + length), slice(asked, asked + len(inside)), 1, inside))
            start += length
            asked += len(inside)
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
    lse = torch.empty(q.shape[:2], dtype=_wide(v.dtype), device=v.device)
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
    """Δ → the error signals of q, k and v: Δ_raw k, Δ_rawᵗ q and ρᵗ Δ, put `into` tensors of their shapes"""
    k, a, lse = saved.k, saved.a, saved.lse
    # (Δ vᵗ) ⊖ ρ = Δ ⊖ a: the softmax correction of (25) needs only the output and its error signal
    correction = _correction(delta, a, lse.dtype)
    if sum(span.keys.stop - span.keys.start for span in spans) < len(k):
        into[1].zero_()  # a sequence that asks nothing sends nothing back to its keys and values
        into[2].zero_()
    for span in spans:
        grads = _backward_in_tiles(*_operands(delta, saved, correction, span, causal), span.positions, causal)
        for target, rows, grad in zip(into, (span.queries, span.keys, span.keys), grads, strict=True):
            view = _by_head(target, rows, span)
            view.copy_(grad.view(view.shape))


def maps(delta: Tensor, saved: Saved, lengths: tuple[int, ...], causal: bool) -> tuple[Tensor, Tensor]:
    """ρ and Δ_causal of every head over the whole packed stream, (h, n, n), zero between sequences: for looking at.
    The same tiles as in the backward pass, each as large as a sequence."""
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

    The zeros are put in after the exponential, which is many times slower on −∞; before it, what is not visible is kept
    from overflowing. A visible score never exceeds its row's log-sum-exp, so that changes nothing else."""
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
    """(g, tokens, width) each, g = sequences × heads. A tile is some keys and all queries that come after the first."""
    m, n_keys = q.shape[1], k.shape[1]
    scale = 1 / math.sqrt(q.shape[2])  # Δ_raw = Δ_causal/√d_ρ   (28)
    grad_k, grad_v = k.new_empty(k.shape), v.new_empty(v.shape)
    own = range(m) if positions is None else positions
    triangle = _visible(range(min(COLUMNS, n_keys)), min(COLUMNS, n_keys), q) if causal and positions is None else None
    for j in range(0, n_keys, COLUMNS):
        cols = slice(j, min(j + COLUMNS, n_keys))
        first = bisect_left(own, j) if causal else 0
        if first == m:  # nobody comes after these keys
            grad_k[:, j:], grad_v[:, j:] = 0, 0
            break
        rows = slice(first, m)
        visible = None
        if triangle is not None:
            visible = triangle[: cols.stop - j, : cols.stop - j]
        elif causal:
            visible = _visible([p - j for p in own[first : bisect_left(own, cols.stop)]], cols.stop - j, q)
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
    """The same with matrix products alone: for any device, for d_ρ ≠ d_h, and where only some rows ask."""
    batch, n_heads, m, _ = q.shape
    wide = _wide(v.dtype)
    q, k, v = (x.flatten(0, 1).to(wide) for x in (q, k, v))
    out, lse = v.new_empty(len(v), m, v.shape[2]), v.new_empty(len(v), m)
    zero = lse.new_zeros(1, 1, 1)
    for rows, seen, future in _tiles(m, k.shape[1], positions, causal, q.device):
        scores = torch.baddbmm(zero, q[:, rows], k[:, :seen].transpose(1, 2), beta=0, alpha=1 / math.sqrt(q.shape[2]))
        if future is not None:
            scores[:, :, -future.shape[1] :].masked_fill_(future, -math.inf)
        lse[:, rows] = torch.logsumexp(scores, 2)
        rho = torch.softmax(scores, 2) if _sharp(lse[:, rows]) else scores.sub_(lse[:, rows, None]).exp_()
        out[:, rows] = torch.bmm(rho, v[:, :seen])
    return out.view(batch, n_heads, m, -1), lse.view(batch, n_heads, m)


def _tiles(
    m: int, n_keys: int, positions: list[int] | None, causal: bool, device: torch.device
) -> list[tuple[slice, int, Tensor | None]]:
    """Queries in steps of ROWS: which rows, how many keys they see, and the mask of the last of those columns."""
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
    """Positions, inside their own sequence, of the given rows of the packed stream."""
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
    """(count · T, h, …) → (count · h, T, …), wide; a view where it can be one: the products read it as fast"""
    return _by_head(x, rows, span).to(dtype).flatten(0, 1)


def _future(positions: list[int] | range, columns: int, device: torch.device) -> Tensor:
    """True where a column lies after the query's own position"""
    own = torch.tensor(list(positions), device=device)
    return torch.arange(columns, device=device)[None, :] > own[:, None]


def _visible(positions: list[int] | range, columns: int, like: Tensor) -> Tensor:
    """1 where a column is not after the query's own position, and 0 where it is"""
    return _future(positions, columns, like.device).logical_not_().to(like.dtype)


def _operands(
    delta: Tensor, saved: Saved, correction: Tensor, span: Span, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, Δ, Δ ⊖ a and lse of a span, stacked and wide, for the tiles of the backward pass.

    The tiles compute scores anew and subtract lse. In float32 the two may differ by the rounding of numbers as large as
    the scores, which the exponential turns into a factor: large scores are computed again in float64."""
    q, k, v, _, lse = saved
    dtype = torch.float64 if _sharp(lse[span.queries]) else lse.dtype
    queries, errors = (_stack(x, span.queries, span, dtype) for x in (q, delta))
    keys, values = (_stack(x, span.keys, span, dtype) for x in (k, v))
    if dtype == lse.dtype:
        shift, norm = (_stack(x, span.queries, span, dtype).contiguous() for x in (correction, lse))
    else:
        out, row_lse = _forward_in_tiles(queries[None], keys[None], values[None], span.positions, causal)
        shift, norm = (errors * out[0]).sum(2), row_lse[0]
    return queries, keys, values, errors, shift, norm


def _sharp(lse: Tensor) -> bool:
    """Whether float32 is too narrow for the scores of these rows."""
    return lse.dtype == torch.float32 and lse.abs().amax().item() > SHARP


def _correction(delta: Tensor, a: Tensor, dtype: torch.dtype) -> Tensor:
    """Δ ⊖ a (m, h). It is subtracted from numbers of its own size where softmax saturates, so the products are wide too."""
    return (delta.to(dtype) * a).sum(2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Scores and their log-sum-exp are kept at least in float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

"""Attention as an autograd function: rotation of queries and keys, then the heads. The mathematics is in `ops`.

    q  (B, T, h d_ρ)      k  (B, T, h_kv d_ρ)      v  (B, T, h_kv d_h)      or all three side by side in q
    cos, sin  (B T, d_ρ/2)                         output  (B, T, h d_h)

`Layout` says which keys each query sees: `causal_layout` for plain batches, `layout_of_mask` for a mask.
"""

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import HandgradError
from ..kernels.calls import Scores
from ..ops import attention as heads_op
from ..ops import rotary
from .arguments import check_heads, mixes
from .functions import autocast, first_derivative, opaque, operand, rows, shaped, without_autocast

Rotation = tuple[Tensor, Tensor] | None  # cos and sin


class Layout(NamedTuple):
    """Which rows are queries, which keys they see, and how they are scored."""

    spans: heads_op.Spans
    scores: Scores = heads_op.PLAIN
    blind: Tensor | None = None  # rows that see no key: their output is 0


class Heads(NamedTuple):
    """What attention is, besides its tensors."""

    n_heads: int
    n_kv_heads: int
    layout: Layout
    mixed: bool  # whether products round their operands to bfloat16

    def split(self, q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(n, h d_ρ), … → (n, h, d_ρ), (n, h_kv, d_ρ), (n, h_kv, d_h), views"""
        if k is None or v is None:
            width = q.shape[1] // (self.n_heads + 2 * self.n_kv_heads)
            q, k, v = torch.split(q, [self.n_heads * width, self.n_kv_heads * width, self.n_kv_heads * width], 1)
        n = len(q)
        return q.view(n, self.n_heads, -1), k.view(n, self.n_kv_heads, -1), v.view(n, self.n_kv_heads, -1)


class AttentionFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, v: Tensor | None, rotation: Rotation, sinks: Tensor | None, heads: Heads
    ) -> Tensor:
        layout, (cos, sin) = heads.layout, rotation or (None, None)
        flat = [None if x is None else rows(x) for x in (q, k, v)]
        q_, k_, v_ = heads.split(*flat)  # type: ignore[arg-type]
        if cos is not None and sin is not None:
            q_, k_ = rotary.forward(q_, cos, sin), rotary.forward(k_, cos, sin)
            if k is None:
                v_ = v_.contiguous()  # a view would keep all that the fused layer has computed
        q_, k_, v_ = (operand(x, heads.mixed) for x in (q_, k_, v_))
        a, saved = heads_op.forward(q_, k_, v_, layout.spans, layout.scores, sinks)
        if layout.blind is not None:
            a[layout.blind], saved.lse[layout.blind] = 0, 0
        out = shaped(a, *q.shape[:-1], a.shape[1] * a.shape[2])
        ctx.save_for_backward(q_, k_, v_, out, saved.lse, cos, sin, saved.sinks)
        out = out.to(q.dtype)
        ctx.heads, ctx.fused, ctx.sinks_dtype = heads, k is None, None if sinks is None else sinks.dtype
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cos, sin, sinks = ctx.saved_tensors
        heads, layout, n, leading = ctx.heads, ctx.heads.layout, len(q), delta.shape[:-1]
        grads = [delta.new_empty(n, x[0].numel()) for x in (q, k, v)]
        if ctx.fused:
            whole = delta.new_empty(n, sum(x.shape[1] for x in grads))
            into = heads.split(whole, None, None)
        else:
            into = heads.split(*grads)
        saved = heads_op.Saved(q, k, v, out.view(n, heads.n_heads, -1), lse, sinks)
        signal = rows(delta).view_as(saved.a)
        heads_op.backward(signal, saved, layout.spans, into, layout.scores)
        of_sinks = None
        if ctx.needs_input_grad[4]:
            of_sinks = heads_op.sink_signals(signal, saved, layout.spans).sum(0).to(ctx.sinks_dtype)
        if layout.blind is not None:
            into[0][layout.blind] = 0
        if cos is not None:
            for signal in into[:2]:
                rotary.backward(signal, cos, sin, into=signal)
        if ctx.fused:
            return whole.view(*leading, -1), None, None, None, of_sinks, None
        return *(x.view(*leading, -1) for x in grads), None, of_sinks, None


@opaque
def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    n_heads: int,
    n_kv_heads: int | None = None,
    *,
    rotation: tuple[Tensor, Tensor] | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    layout: Layout | None = None,
    precision: str | None = None,
) -> Tensor:
    """softmax(mask(q kᵗ/√d_ρ)) v of every head: (B, T, h d_ρ) → (B, T, h d_h). Without k and v, q holds all three side by
    side. Another `scale` takes the place of 1/√d_ρ; with a `cap` c scores s become c tanh(s/c); `sinks` (h) are scores
    without a key. Each of the B rows is a sequence unless a `layout` says which keys a query sees. With the `precision`
    "mixed" operands and output are rounded to bfloat16; sums, gradients and the dtype of the output are float32."""
    if layout is None:
        if q.ndim != 3:
            raise HandgradError(f"attention takes queries of shape (B, T, width), not {tuple(q.shape)}")
        layout = Layout(causal_layout(*q.shape[:2]).spans, Scores(causal, window, scale, cap))
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    check_heads(q, k, v, n_heads, n_kv_heads, rotation)
    if sinks is not None and sinks.shape != (n_heads,):
        raise HandgradError(f"sinks has the shape {tuple(sinks.shape)}; {n_heads} heads need ({n_heads},)")
    layout.scores.numbers(1)  # raises if they make no sense
    heads = Heads(n_heads, n_kv_heads, layout, mixes(precision, q=q, k=k, v=v))
    kind = q.device.type
    q, k, v = autocast(kind, q, k, v)  # queries and keys may come from norms in float32
    with without_autocast(kind):
        return AttentionFunction.apply(q, k, v, rotation, sinks, heads)  # type: ignore


# ── layouts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=64)
def causal_layout(batch: int, length: int, window: int | None = None) -> Layout:
    """Sequences of equal length, without padding."""
    return Layout(heads_op.spans_of((length,) * batch), Scores(window=window))


def layout_of_mask(mask: Tensor, batch: int, window: int | None) -> Layout | str:
    """The layout of a mask (B, 1, T, T), True where a query sees a key: causal, with padding on either side, with a window,
    or with several sequences in a row. A string says why a mask is none of these.

    Every query must see neighboring keys first … last. The rows of a sequence that begins at s see first = s, or
    first = last − window + 1, and their last keys never go back."""
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return f"a mask of shape {tuple(mask.shape)}"
    seen = mask[:, 0].expand(batch, -1, -1).to(torch.uint8)
    length = seen.shape[1]
    counts = seen.sum(2)
    firsts, lasts = seen.argmax(2), length - 1 - seen.flip(2).argmax(2)
    if not bool(((counts == lasts - firsts + 1) | (counts == 0)).all()):
        return "a mask with gaps between the keys of a query"
    spans: list[heads_op.Span] = []
    blind: list[int] = []
    for b, (first, last, count) in enumerate(zip(firsts.tolist(), lasts.tolist(), counts.tolist(), strict=True)):
        sequences: list[tuple[int, int, list[int]]] = []  # first row, first key, positions of the queries
        before = -1  # the last key that a row has seen
        for i in range(length):
            if not count[i]:
                blind.append(b * length + i)
                continue
            if not sequences or first[i] > before:
                sequences.append((i, first[i], []))
            row, start, positions = sequences[-1]
            reach = start if window is None else max(start, last[i] - window + 1)
            if first[i] != reach or last[i] < before or row + len(positions) != i:
                return "a mask that is not causal with padding, a window or several sequences in a row"
            positions.append(last[i] - start)
            before = last[i]
        for row, start, positions in sequences:
            n_keys = positions[-1] + 1
            keys = slice(b * length + start, b * length + start + n_keys)
            queries = slice(b * length + row, b * length + row + len(positions))
            plain = positions == list(range(n_keys))
            spans.append(heads_op.Span(keys, queries, 1, None if plain else positions))
    if not spans:
        return "a mask that hides every key"
    return Layout(tuple(spans), Scores(window=window), torch.tensor(blind, device=mask.device) if blind else None)


def kind_of(layout: Layout, batch: int, length: int) -> tuple[Any, ...]:
    """What two layouts have in common if one being right says that the other is: what padding and how many sequences
    neighboring rows of a batch have, and the magnitude of the length."""
    rows: dict[int, set[tuple[bool, ...]]] = {}
    for span in layout.spans:
        edges = (span.keys.start, span.keys.stop, span.queries.start, span.queries.stop)
        kind = span.positions is None, *(edge % length == 0 for edge in edges)
        rows.setdefault(span.keys.start // length, set()).add(kind)
    kinds = [frozenset(rows.get(b, ())) for b in range(batch)] if len(rows) > 1 else [frozenset(*rows.values())]
    pairs = frozenset(pairwise(kinds))
    return kinds[0], pairs, layout.blind is None, layout.scores, length.bit_length()

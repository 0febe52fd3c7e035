"""The spans of attention: where packed sequences end, which of their rows have queries, and which rows before their own they
see, where sequences share a prefix."""

from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Neighboring sequences of equal length, and their queries."""

    keys: slice  # their rows of k and v
    queries: slice  # their rows of q
    sequences: int
    positions: list[int] | None  # of the queries in their sequence, ascending; None: every token is a query
    before: tuple[slice, ...] = ()  # rows of k and v in front of their own, in order: a prefix that is stored once

    @property
    def length(self) -> int:
        return (self.keys.stop - self.keys.start) // self.sequences  # type: ignore[no-any-return]


Spans = tuple[Span, ...]


def spans_of(lengths: tuple[int, ...], rows: Tensor | None = None, parents: tuple[int, ...] = ()) -> Spans:
    """The spans of sequences packed end to end; with `rows` (ascending), only those rows of the stream are queries.

    parents   of every sequence, the number of the one that it continues, or −1: it sees that one's rows, and those which
              that one sees. A sequence comes after the one that it continues.
    """
    if parents:
        return _spans_of_branches(lengths, rows, parents)
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
        if lengths[i]:  # an empty sequence has no queries
            spans.append(Span(all_rows, all_rows, count, None))
        start += count * lengths[i]
        i += count
    return tuple(spans)


def _spans_of_branches(lengths: tuple[int, ...], rows: Tensor | None, parents: tuple[int, ...]) -> Spans:
    inside = [list(range(length)) for length in lengths] if rows is None else _rows_of_each(lengths, rows)
    spans: list[Span] = []
    seen: list[tuple[slice, ...]] = []  # by each sequence: the rows before it, then its own
    start = query = 0
    for length, parent, mine in zip(lengths, parents, inside, strict=True):
        before = seen[parent] if parent >= 0 else ()
        depth = sum(part.stop - part.start for part in before)
        own, queries = slice(start, start + length), slice(query, query + len(mine))
        if mine:
            spans.append(Span(own, queries, 1, [depth + t for t in mine], before))
        seen.append((*before, own))
        start, query = own.stop, queries.stop
    return tuple(spans)


def without_prefixes(spans: Spans) -> tuple[Spans, list[slice]]:
    """The same spans, each with all its keys end to end, and the rows of k and v that these are."""
    plain: list[Span] = []
    sources: list[slice] = []
    start = 0
    for span in spans:
        parts = (*span.before, span.keys)
        stop = start + sum(part.stop - part.start for part in parts)
        plain.append(span._replace(keys=slice(start, stop), before=()))
        sources += parts
        start = stop
    return tuple(plain), sources


def joined(x: Tensor, sources: list[slice]) -> Tensor:
    """These rows end to end."""
    return torch.cat([x[rows] for rows in sources])


def sum_into_sources(x: Tensor, into: Tensor, sources: list[slice]) -> None:
    """Write the sum of what belongs to each row, in the order of the sources; bfloat16 is summed in float32."""
    wide = torch.zeros_like(into, dtype=torch.promote_types(into.dtype, torch.float32))
    start = 0
    for rows in sources:
        stop = start + rows.stop - rows.start
        wide[rows] += x[start:stop]
        start = stop
    into.copy_(wide)


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

"""The spans of attention: where packed sequences end, and which of their rows have queries."""

from typing import NamedTuple

from torch import Tensor


class Span(NamedTuple):
    """Neighboring sequences of equal length, and their queries."""

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
        if lengths[i]:  # an empty sequence has no queries
            spans.append(Span(all_rows, all_rows, count, None))
        start += count * lengths[i]
        i += count
    return tuple(spans)


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

"""The tiles of attention: which queries see which keys.

Stacked queries (g, T · r, d_ρ) have r neighboring rows of equal position, one for each query head that shares a key head;
keys are (g, n, d_ρ). `positions` of the queries in their sequence are ascending; None: every token is a query. With a
`window`, query t sees the keys t − window + 1 … t, else 0 … t.
"""

from bisect import bisect_left
from collections.abc import Iterator

import torch
from torch import Tensor

ROWS = 128  # queries per tile in the forward pass
COLUMNS = 128  # keys per tile in the backward pass; all queries that see one of them belong to the tile

Masks = list[tuple[slice, Tensor]]  # a part of a tile and a mask of its size


def of_keys(
    q: Tensor, k: Tensor, positions: list[int] | None, causal: bool, window: int | None
) -> Iterator[tuple[slice, slice, Masks]]:
    """Ranges of keys; the rows of the queries that see one of them; and, for rows of the tile that do not see all, a mask:
    1 where a key is visible, else 0"""
    here, repeat = _positions(q, k, positions)
    n_keys = k.shape[1]
    # a shared key has more rows: tiles with fewer keys, and so fewer masked entries, are as fast per entry
    columns = min(COLUMNS if repeat == 1 else COLUMNS // 2, n_keys)
    reach = n_keys if window is None else window
    early = late = None
    if causal and positions is None:  # all tiles have the same masks
        early = upto(range(columns), columns, repeat, q)
        late = None if window is None else after(range(columns), columns, repeat, q)
    for j in range(0, n_keys, columns):
        stop = min(j + columns, n_keys)
        if not causal:
            yield slice(j, stop), slice(0, q.shape[1]), []
            continue
        # queries before `inside` do not see the last of these keys yet, those from `outside` on no longer the first
        first, inside, outside, last = (bisect_left(here, p) for p in (j, stop, j + reach, stop - 1 + reach))
        masks: Masks = []
        if first < inside:
            rows = slice(0, (inside - first) * repeat)
            seen = upto([p - j for p in here[first:inside]], stop - j, repeat, q) if early is None else early
            masks.append((rows, seen[: rows.stop, : stop - j]))
        if outside < last:
            rows = slice((outside - first) * repeat, (last - first) * repeat)
            seen = after([p - j - reach for p in here[outside:last]], stop - j, repeat, q) if late is None else late
            masks.append((rows, seen[: rows.stop - rows.start, : stop - j]))
        yield slice(j, stop), slice(first * repeat, last * repeat), masks


def of_queries(
    q: Tensor, k: Tensor, positions: list[int] | None, causal: bool, window: int | None
) -> Iterator[tuple[slice, slice, Masks]]:
    """Rows of up to ROWS queries; the keys that one of them sees; and, for columns of the tile that not all see, a mask:
    True where a key is hidden"""
    every, repeat = _positions(q, k, positions)
    for i in range(0, len(every), ROWS):
        here = every[i : i + ROWS]
        rows = slice(i * repeat, (i + len(here)) * repeat)
        if not causal:
            yield rows, slice(0, k.shape[1]), []
            continue
        first, stop = here[0], here[-1] + 1
        start = 0 if window is None else max(0, first - window + 1)
        hidden: Masks = [
            (slice(first - start, stop - start), _future([p - first for p in here], stop - first, repeat, q.device))
        ]
        if window is not None and stop - window > start:  # the last query does not see the first keys
            columns = stop - window - start
            past = _future([p - window - start for p in here], columns, repeat, q.device).logical_not_()
            hidden.append((slice(0, columns), past))
        yield rows, slice(start, stop), hidden


def _positions(q: Tensor, k: Tensor, positions: list[int] | None) -> tuple[list[int] | range, int]:
    """The positions of the queries, and how many neighboring rows of the stacked q each of them has."""
    here = range(k.shape[1]) if positions is None else positions
    return here, q.shape[1] // len(here)


def _future(positions: list[int] | range, columns: int, repeat: int, device: torch.device) -> Tensor:
    """True where a column is after the query's position. (positions · repeat, columns)"""
    own = torch.tensor(list(positions), device=device)
    future = torch.arange(columns, device=device)[None, :] > own[:, None]
    return future if repeat == 1 else future.repeat_interleave(repeat, 0)


def upto(positions: list[int] | range, columns: int, repeat: int, like: Tensor) -> Tensor:
    """0 where a column is after the query's position, else 1"""
    return _future(positions, columns, repeat, like.device).logical_not_().to(like.dtype)


def after(positions: list[int] | range, columns: int, repeat: int, like: Tensor) -> Tensor:
    """1 where a column is after the query's position, else 0"""
    return _future(positions, columns, repeat, like.device).to(like.dtype)

"""Prefixes that sequences of a batch have in common, computed once.

    sequences  P P P P a a    P P P P b b b          12 + … tokens, P the same ids
    branches   P P P P │ a a │ b b b                 parents −1, 0, 0

A branch sees the rows of those that it continues, and its own, at the positions that they have in the sequence; Δ of a
shared row is the sum over the sequences. Prefixes may be nested, and end anywhere, also among targets: such a row has the
targets of several sequences, and is read once for each.
"""

from bisect import bisect_left
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FEWEST_TOKENS = 8  # a shorter common beginning is computed again, which costs less than a branch


class Branches(NamedTuple):
    """Packed sequences without repeated prefixes."""

    source: Tensor  # (n')   for every row, one of the rows of the packed sequences that it stands for
    place: Tensor  # (n)   for every row of the packed sequences, the row that stands for it
    lengths: tuple[int, ...]  # of the branches; they sum to n'
    parents: tuple[int, ...]  # the branch that each continues, or −1; it comes before


def common(one: np.ndarray, other: np.ndarray) -> int:
    """The number of equal ids that both begin with."""
    shorter = min(len(one), len(other))
    different = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(different[0]) if len(different) else shorter


def new_tokens(ids: Tensor, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """For each of the packed sequences the number of ids that it does not have in common with one before it."""
    seen: list[tuple[list[int], np.ndarray]] = []  # in alphabetical order: neighbors have the longest common prefix
    found = []
    for sequence in _unpacked(ids, lengths):
        key = sequence.tolist()
        at = bisect_left(seen, key, key=itemgetter(0))
        shared = max((common(sequence, other) for _, other in seen[max(0, at - 1) : at + 1]), default=0)
        found.append(max(1, len(sequence) - shared) if shared >= FEWEST_TOKENS else len(sequence))
        seen.insert(at, (key, sequence))
    return tuple(found)


def _unpacked(ids: Tensor, lengths: tuple[int, ...]) -> list[np.ndarray]:
    rows = ids.cpu().numpy()
    return [rows[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]


def branches_of(ids: Tensor, lengths: tuple[int, ...]) -> Branches | None:
    """Find what packed sequences share; None if they share nothing."""
    edges = np.cumsum([0, *lengths])
    sequences = _unpacked(ids, lengths)
    # neighbors in this order have the longest common prefixes; equal sequences keep theirs
    order = sorted(range(len(lengths)), key=lambda i: sequences[i].tolist())
    shared = [common(sequences[i], sequences[j]) for i, j in pairwise(order)]
    if max(shared, default=0) < FEWEST_TOKENS:
        return None
    place = np.empty(len(ids), np.int64)
    source: list[np.ndarray] = []
    found: list[int] = []
    parents: list[int] = []
    n = 0
    waiting = [(0, len(order), 0, -1)]  # ranges of `order` that agree up to a depth, and the branch that they continue
    while waiting:
        first, stop, depth, parent = waiting.pop()
        end = min(shared[first : stop - 1], default=len(sequences[order[first]]))
        alike = order[first:stop]
        if end - depth >= (FEWEST_TOKENS if len(alike) > 1 else 1):
            source.append(np.arange(edges[alike[0]] + depth, edges[alike[0]] + end))
            for i in alike:
                place[edges[i] + depth : edges[i] + end] = np.arange(n, n + end - depth)
            n += end - depth
            found.append(end - depth)
            parents.append(parent)
            parent, depth = len(found) - 1, end
        if len(alike) > 1:
            cuts = [j for j in range(first + 1, stop) if shared[j - 1] == end]
            parts = list(zip([first, *cuts], [*cuts, stop], strict=True))
            waiting += [(a, b, depth, parent) for a, b in reversed(parts)]
    here = ids.device
    joined = torch.from_numpy(np.concatenate(source)).to(here)
    return Branches(joined, torch.from_numpy(place).to(here), tuple(found), tuple(parents))

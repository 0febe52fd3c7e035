"""Batches: check tokens and targets, pack the sequences end to end, and split a large batch into pieces."""

import math
from collections.abc import Iterable
from operator import index
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from ...errors import HandgradError
from ...ops import loss
from ..config import ModelConfig
from . import prefixes

# A larger batch is processed in pieces of this size, at which matrix products reach their full rate.
TOKENS_AT_ONCE = 1024
FROZEN_AT_ONCE = 512  # enough where the matrices are frozen: no product sums over the tokens


class Batch(NamedTuple):
    """Sequences packed end to end."""

    ids: Tensor  # (n)
    positions: Tensor  # (n)   from 0 in each sequence
    lengths: tuple[int, ...]  # of the sequences; they sum to n
    shape: torch.Size  # of the tokens as they were given: (B, T) or (n)


class Piece(NamedTuple):
    """Some complete sequences of a batch, processed together."""

    ids: Tensor  # (n)
    positions: Tensor  # (n)
    lengths: tuple[int, ...]
    rows: Tensor  # (m)   rows that have a target
    targets: Tensor  # (m)
    dropout_seed: int | None = None  # None: no dropout
    first: int = 0  # the number of its first sequence in the batch
    start: int = 0  # the number of its first row in the batch
    parents: tuple[int, ...] = ()  # of branches instead of sequences: which one each continues, or −1
    numbers: Tensor | None = None  # (m) of branches: the row of the batch that each target belongs to

    @property
    def numbered(self) -> Tensor:
        """The rows with a target, numbered in the batch. (m)"""
        return self.rows + self.start if self.numbers is None else self.numbers

    @property
    def needed(self) -> Tensor:
        """The rows that have a target, ascending, each of them once."""
        return self.rows if self.numbers is None else torch.unique(self.rows)

    def rows_of(self, n: int) -> Tensor | None:
        """Where the targets are read in the last n rows of the stream, all or those that are `needed`; None: row by row."""
        if n == len(self.ids):
            return self.rows if n != len(self.rows) or self.numbers is not None else None
        return None if self.numbers is None else torch.searchsorted(self.needed, self.rows)

    def counts(self) -> tuple[int, ...]:
        """The number of targets of each sequence."""
        edges = torch.tensor(self.lengths, device=self.rows.device).cumsum(0)
        until = torch.searchsorted(self.rows, edges)
        return tuple(until.diff(prepend=until.new_zeros(1)).tolist())


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_ids(name: str, ids: object) -> None:
    """Raise unless these are integers that can be read."""
    if not isinstance(ids, Tensor):
        raise HandgradError(f"{name} must be a tensor of ids, not a {type(ids).__name__}")
    if ids.layout is not torch.strided or ids.is_nested or ids.is_meta:
        what = "on the meta device, without values" if ids.is_meta else "nested" if ids.is_nested else "sparse"
        raise HandgradError(f"{name} must be an ordinary tensor of ids; these are {what}")
    if ids.dtype not in INTEGERS:
        raise HandgradError(f"{name} must be integers (int64), not {ids.dtype}")


def pack(tokens: Tensor, lengths: list[int] | None, config: ModelConfig, device: torch.device) -> Batch:
    """Check tokens (B, T), or (n) with the lengths of its sequences, and pack them end to end."""
    check_ids("tokens", tokens)
    if tokens.ndim not in (1, 2) or tokens.numel() == 0:
        shape = tuple(tokens.shape)
        raise HandgradError(f"tokens must be (B, T), or (n) with lengths, and not empty; got shape {shape}")
    if tokens.ndim == 2:
        if lengths is not None:
            raise HandgradError("lengths go with tokens of shape (n); a (B, T) batch has B sequences of length T")
        sizes = (tokens.shape[1],) * tokens.shape[0]
    else:
        sizes = (len(tokens),) if lengths is None else _integers(lengths)
    if min(sizes, default=0) < 1 or sum(sizes) != tokens.numel():
        raise HandgradError(f"lengths {list(sizes)} must be at least 1 and add up to the {tokens.numel()} tokens")
    if max(sizes) > config.n_context:
        raise HandgradError(
            f"a sequence of {max(sizes)} tokens does not fit into a context of {config.n_context}: shorten it"
        )
    ids = tokens.reshape(-1).to(device, torch.int64)
    low, high = (int(x) for x in torch.aminmax(ids))
    if low < 0 or high >= config.n_vocab:
        wrong = low if low < 0 else high
        raise HandgradError(f"token id {wrong} is outside the vocabulary: ids go from 0 to {config.n_vocab - 1}")
    positions = torch.cat([torch.arange(size, device=device) for size in sizes])
    return Batch(ids, positions, sizes, tokens.shape)


def _integers(lengths: Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        return tuple(index(x) for x in lengths)
    except TypeError:
        raise HandgradError("lengths must be a list of integers: the number of tokens of each sequence") from None


def check_targets(batch: Batch, targets: Tensor, config: ModelConfig) -> Tensor:
    """The targets as (n) ids, NO_TARGET where a row has no target."""
    check_ids("targets", targets)
    if targets.shape != batch.shape:
        raise HandgradError(f"targets {tuple(targets.shape)} must have the shape of tokens {tuple(batch.shape)}")
    flat = targets.reshape(-1).to(batch.ids.device, torch.int64)
    given = flat[loss.rows_with_target(flat)]
    low, high = (int(x) for x in torch.aminmax(given)) if len(given) else (0, 0)
    if low < 0 or high >= config.n_vocab:
        wrong = low if low < 0 else high
        raise HandgradError(
            f"target {wrong} is outside the vocabulary: ids go from 0 to {config.n_vocab - 1}, −100 is ignored"
        )
    return flat


def pieces_of(total: int, at_once: float) -> int:
    """The number of pieces of a batch of `total` tokens, if sequences could be divided."""
    return max(1, math.ceil(total / at_once - 0.25))


def group(lengths: tuple[int, ...], at_once: float) -> list[tuple[int, ...]]:
    """Divide sequences into consecutive groups of about equal size, at_once tokens or up to a quarter more: a small last
    group would cost more than its share. A sequence is never divided."""
    total = sum(lengths)
    count = pieces_of(total, at_once)
    groups: list[list[int]] = [[]]
    done = 0
    for length in lengths:
        full = len(groups) * total / count  # where the current group should end
        if groups[-1] and len(groups) < count and done + length / 2 > full:
            groups.append([])
        groups[-1].append(length)
        done += length
    return [tuple(lengths) for lengths in groups]


def split(
    batch: Batch,
    targets: Tensor,
    at_once: float,
    dropout_seed: int | None,
    *,
    every: bool = False,
    unit: int = 1,
    new: tuple[int, ...] = (),
) -> list[Piece]:
    """The batch in pieces of complete sequences, about `at_once` tokens each. Pieces without a target are left out, unless
    `every` one is computed.

    unit   the number of sequences that stay together
    new    the tokens of each that it does not have in common with one before: prefixes that sequences of a piece have in
           common are computed once
    """
    computed = new or batch.lengths
    units = tuple(sum(computed[i : i + unit]) for i in range(0, len(computed), unit))
    pieces = []
    start = first = 0
    for found in group(units, at_once):
        lengths = batch.lengths[first : first + len(found) * unit]
        here = slice(start, start + sum(lengths))
        start = here.stop
        rows = loss.rows_with_target(targets[here])
        if len(rows) or every:
            seed = None if dropout_seed is None else dropout_seed + start
            own = targets[here][rows]
            piece = Piece(batch.ids[here], batch.positions[here], lengths, rows, own, seed, first, here.start)
            pieces.append(piece if computed == batch.lengths else _shared(piece))
        first += len(lengths)
    return pieces


def _shared(piece: Piece) -> Piece:
    """The piece without repeated prefixes."""
    found = prefixes.branches_of(piece.ids, piece.lengths)
    if found is None:
        return piece
    return piece._replace(
        ids=piece.ids[found.source], positions=piece.positions[found.source], lengths=found.lengths,
        rows=found.place[piece.rows], parents=found.parents, numbers=piece.rows + piece.start,
    )  # fmt: skip


def count_targets(own: int, n_targets: int | None = None) -> int:
    """The number of targets that a loss is divided by: the batch's own, or `n_targets` if several calls accumulate."""
    if n_targets is None:
        n_targets = own
        if n_targets == 0:
            raise HandgradError("every target is ignored (−100): there is nothing to learn from in this batch")
    try:
        count = index(n_targets)
    except TypeError:  # NaN, or another number that counts nothing
        count = 0
    if count < 1:
        raise HandgradError(f"n_targets is the number of targets of all calls together, at least 1, not {n_targets}")
    return count

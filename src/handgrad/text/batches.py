"""Batches to train on: windows of a token file, in an order computed from the seed."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import HandgradError
from ..formatting import plural
from .corpus import Tokens


class Batches(Protocol):
    """Things to learn from, in an order that is computed from their numbers. They are counted over all epochs."""

    @property
    def per_epoch(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """The same for the same content."""

    def batch(self, first: int, count: int, shuffle: bool = True) -> tuple[Tensor, Tensor, list[int] | None]:
        """Ids, targets, and lengths if the sequences are uneven and lie end to end."""

    def size(self, first: int, count: int, shuffle: bool = True) -> tuple[int, int]:
        """How many tokens and targets such a batch has."""

    def opening(self) -> Tensor:
        """The beginning of the first one, (1, t), as a prompt for a sample."""

    def amount(self, count: int) -> str:
        """The size of a batch of `count`, in the unit a user thinks in."""


@dataclass(frozen=True)
class Windows:
    """Stretches of `context` tokens, each with the tokens that follow as its targets. Every epoch cuts the text anew, from
    another beginning, and shuffles the stretches; what lies before the beginning and after the last stretch is left out
    this time. With anew=False every epoch is cut from the start, and as many stretches as fit are read."""

    tokens: Tokens
    start: int
    stop: int
    context: int
    seed: int = 0
    anew: bool = True

    @property
    def per_epoch(self) -> int:
        """As many as fit from each of `context` beginnings; at least one."""
        spare = self.context if self.anew else 1
        return max(1, (self.stop - self.start - spare) // self.context)

    @property
    def fingerprint(self) -> str:
        return self.tokens.path.stem  # made from the texts' content and the vocabulary

    def size(self, first: int, count: int, shuffle: bool = True) -> tuple[int, int]:
        return count * self.context, count * self.context

    def opening(self) -> Tensor:
        return self.batch(0, 1, shuffle=False)[0][:, :8]

    def amount(self, count: int) -> str:
        return plural(count * self.context, "token")

    def batch(self, first: int, count: int, shuffle: bool = True) -> tuple[Tensor, Tensor, None]:
        """Windows number `first` and following, counted over all epochs. (count, context) ids and targets"""
        rows = []
        for i in range(first, first + count):
            at = self._place(i) if shuffle else self.start + i * self.context
            rows.append(self.tokens[slice(at, at + self.context + 1)])
        both = torch.stack(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous(), None

    def _place(self, i: int) -> int:
        epoch, i = divmod(i, self.per_epoch)
        spare = (self.stop - self.start - 1) - self.per_epoch * self.context
        offset = hash64(self.seed, epoch, 0) % (spare + 1) if self.anew else 0
        return self.start + offset + self.context * shuffled(i, self.per_epoch, self.seed, epoch)


def split(tokens: Tokens, context: int, share: float, seed: int) -> tuple[Windows, Windows | None]:
    """The last `share` of the text is kept for validation, if it is long enough for one window."""
    n = len(tokens)
    if n <= context:
        raise HandgradError(f"the data has {n:,} tokens, too few for a context of {context}: give more, or --n-context")
    held = round(n * share)
    if share and (held <= context or n - held <= context):
        raise HandgradError(
            f"{n:,} tokens are too few to keep {share:g} of them for validation with a context of {context}: give more"
            " data, or --val-share 0"
        )
    training = Windows(tokens, 0, n - held, context, seed)
    return training, Windows(tokens, n - held, n, context, seed, anew=False) if held else None


def shuffled(i: int, n: int, seed: int, epoch: int) -> int:
    """The i-th of the numbers 0 … n−1 in an order drawn from seed and epoch, without writing the order down: a Feistel
    network permutes the next power of four, and what falls outside is permuted again."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for turn in range(4):
            left, right = right, left ^ (hash64(seed, epoch, turn << 32 | right) & mask)
        i = left << half | right
        if i < n:
            return i


def hash64(seed: int, epoch: int, x: int) -> int:
    """A number that looks random and is always the same."""
    text = f"{seed} {epoch} {x}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

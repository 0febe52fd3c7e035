"""Training batches: windows of a token file, in an order computed from the seed."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import HandgradError, option
from ..formatting import plural
from .corpus import Tokens


class Batches(Protocol):
    """A source of training sequences. Sequences are numbered over all epochs; the order is computed from the number, so a
    resumed run sees the same batches."""

    @property
    def per_epoch(self) -> int:
        """The number of sequences in an epoch."""

    @property
    def fingerprint(self) -> str:
        """Hash of the content."""

    def batch(self, first: int, count: int, shuffle: bool = True) -> tuple[Tensor, Tensor, list[int] | None]:
        """Ids and targets of `count` sequences from number `first` on. If their lengths differ, the sequences are packed end
        to end and the third value lists the lengths; otherwise it is None."""

    def size(self, first: int, count: int, shuffle: bool = True) -> tuple[int, int]:
        """The number of tokens and of targets in that batch."""

    def sample_prompt(self) -> Tensor:
        """The beginning of the first sequence, (1, t), as a prompt for sample generation."""

    def describe_size(self, count: int) -> str:
        """The size of a batch of `count` sequences for display: 4,096 tokens, 8 examples."""


@dataclass(frozen=True)
class Windows:
    """Windows of `context` consecutive tokens from start to stop; the targets are the ids one position later.

    Each epoch cuts the text at another random offset and shuffles the windows; tokens before the offset and after the last
    window are unused in that epoch. With random_offset=False every epoch reads all windows that fit from `start` on."""

    tokens: Tokens
    start: int
    stop: int
    context: int
    seed: int = 0
    random_offset: bool = True

    @property
    def per_epoch(self) -> int:
        """The number of windows that fit at any offset below `context`; at least one."""
        spare = self.context if self.random_offset else 1
        return max(1, (self.stop - self.start - spare) // self.context)

    @property
    def fingerprint(self) -> str:
        return self.tokens.path.stem  # a hash of the texts and the tokenizer

    def size(self, first: int, count: int, shuffle: bool = True) -> tuple[int, int]:
        return count * self.context, count * self.context

    def sample_prompt(self) -> Tensor:
        return self.batch(0, 1, shuffle=False)[0][:, :8]

    def describe_size(self, count: int) -> str:
        return plural(count * self.context, "token")

    def batch(self, first: int, count: int, shuffle: bool = True) -> tuple[Tensor, Tensor, None]:
        """Ids and targets, each (count, context), of windows number `first` and following."""
        rows = []
        for i in range(first, first + count):
            start = self._start_of(i) if shuffle else self.start + i * self.context
            rows.append(self.tokens[slice(start, start + self.context + 1)])
        windows = torch.stack(rows)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), None

    def _start_of(self, i: int) -> int:
        """The position of the first token of window i, shuffled."""
        epoch, i = divmod(i, self.per_epoch)
        spare = (self.stop - self.start - 1) - self.per_epoch * self.context
        offset = hash64(self.seed, epoch, 0) % (spare + 1) if self.random_offset else 0
        return self.start + offset + self.context * shuffled_index(i, self.per_epoch, self.seed, epoch)


def split(tokens: Tokens, context: int, share: float, seed: int) -> tuple[Windows, Windows | None]:
    """Windows of the text without its last `share`, and of that share for validation; None if `share` is 0."""
    n = len(tokens)
    if n <= context:
        raise HandgradError(
            f"the data has {n:,} tokens, too few for a context of {context}: give more data, or a smaller"
            f" {option('n_context')}"
        )
    held = round(n * share)
    if share and (held <= context or n - held <= context):
        raise HandgradError(
            f"{n:,} tokens are too few to hold out {share:g} of them for validation with a context of {context}: give"
            f" more data, or {option('val_share', 0)}"
        )
    training = Windows(tokens, 0, n - held, context, seed)
    return training, Windows(tokens, n - held, n, context, seed, random_offset=False) if held else None


def shuffled_index(i: int, n: int, seed: int, epoch: int) -> int:
    """Element i of a pseudorandom permutation of 0 … n−1 that depends on seed and epoch, in O(1) memory: a Feistel network
    permutes the next power of four, and is applied again to results that are not below n."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for round in range(4):
            left, right = right, left ^ (hash64(seed, epoch, round << 32 | right) & mask)
        i = left << half | right
        if i < n:
            return i


def hash64(seed: int, epoch: int, x: int) -> int:
    """A 64-bit hash of three integers, the same on every platform."""
    text = f"{seed} {epoch} {x}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

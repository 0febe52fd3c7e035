"""What generation stores of a sequence in blocks with a short convolution: the last L − 1 rows of its input z, after the
last token, and after every 64 tokens. Keys can be cut behind any token, these states only where they were stored.

    state = ConvState(like, (blocks, L − 1, d))
    rows = state.extend(i, old, z)      block i: the rows before new ones of z, and those; `old` tokens are done
    state.finish()                      the new tokens count from now on
    state.cut(length)                   the state after that many tokens, for another sequence
"""

from typing import Self

import torch
from torch import Tensor

STRIDE = 64  # tokens between two states that are stored


class ConvState:
    """`now` and each of `kept`, by the number of tokens before it, are (blocks, L − 1, d); zeros before the first token."""

    def __init__(self, like: Tensor, shape: tuple[int, int, int]):
        self.now = like.new_zeros(shape)
        self.next = self.now.clone()  # a pass that fails in a later block must not have changed anything
        self.kept: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.now, self.next, *self.kept.values()))

    def extend(self, i: int, old: int, z: Tensor) -> Tensor:
        """The last rows before z (t, d), and z."""
        behind = self.now.shape[1]
        rows = torch.cat([self.now[i], z])
        self.next[i] = rows[len(z) :]
        for stop in range(old + STRIDE - old % STRIDE, old + len(z) + 1, STRIDE):
            if stop not in self.kept:
                self.kept[stop] = torch.zeros_like(self.now)
            self.kept[stop][i] = rows[stop - old : stop - old + behind]
        return rows

    def finish(self) -> None:
        """Go on behind the new tokens."""
        self.now, self.next = self.next, self.now

    def cut(self, length: int, of: int) -> Self:
        """The state after the first `length` tokens `of` those so far."""
        found = type(self)(self.now, self.now.shape)  # type: ignore[arg-type]
        if length:
            found.now.copy_(self.now if length == of else self.kept[length])
        found.kept = {stop: x.clone() for stop, x in self.kept.items() if stop <= length}
        return found

"""Weights while layers compute with them. `Network.weights` is the one place where a block's are fetched and released.

    with model.weights(block) as weights:                  a packed matrix is unpacked once for all pieces of a batch
        block.forward(a_1, Pass(weights=weights))          layers take their matrices from there

A matrix that is stored as something else than it is computed with passes through here. Exceptions are unpacked where they
are used: the rows that an embedding looks up, and a large head, which is unpacked in parts. The experts of a mixture are
unpacked one after the other, in every piece of the batch, and only those that have rows there.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...ops import packed
from .packed import Packed


class Weights:
    """Matrices as they are stored: packed bytes are unpacked at every use, into a new tensor.

    dtype   that packed matrices are unpacked to, if it is not the model's: what products read in mixed precision
    """

    dtype: torch.dtype | None = None

    def unpacked(self, matrix: Packed, dtype: torch.dtype) -> Tensor:
        """The numbers of a packed matrix, for reading."""
        return matrix.unpack(dtype=dtype)

    @contextmanager
    def part(self) -> Iterator["Weights"]:
        """Weights for a part of the block, as an expert is: its unpacked matrices are released when it has computed."""
        yield self

    def product(self, a: Tensor, matrix: Packed, out: Tensor | None = None) -> Tensor | None:
        """a wᵗ with packed weights, (n, rows), written to `out` if that is given; None where the product with the unpacked
        weights is to be used."""
        return None

    def rounded(self, a: Tensor, matrix: Packed) -> Tensor:
        """What a product with the unpacked matrix reads."""
        return a


STORED = Weights()


class Fetched(Weights):
    """Matrices that are unpacked once, when they are first used.

    few_rows   products of a few rows use packed weights directly: sums in another order
    rounds     products with weights of 8 or 4 bits round float32 activations to 8 bits, and use packed weights directly
    """

    def __init__(self, scratch: "Scratch", few_rows: bool, dtype: torch.dtype | None = None, rounds: bool = False):
        self.scratch, self.few_rows, self.dtype, self.rounds = scratch, few_rows, dtype, rounds
        self.buffers: dict[tuple[Packed, torch.dtype], Tensor] = {}

    def unpacked(self, matrix: Packed, dtype: torch.dtype) -> Tensor:
        dtype = self.dtype or dtype
        if (stored := matrix.tensor()).dtype is dtype:
            return stored
        if (matrix, dtype) not in self.buffers:
            self.buffers[matrix, dtype] = matrix.unpack(self.scratch.take(matrix, dtype))
        return self.buffers[matrix, dtype]

    @contextmanager
    def part(self) -> Iterator[Weights]:
        with self.scratch.fetch(self.few_rows, self.dtype, self.rounds) as weights:
            yield weights

    def product(self, a: Tensor, matrix: Packed, out: Tensor | None = None) -> Tensor | None:
        rounds = self._rounds(a, matrix)
        if not self.few_rows or not packed.multiplies(a, matrix.data, matrix.kind, rounds):
            return None
        return (packed.rounded_product if rounds else packed.product)(a, matrix.data, matrix.kind, out)

    def rounded(self, a: Tensor, matrix: Packed) -> Tensor:
        return packed.rounded(a) if self._rounds(a, matrix) else a

    def _rounds(self, a: Tensor, matrix: Packed) -> bool:
        return self.rounds and matrix.kind in packed.ROUNDED and a.dtype is torch.float32


class Scratch:
    """A pool of buffers by shape and dtype: one block after the other is unpacked into the same memory. A model owns one; a
    copy of the model starts with none of its buffers."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[object, ...], list[Tensor]] = defaultdict(list)

    @contextmanager
    def fetch(
        self, few_rows: bool = False, dtype: torch.dtype | None = None, rounds: bool = False
    ) -> Iterator[Fetched]:
        """Weights to use within the context. Do not keep a matrix: afterwards others are unpacked into its buffer."""
        weights = Fetched(self, few_rows, dtype, rounds)
        try:
            yield weights
        finally:
            for buffer in weights.buffers.values():
                self._free[_key(buffer.shape, buffer.dtype, buffer.device)].append(buffer)

    def take(self, matrix: Packed, dtype: torch.dtype) -> Tensor:
        """A buffer for the numbers of a matrix."""
        free = self._free[_key(matrix.shape, dtype, matrix.data.device)]
        return free.pop() if free else torch.empty(matrix.shape, dtype=dtype, device=matrix.data.device)

    def clear(self) -> None:
        """Free the buffers that are not in use."""
        self._free.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are not in use."""
        return sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)

    def __deepcopy__(self, memo: object) -> "Scratch":
        return Scratch()


def _key(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    return tuple(shape), dtype, device

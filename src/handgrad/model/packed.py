"""Frozen matrices that stay packed in memory, and the buffers into which they are unpacked for a while.

    matrix = Packed(data, "Q4_1", (576, 576))          the bytes of a GGUF file, which may stay memory-mapped
    matrix = Packed.of(weight.bfloat16())              or two bytes per number
    w = matrix.tensor(torch.float32)                   (rows, columns)

    with scratch.unpacked():                           e.g. for a block and all pieces of a batch
        …                                              here `matrix.tensor` unpacks a matrix once, into a buffer

The orientation is that of the file: (f_out, f_in) in GGUF.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ..errors import HandgradError
from ..ops import packed

KINDS = tuple(packed.KINDS)
_KIND_OF = {dtype: kind for kind, dtype in packed.FLOATS.items()}


class Packed:
    """A matrix of `shape` (rows, columns) as bytes: data (rows, bytes per row), uint8. It has no gradient.

    Not a tensor, so a model's `.to(dtype)`, `.half()` and so on do not see it, and copies of a model share it."""

    def __init__(self, data: Tensor, kind: str, shape: tuple[int, int]):
        if kind not in KINDS:
            raise HandgradError(f"matrices of type {kind} cannot stay packed; these can: {', '.join(KINDS)}")
        rows, columns = shape
        try:
            width = packed.bytes_per_row(columns, kind)
        except ValueError as error:
            raise HandgradError(str(error)) from None
        if data.dtype != torch.uint8 or data.shape != (rows, width):
            raise HandgradError(
                f"a {kind} matrix of {rows} × {columns} has uint8 data of {(rows, width)}, not {data.dtype} of"
                f" {tuple(data.shape)}: is the file truncated?"
            )
        self.data, self.kind, self.shape = data, kind, (rows, columns)

    @classmethod
    def of(cls, w: Tensor, kind: str | None = None) -> "Packed":
        """A matrix in the bytes of its dtype, without a copy; or rounded to F16, BF16, Q8_0 or Q4_1."""
        rows, columns = w.shape
        kind = kind or _KIND_OF.get(w.dtype)
        if kind is None:
            raise HandgradError(f"a matrix of {w.dtype} cannot be packed as it is: convert it, or name a type")
        if kind == "F16" and w.dtype != torch.float16 and w.abs().max() > torch.finfo(torch.float16).max:
            raise HandgradError("a weight is too large for float16: use bfloat16")
        try:
            return cls(packed.pack(w.detach(), kind), kind, (rows, columns))
        except ValueError as error:
            raise HandgradError(str(error)) from None

    @property
    def nbytes(self) -> int:
        """Bytes in memory, or in the mapped file."""
        return self.data.nbytes

    def unpack(self, out: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, written into `out` (rows, columns) if given."""
        if out is None:
            out = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        return packed.unpack(self.data, self.kind, out)

    def tensor(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, for reading: in a buffer within `Scratch.unpacked`, otherwise in a new tensor."""
        held = _held.get()
        return self.unpack(dtype=dtype) if held is None else held.tensor(self, dtype)

    def product(self, a: Tensor, out: Tensor | None = None) -> Tensor | None:
        """a wᵗ with packed weights, (n, rows), within `Scratch.unpacked(products=True)`, written to `out` if that is given;
        None where a product with the unpacked weights is faster."""
        held = _held.get()
        if held is None or not held.products or not packed.multiplies(a, self.data, self.kind):
            return None
        return packed.product(a, self.data, self.kind, out)

    def rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Some rows, unpacked: ids (…) → (…, columns)"""
        picked = self.reordered(ids.flatten()).unpack(dtype=dtype)
        return picked.view(*ids.shape, self.shape[1])

    def reordered(self, ids: Tensor) -> "Packed":
        """These rows in this order, packed: a copy of their bytes. Un-permutes the rotary rows of q and k."""
        return Packed(self.data.index_select(0, ids), self.kind, (len(ids), self.shape[1]))

    def between(self, start: int, stop: int) -> "Packed":
        """The rows from `start` to `stop`, packed, without a copy: a large head is unpacked in parts."""
        data = self.data[start:stop]
        return Packed(data, self.kind, (len(data), self.shape[1]))

    def __deepcopy__(self, memo: object) -> "Packed":
        return self  # never changes

    def __repr__(self) -> str:
        return f"Packed({self.shape[0]} × {self.shape[1]}, {self.kind}, {self.nbytes:,} bytes)"


class _Held:
    """The matrices that have been unpacked within a context, and their buffers."""

    def __init__(self, scratch: "Scratch", products: bool):
        self.scratch, self.products, self.outer = scratch, products, _held.get()
        self.buffers: dict[tuple[Packed, torch.dtype], Tensor] = {}

    def tensor(self, matrix: Packed, dtype: torch.dtype) -> Tensor:
        found = self.find(matrix, dtype)
        if found is None:
            found = self.buffers[matrix, dtype] = matrix.unpack(self.scratch._take(matrix, dtype))
        return found

    def find(self, matrix: Packed, dtype: torch.dtype) -> Tensor | None:
        found = self.buffers.get((matrix, dtype))
        return self.outer.find(matrix, dtype) if found is None and self.outer is not None else found


# Per thread: a matrix that one thread has unpacked is not there for another, which would not know when the buffer is reused.
_held: ContextVar[_Held | None] = ContextVar("held", default=None)


class Scratch:
    """A pool of buffers by shape and dtype: one block after the other is unpacked into the same memory. A model owns one; a
    copy of the model starts with none of its buffers."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[object, ...], list[Tensor]] = defaultdict(list)

    @contextmanager
    def unpacked(self, products: bool = False) -> Iterator[None]:
        """Unpack every matrix once: in the context, its `tensor` returns the same buffer. Do not keep it: afterwards other
        matrices use it. With `products`, layers multiply a few rows with packed weights: sums in another order."""
        held = _Held(self, products)
        token = _held.set(held)
        try:
            yield
        finally:
            _held.reset(token)
            for buffer in held.buffers.values():
                self._free[_key(buffer.shape, buffer.dtype, buffer.device)].append(buffer)

    def clear(self) -> None:
        """Free the buffers that are not in use."""
        self._free.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are not in use."""
        return sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)

    def _take(self, matrix: Packed, dtype: torch.dtype) -> Tensor:
        free = self._free[_key(matrix.shape, dtype, matrix.data.device)]
        return free.pop() if free else torch.empty(matrix.shape, dtype=dtype, device=matrix.data.device)

    def __deepcopy__(self, memo: object) -> "Scratch":
        return Scratch()


def _key(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    return tuple(shape), dtype, device

"""Frozen matrices that stay packed in memory. `weights.py` unpacks them while a layer computes.

    matrix = Packed(data, "Q4_1", (576, 576))          the bytes of a GGUF file, which may stay memory-mapped
    matrix = Packed.of(weight.bfloat16())              or two bytes per number
    w = matrix.unpack(dtype=torch.float32)             (rows, columns)

The orientation is that of the file: (f_out, f_in) in GGUF.
"""

import torch
from torch import Tensor

from ...errors import HandgradError
from ...ops import packed

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

    def tensor(self) -> Tensor:
        """The bytes; where they are float numbers, and not mapped from an odd address, the numbers, without a copy."""
        dtype = packed.FLOATS.get(self.kind)
        if dtype is None or self.data.storage_offset() % dtype.itemsize:
            return self.data
        return self.data.view(dtype)

    def unpack(self, out: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, written into `out` (rows, columns) if given."""
        if out is None:
            out = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        return packed.unpack(self.data, self.kind, out)

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

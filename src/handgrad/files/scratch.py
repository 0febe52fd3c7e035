"""Tensors in a temporary file: what is needed again, but not now, and would fill the memory."""

import tempfile
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .cache import cache_path


class TensorFile(Mapping[str, Tensor]):
    """Tensors by name in a file, read one at a time. The file has no name and disappears with this object or the
    process."""

    def __init__(self) -> None:
        folder = cache_path("scratch")  # /tmp may be in memory
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._index: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        self.bytes = 0

    def append(self, name: str, shape: torch.Size, part: Tensor) -> None:
        """Append a tensor of this shape under a new name, or the next part of the one that was appended last."""
        self._file.seek(self.bytes)
        self._file.write(_bytes_of(part.detach().contiguous()))
        self._index.setdefault(name, (self.bytes, shape, part.dtype))
        self.bytes += part.numel() * part.element_size()

    def __getitem__(self, name: str) -> Tensor:
        start, shape, dtype = self._index[name]
        x = torch.empty(shape, dtype=dtype)
        self._file.seek(start)
        found = self._file.readinto(_bytes_of(x))
        if found != x.numel() * x.element_size():
            raise OSError(f"{name}: the temporary file ends early")
        return x

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


class TensorsInMemory(dict[str, Tensor]):
    """The same interface without a file."""

    def __init__(self) -> None:
        super().__init__()
        self._filled = 0  # entries of the tensor that was appended last

    def append(self, name: str, shape: torch.Size, part: Tensor) -> None:
        """Append a tensor of this shape under a new name, or the next part of the one that was appended last."""
        if name not in self:
            self[name], self._filled = torch.empty(shape, dtype=part.dtype), 0
        self[name].view(-1)[self._filled : self._filled + part.numel()] = part.detach().reshape(-1)
        self._filled += part.numel()


def _bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = x.view(-1).view(torch.uint8).numpy()
    return memoryview(array)

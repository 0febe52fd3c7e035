"""Outputs that are rebuilt in the backward pass instead of stored: those of norms, gates and activations.

Such a function leaves a `Source` on its output: what to rebuild it from, which it stores anyway. A linear layer that reads
the output saves these tensors instead. `Shared` makes all readers of one output rebuild it once.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

# saved tensors → something for the function itself, and the output
Rebuild = Callable[..., tuple[Tensor | None, Tensor]]


class Shared:
    """What one reader has rebuilt, until all readers have used it."""

    def __init__(self, readers: int = 0) -> None:
        self.readers = readers
        self.left = 0
        self.rebuilt: tuple[Tensor | None, Tensor] | None = None

    def get(self, rebuild: Rebuild, tensors: list[Tensor]) -> tuple[Tensor | None, Tensor]:
        """Rebuild, or return what was rebuilt; the last reader frees it."""
        if self.rebuilt is None:
            self.rebuilt, self.left = rebuild(*tensors), self.readers
        found = self.rebuilt
        self.left -= 1
        if self.left <= 0:
            self.rebuilt = None
        return found


class Source(NamedTuple):
    """How to rebuild a tensor. Only the tensor holds it; `save_for_backward` saves the tensors."""

    rebuild: Rebuild
    shared: Shared
    tensors: list[Tensor]
    version: int  # of the tensor: changed in place, it is no longer what would be rebuilt


def mark(out: Tensor, rebuild: Rebuild, shared: Shared, tensors: list[Tensor]) -> Tensor:
    """Leave a source on an output."""
    if out.requires_grad:  # else no backward pass will read it
        out._handgrad_source = Source(rebuild, shared, tensors, out._version)  # type: ignore[attr-defined]
    return out


def source_of(a: Tensor) -> Source | None:
    """The source of a tensor, if it has one that is still true."""
    found: Source | None = getattr(a, "_handgrad_source", None)
    return found if found is not None and found.version == a._version else None


def forget(a: Tensor) -> Tensor:
    """The same tensor without its source."""
    a.__dict__.pop("_handgrad_source", None)
    return a

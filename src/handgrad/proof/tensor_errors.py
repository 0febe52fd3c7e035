"""Errors of tensors by name, relative to at least a share of the largest of them."""

import math

from torch import Tensor


class TensorErrors:
    """Errors of one kind of tensor. A name may be added in parts or several times: the largest error counts."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, float]] = {}  # the error, and the size it is relative to

    def add(self, name: str, ours: Tensor, expected: Tensor, norm: bool = False) -> None:
        """Compare the largest entries, or the norms."""
        difference = ours.double() - expected
        error, size = (x.norm().item() if norm else x.abs().max().item() for x in (difference, expected))
        before = self.found.get(name, (0.0, 0.0))
        self.found[name] = (max(before[0], math.inf if math.isnan(error) else error), max(before[1], size))

    def relative(self, floor: float) -> dict[str, float]:
        """The relative errors. `floor` is the share of the largest size that every error is relative to at least."""
        least = floor * max((size for _, size in self.found.values()), default=0.0)
        return {name: error / (max(size, least) or 1.0) for name, (error, size) in self.found.items()}

"""Errors of tensors by name, relative to at least a share of the largest of them."""

import math

from torch import Tensor


class TensorErrors:
    """Errors of one kind of tensor. A name may be added in parts or several times: the largest error counts."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, float]] = {}  # the error, and the size it is relative to
        self.norms: dict[str, float] = {}  # of what was expected, all parts together

    def add(self, name: str, ours: Tensor, expected: Tensor, norm: bool = False) -> None:
        """Compare the largest entries, or the norms."""
        if ours.shape != expected.shape or not expected.numel():
            self.found[name] = (math.inf if ours.shape != expected.shape else 0.0, 1.0)
            return
        difference = ours.double() - expected
        error, size = (x.norm().item() if norm else x.abs().max().item() for x in (difference, expected))
        before = self.found.get(name, (0.0, 0.0))
        self.found[name] = (max(before[0], math.inf if math.isnan(error) else error), max(before[1], size))
        self.norms[name] = math.hypot(self.norms.get(name, 0.0), expected.norm().item())

    def relative(self, floor: float, other: float = 0.0) -> dict[str, float]:
        """The relative errors. `floor` is the share of the largest size, or of `other` if that is larger, that every error
        is relative to at least."""
        least = floor * max((size for _, size in self.found.values()), default=0.0)
        least = max(least, floor * other)
        return {
            name: error if math.isinf(error) else error / (max(size, least) or 1.0)
            for name, (error, size) in self.found.items()
        }

    @property
    def largest_norm(self) -> float:
        return max(self.norms.values(), default=0.0)

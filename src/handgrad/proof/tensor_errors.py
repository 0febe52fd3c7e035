"""Errors of tensors by name, relative to at least a share of the largest of them."""

import math

import torch
from torch import Tensor
from torch.linalg import vector_norm

AT_ONCE = 1 << 18  # entries that are compared at once: whole differences would be as large as the tensors


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
        p = 2 if norm else math.inf
        n = expected.shape[0] if expected.ndim else 1
        rows = max(1, AT_ONCE * n // expected.numel())
        parts = zip(*(torch.split(x.reshape(n, -1), rows) for x in (ours, expected)), strict=True)
        pairs = ((x.double(), y.double()) for x, y in parts)
        sizes = torch.stack([torch.stack([vector_norm(x - y, p), vector_norm(y, p), vector_norm(y)]) for x, y in pairs])
        (error, size), length = vector_norm(sizes[:, :2], p, 0).tolist(), vector_norm(sizes[:, 2]).item()
        before = self.found.get(name, (0.0, 0.0))
        self.found[name] = (max(before[0], math.inf if math.isnan(error) else error), max(before[1], size))
        self.norms[name] = math.hypot(self.norms.get(name, 0.0), length)

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

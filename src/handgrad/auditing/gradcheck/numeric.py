"""The right answer: derivatives of the forward pass by differences, with the error that they have themselves.

    φ(s) = ⟨Δ, f(x + s v)⟩      dφ/ds at 0 is ⟨gradient, v⟩

In float64 the error is far below every dtype's rounding. A function that takes float32 only is differenced in float32; the
error of that is estimated from the rounding of φ and from the change of the result between two steps.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .function import Function, is_float

SAFETY = 5.0  # the change between two steps may be small by chance
ELASTICITY = 8.0  # roundings of numbers as large as Δ y / x, which cancel where a derivative is small


class Derivative(NamedTuple):
    """A derivative and the error it may have."""

    value: float
    error: float


def steps_of(dtype: torch.dtype) -> tuple[float, ...]:
    """Steps around the best one for differences of fourth order, eps^(1/5)."""
    best = torch.finfo(dtype).eps ** 0.2
    return tuple(best * 4.0**k for k in (1, 0, -1, -2, -3, -5))


class Judge:
    """Derivatives of ⟨Δ, f⟩ at some inputs, all in one dtype."""

    def __init__(self, function: Function, inputs: Sequence[Any], deltas: Sequence[Tensor], dtype: torch.dtype):
        self.function, self.inputs, self.dtype = function, list(inputs), dtype
        self.deltas = [d.double() for d in deltas]
        outputs = function.outputs(self.inputs)
        # every entry of the output is rounded by itself
        squares = sum(float((d * y.double()).square().sum()) for d, y in zip(self.deltas, outputs, strict=True))
        self.rounding = torch.finfo(dtype).eps * math.sqrt(squares)

    def phi(self, index: int, x: Tensor) -> float:
        inputs = [*self.inputs[:index], x, *self.inputs[index + 1 :]]
        found = self.function.outputs(inputs)
        return sum(float((d * y.double()).sum()) for d, y in zip(self.deltas, found, strict=True))

    def along(self, index: int, v: Tensor) -> Derivative:
        """The derivative along v of the input with this index, by the step whose error is smallest."""
        x = self.inputs[index]
        size = max(1.0, x.double().norm().item() / math.sqrt(max(1, x.numel())))
        best = Derivative(math.nan, math.inf)
        before = math.nan
        for step in steps_of(self.dtype):
            h = step * size
            moved = [(x.double() + k * h * v).to(x.dtype) for k in (1, -1, 2, -2)]
            # the step actually taken, after rounding x + h v
            a, b, c, d = (self.phi(index, y) for y in moved)
            value = (8 * (a - b) - (c - d)) / (12 * h)
            placed = (
                torch.finfo(self.dtype).eps * x.double().norm().item() * abs(value) / (h * (v.norm().item() or 1.0))
            )
            noise = 1.5 * self.rounding / h + placed / math.sqrt(max(1, x.numel()))
            change = abs(value - before)
            error = SAFETY * (noise + (math.inf if math.isnan(change) else change))
            if math.isfinite(value) and error < best.error:
                best = Derivative(value, error)
            before = value
        return best

    def gradient(self, index: int) -> tuple[Tensor, float]:
        """The whole gradient of one input, entry by entry, and the norm of its error."""
        x = self.inputs[index]
        right = torch.zeros(x.shape, dtype=torch.float64)
        squares = 0.0
        for i in range(x.numel()):
            v = torch.zeros(x.numel(), dtype=torch.float64)
            v[i] = 1.0
            found = self.along(index, v.view(x.shape))
            right.view(-1)[i] = found.value
            squares += found.error**2
        return right, math.sqrt(squares)


def allowed_error(
    gradients: Callable[[Sequence[Any], Sequence[Tensor]], list[Tensor | None]],
    inputs: Sequence[Any],
    deltas: Sequence[Tensor],
    dtype: torch.dtype,
    terms: int,
    outputs: Sequence[Tensor],
    samples: int = 4,
) -> list[float]:
    """The norm of the error that computing each gradient in this dtype allows: how far rounded inputs move it, measured in
    float64, the rounding of sums of that many terms, and that of numbers as large as Δ y/x, of which a small derivative is
    the rest after cancellation."""
    size = 2 * torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(0)

    def rounded(x: Any) -> Any:
        if not is_float(x):
            return x
        return x * (1 + size * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))

    exact = gradients(inputs, deltas)
    adding = torch.finfo(dtype).eps * math.sqrt(terms)
    floats = [x for x in inputs if is_float(x)]
    products = sum(float((d.double() * y.double()).norm()) for d, y in zip(deltas, outputs, strict=True))
    bounds = []
    for x, g in zip(floats, exact, strict=True):
        size_of_x = x.double().norm().item() or 1.0
        floor = ELASTICITY * torch.finfo(dtype).eps * products / size_of_x
        bounds.append(floor + (0.0 if g is None else (2 * torch.finfo(dtype).eps + adding) * g.double().norm().item()))
    for _ in range(samples):
        moved = gradients([rounded(x) for x in inputs], [rounded(d) for d in deltas])
        for i, (g, m) in enumerate(zip(exact, moved, strict=True)):
            if g is not None and m is not None and g.shape == m.shape:
                bounds[i] = max(bounds[i], 3 * (m.double() - g.double()).norm().item())
    return bounds

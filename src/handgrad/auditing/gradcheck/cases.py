"""The cases of a check: inputs of odd shapes, in several dtypes, broadcast, and in memory that is not contiguous.

An input is described by its dimensions, "n d", or given as a tensor: then dimensions of equal size vary together.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import HandgradError
from .function import is_float

SIZES = ([3, 5, 4, 2], [2, 3, 5, 4], [7, 4, 3, 5], [1, 3, 4, 2], [17, 33, 3, 2])  # for the dimensions in order
LAYOUTS = ("contiguous", "transposed", "strided", "expanded")


@dataclass(frozen=True)
class Case:
    """One set of inputs. Two cases with the same seed and shapes have the same values."""

    shapes: tuple[tuple[int, ...] | None, ...]  # None: not a floating-point tensor, passed as it is
    dtype: torch.dtype = torch.float64
    layout: str = "contiguous"
    broadcast: tuple[int, int] | None = None  # the input and the axis that has the size 1
    seed: int = 0
    may_refuse: bool = False  # the function may not be made for these shapes

    def __str__(self) -> str:
        shapes = ", ".join("–" if s is None else "×".join(map(str, s)) or "scalar" for s in self.shapes)
        more = "" if self.layout == "contiguous" else f", {self.layout} memory"
        if self.broadcast is not None:
            more += f", input {self.broadcast[0]} broadcast along axis {self.broadcast[1]}"
        return f"{str(self.dtype).removeprefix('torch.')}, shapes {shapes}{more}"

    @property
    def size(self) -> int:
        return sum(torch.Size(s).numel() for s in self.shapes if s is not None)

    @property
    def room(self) -> int:
        """Numbers around an input: as far as a function reads that takes one input to have the shape of another."""
        largest = max(torch.Size(s).numel() for s in self.shapes if s is not None)
        return 64 * math.ceil((largest + 64) / 64)  # the input stays aligned


@dataclass(frozen=True)
class Template:
    """The inputs by their dimensions: ("n", "d"), a tensor, or another argument."""

    arguments: tuple[Any, ...]
    dims: tuple[tuple[str, ...] | None, ...]
    described: bool  # by strings: the function must take every size
    scale: float
    ranges: tuple[tuple[float, float] | None, ...]  # of tensors that were given: values like theirs

    @property
    def names(self) -> list[str]:
        """The dimensions whose size may vary."""
        return list(dict.fromkeys(d for dims in self.dims if dims is not None for d in dims if not d.isdigit()))

    @property
    def has_ids(self) -> bool:
        """Whether an input is a tensor of integers, which fixes the sizes."""
        return any(isinstance(x, Tensor) and not is_float(x) for x in self.arguments)

    def shapes(self, sizes: list[int]) -> tuple[tuple[int, ...] | None, ...]:
        """The shapes of the inputs if their dimensions have these sizes."""
        size = {name: sizes[i % len(sizes)] for i, name in enumerate(self.names)}
        return tuple(None if d is None else tuple(size.get(x) or int(x) for x in d) for d in self.dims)

    def inputs(self, case: Case, dtype: torch.dtype | None = None, layout: str | None = None) -> list[Any]:
        """The inputs of a case: random numbers that its dtype represents, in `dtype` (default: the case's).

        The memory around them is NaN, which shows in the output if a function reads outside; with a `layout` it is 0."""
        generator = torch.Generator().manual_seed(case.seed)
        made: list[Any] = []
        for argument, shape, span in zip(self.arguments, case.shapes, self.ranges, strict=True):
            if shape is None:
                made.append(argument)
                continue
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            x = self.scale * x if span is None else span[0] + (span[1] - span[0]) * torch.sigmoid(x)
            x = x.to(case.dtype).to(dtype or case.dtype)
            around = math.nan if layout is None else 0.0
            made.append(arranged(x, layout or case.layout, around, case.room))
        return made


def arranged(x: Tensor, layout: str, around: float, room: int) -> Tensor:
    """The same values in another arrangement of memory; contiguous ones stand between `room` numbers `around` them."""
    if layout == "transposed" and x.ndim >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided" and x.ndim >= 1:
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
        wide[..., ::2] = x
        return wide[..., ::2]
    memory = x.new_full((x.numel() + 2 * room,), around)
    return memory[room : room + x.numel()].copy_(x.flatten()).view(x.shape)


def make_template(arguments: Sequence[Any], scale: float) -> Template:
    """Read the description of the inputs."""
    if not any(isinstance(x, str) or is_float(x) for x in arguments):
        raise HandgradError(
            'give the inputs: tensors, or their dimensions as in hg.check(f, "n d", "d"), at least one of them'
        )
    described = any(isinstance(x, str) for x in arguments)
    letters: dict[int, str] = {}
    dims: list[tuple[str, ...] | None] = []
    ranges: list[tuple[float, float] | None] = []
    for x in arguments:
        if isinstance(x, str):
            dims.append(tuple(x.split()))
            ranges.append(None)
        elif is_float(x):
            dims.append(tuple(str(n) if n == 1 else letters.setdefault(n, f"s{n}") for n in x.shape))
            wide = x.detach().double()
            low, high = (wide.min().item(), wide.max().item()) if x.numel() else (0.0, 1.0)
            ranges.append((low, high) if low >= 0 or high <= 0 else None)  # a sign that the function may need
        else:
            dims.append(None)
            ranges.append(None)
    return Template(tuple(arguments), tuple(dims), described, scale, tuple(ranges))


def cases_of(template: Template, dtypes: Sequence[torch.dtype], seed: int) -> Iterator[Case]:
    """The cases of a check: every shape in the first dtype, then the other dtypes, layouts and broadcast inputs."""
    shapes = []
    if not template.described:
        shapes.append(tuple(tuple(x.shape) if is_float(x) else None for x in template.arguments))
    if template.described or not template.has_ids:
        shapes += [template.shapes(sizes) for sizes in SIZES]
    unique = list(dict.fromkeys(shapes))
    for i, shape in enumerate(unique):
        yield Case(shape, dtypes[0], seed=seed, may_refuse=not template.described and i > 0)
    first = Case(unique[0], dtypes[0], seed=seed)
    for dtype in dtypes[1:]:
        yield replace(first, dtype=dtype)
    for layout in LAYOUTS[1:]:
        yield replace(first, layout=layout)
    for i, sides in enumerate(first.shapes):
        for axis, n in enumerate(sides or ()):
            if n > 1 and sides is not None:
                one = (*sides[:axis], 1, *sides[axis + 1 :])
                changed = (*first.shapes[:i], one, *first.shapes[i + 1 :])
                yield replace(first, shapes=changed, broadcast=(i, axis), may_refuse=True)


def smaller(case: Case, template: Template) -> Iterator[Case]:
    """The same kind of case with fewer numbers, the smallest first."""
    if case.broadcast is not None or not template.names or template.has_ids:
        return
    sizes = ([1] * 4, [1, 2, 1, 2], [2] * 4, [1, 3, 1, 3], [2, 3, 2, 3], [3, 2, 3, 2], [3, 3, 3, 3])
    options = [replace(case, shapes=template.shapes(x), may_refuse=True) for x in sizes]
    yield from sorted((x for x in options if x.size < case.size), key=lambda x: x.size)

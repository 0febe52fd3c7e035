"""Attribution patching: the predicted change of every patch of a kind, by one forward and one backward pass.

    predicted(block, head, position) = Σ Δ_3 ∘ (a_3′ − a_3)      over the entries of the head in that row

Patching each of them and running the model again measures the same changes with a forward pass each; `PatchMap.measure`
does so for chosen cells, or for all.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from ...errors import HandgradError, shown
from ...files.framed import Framed
from ..gpt import GPT
from ..passes.objective import MEAN_LOSS, Objective
from .heat_maps import Grid, heat_maps, numbered
from .patch import Patch, Place, Rows, activation_of, check_index, heads_of, vocabulary_of, with_signal
from .trace import Trace, edited_forward, trace, without_gradients

Cell = tuple[int, ...]  # the block, then a number for each name in `by`
AXES = ("position", "head", "column")  # of an activation as (n, heads, w)


class PatchMap:
    """Predicted changes of an objective by patches, and measured ones where `measure` was called.

    of, by      what each patch replaces: "a_3", ("head", "position")
    blocks      the blocks that have it: the first dimension of both tensors
    predicted   (blocks, …) ⟨Δ, a′ − a⟩, in float64
    measured    (blocks, …) the objective with the patch minus without; NaN where it was not measured
    value       the objective without a patch
    """

    def __init__(
        self,
        of: str,
        by: tuple[str, ...],
        predicted: dict[int, Tensor],
        value: float,
        seconds: float,
        measure_one: Callable[[Cell], float],
        words: Sequence[str],
        passes: int = 1,
    ):
        self.of, self.by, self.blocks, self.value = of, by, list(predicted), value
        self.predicted = torch.stack([*predicted.values()])
        self.measured = torch.full_like(self.predicted, math.nan)
        self.seconds, self.seconds_measured = (
            seconds,
            0.0,
        )  # of the one pass in both directions, and of all measurements
        self.passes = passes  # forward ones that measure a cell
        self._measure_one, self._words = measure_one, words

    def cells(self) -> list[Cell]:
        """Every cell: (block, head, position) if `by` is ("head", "position")."""
        return [(block, *rest) for block, *rest in product(self.blocks, *map(range, self.predicted.shape[1:]))]

    def largest(self, count: int = 10) -> list[Cell]:
        """The cells with the largest predicted change, in either direction."""
        order = self.predicted.abs().flatten().argsort(descending=True, stable=True)[:count].tolist()
        cells = self.cells()
        return [cells[i] for i in order]

    def measure(self, cells: Iterable[Cell] | None = None) -> Tensor:
        """Patch these cells, or all, one at a time, and run the model forward: a pass for each. Returns `measured`. The
        model's weights must be those of the prediction."""
        chosen = self.cells() if cells is None else [*cells]
        where = [self._index(cell) for cell in chosen]
        for cell, index in zip(chosen, where, strict=True):
            if self.measured[index].isnan():
                begin = time.perf_counter()
                self.measured[index] = self._measure_one(cell)
                self.seconds_measured += time.perf_counter() - begin
        return self.measured

    @property
    def correlation(self) -> float:
        """Pearson's, of the predicted with the measured changes, over the cells that were measured."""
        x, y = self._pairs()
        if len(x) < 2:
            raise HandgradError(
                "nothing to compare: measure at least two cells first, with .measure() or .measure(cells)"
            )
        return torch.corrcoef(torch.stack([x, y]))[0, 1].item()

    def misses(self, count: int = 5) -> list[tuple[Cell, float, float]]:
        """The measured cells whose prediction is furthest off: cell, predicted, measured."""
        off = (self.measured - self.predicted).abs().flatten().nan_to_num(-1)
        order = off.argsort(descending=True, stable=True)[: min(count, int((off >= 0).sum()))].tolist()
        cells, one, two = self.cells(), self.predicted.flatten().tolist(), self.measured.flatten().tolist()
        return [(cells[i], one[i], two[i]) for i in order]

    def _index(self, cell: Cell) -> Cell:
        names = ("block", *self.by)
        if not isinstance(cell, tuple) or len(cell) != len(names):
            raise HandgradError(f"a cell of this map is ({', '.join(names)}), not {shown(cell)}")
        block, *rest = cell
        if block not in self.blocks:
            raise HandgradError(
                f"there is no {self.of} to patch in block {shown(block)}: there is one in {self.blocks}"
            )
        for name, i, end in zip(self.by, rest, self.predicted.shape[1:], strict=True):
            check_index(name, i, end)
        return (self.blocks.index(block), *rest)

    def _pairs(self) -> tuple[Tensor, Tensor]:
        done = ~self.measured.isnan()
        return self.predicted[done], self.measured[done]

    def __repr__(self) -> str:
        n, done = self.predicted.numel(), int((~self.measured.isnan()).sum())
        lines = [
            f"PatchMap: {n:,} patches of {self.of} by {', '.join(('block', *self.by))}; the objective is {self.value:.6f}",
            f"  predicted by one forward and one backward pass in {self.seconds:.3g} s",
        ]
        if done:
            each = self.seconds_measured / done
            passes = f"{self.passes} forward pass{'es' if self.passes > 1 else ''}"
            lines.append(
                f"  measured {done:,}, each by {passes} in {each:.3g} s; all {n:,} take {n * each:.3g} s,"
                f" {n * each / self.seconds:.3g} times as long"
            )
        if done > 1:
            lines.append(f"  correlation of predicted and measured {self.correlation:.4f}; largest misses:")
            lines += [f"    {self._name(cell)}: predicted {x:+.4g}, measured {y:+.4g}" for cell, x, y in self.misses(3)]
        return "\n".join(lines)

    def _name(self, cell: Cell) -> str:
        return ", ".join(f"{name} {i}" for name, i in zip(("block", *self.by), cell, strict=True))

    def show(self) -> Framed:
        """A picture for a notebook: predicted changes, and measured ones where there are any; hovering a cell marks it in
        every map and shows its numbers."""
        grids: list[Grid] = []
        for title, values in (("predicted", self.predicted), ("measured", self.measured)):
            if values.isnan().all():
                continue
            if values.ndim == 2:
                rows = [f"block {block}" for block in self.blocks]
                grids.append(Grid(title, values, rows, self._labels(self.by[0], values.shape[1])))
                continue
            for block, its in zip(self.blocks, values.flatten(2), strict=True):
                first, *rest = self.by
                columns = self._labels(rest[0], its.shape[1]) if len(rest) == 1 else []
                grids.append(Grid(f"{title}, block {block}", its, self._labels(first, len(its)), columns))
        about = f"Change of the objective ({self.value:.4g}) by patches of {self.of}, to first order"
        return heat_maps(about, grids, kind="delta")

    def _labels(self, axis: str, count: int) -> list[str]:
        if axis == "position":
            return numbered(self._words)
        return [f"{axis} {i}" for i in range(count)]

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()


def patch_map(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    other: Trace,
    of: str = "a_3",
    by: str | Sequence[str] = ("head", "position"),
    *,
    objective: Objective = MEAN_LOSS,
    align: Rows | None = None,
) -> PatchMap:
    """Predict, for every block at once, how the objective changes if a part of an activation is replaced by that of another
    trace, with one forward and one backward pass; `.measure()` patches and runs the model.

    other      The hg.trace of the other prompt.
    of         The activation, without its block: a_3 the heads, a_1 or a_5 the residual stream, a_4 what attention adds to
               it, a_9 what the feed-forward layer adds, a_8 the neurons, q, k, v, rho.
    by         What one patch replaces: "position" a whole row; "head" or "column" in all rows; ("head", "position") …
    objective  What to differentiate, as for hg.trace.
    align      The row of the other trace for each row here; prompts of equal length need none.
    """
    axes = axes_of(by)
    with without_gradients(model):
        begin = time.perf_counter()
        own = trace(model, tokens, targets, objective=objective, edit={} if of in ("q", "k", "rho") else None)
        found = predictions(own, other, of, axes, align, range(len(model.blocks)))
        seconds = time.perf_counter() - begin
    base: list[float] = []  # by the same path as what is compared with it, when it is first needed

    def measure(cell: Cell) -> float:
        base.extend([] if base else [edited_forward(model, tokens, targets, {}, objective)[0]])
        patch = patch_of(other, of, axes, align, cell)
        return edited_forward(model, tokens, targets, patch, objective)[0] - base[0]

    return PatchMap(of, axes, found, own.loss, seconds, measure, own.words)


def axes_of(by: str | Sequence[str]) -> tuple[str, ...]:
    """The dimensions that patches are told apart by, or an error."""
    axes = (by,) if isinstance(by, str) else tuple(by)
    if not axes or len({*axes}) < len(axes) or not {*axes} <= {*AXES}:
        raise HandgradError(f"by must be one or several of {', '.join(AXES)}, not {shown(by)}")
    return axes


def predictions(
    own: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    of: str,
    axes: tuple[str, ...],
    align: Rows | None,
    blocks: Iterable[int],
) -> dict[int, Tensor]:
    """⟨Δ, a′ − a⟩ by block and those dimensions, of each of these blocks that has the activation."""
    found: dict[int, Tensor] = {}
    n_vocab = vocabulary_of(own)
    for block in blocks:
        name = f"blocks.{block}.{of}"
        if name not in own or ("head" in axes and of == "a_3" and f"blocks.{block}.rho" not in own):
            continue  # a mixture has no neurons, a convolution no heads
        patch = patch_of(other, of, (), align, (block,), whole="head" in axes)
        patch.check_vocabulary(n_vocab)
        products = patch.places[0].products(*with_signal(own, name))
        kept = [axis for axis in AXES if axis in axes]
        left = [i for i, axis in enumerate(AXES) if axis not in axes]
        summed = products.sum(left) if left else products
        found[block] = summed.permute([kept.index(axis) for axis in axes])
    if not found:
        activation_of(other, f"blocks.0.{of}")  # raises if there is none of that name
        raise HandgradError(f"no block of this model has {of} with {' and '.join(axes)}")
    return found


def patch_of(
    other: Mapping[str, Tensor], of: str, axes: tuple[str, ...], align: Rows | None, cell: Cell, whole: bool = False
) -> Patch:
    """The patch of a cell. `whole`: all heads, told apart."""
    block, *rest = cell
    at = dict(zip(axes, rest, strict=True))
    name, head = f"blocks.{block}.{of}", at.get("head")
    values = activation_of(other, name)
    heads = 1 if head is None and not whole else heads_of(other, name)
    positions: tuple[int, ...] | None = (at["position"],) if "position" in at else None
    if positions is not None and align is not None and positions[0] not in align:
        positions = ()  # without a partner it stays as it is
    return Patch([Place(name, values, align, positions, heads, head, at.get("column"))], vocabulary_of(other))

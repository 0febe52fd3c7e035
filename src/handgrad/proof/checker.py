"""`Checker`: every activation, error signal and gradient of a model by hand against the reference, one part after the other.

A model in float64 is checked as a whole: its own recorded pass, and gradients in `.grad`. A model in a narrower dtype is
checked a block at a time: nothing of its size exists twice, and what the formulas computed is computed again, block by
block, when it is read.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HandgradError, NonFiniteError
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..model.passes.objective import MEAN_LOSS, Objective
from ..model.steps import signal
from ..tolerances import (
    DIFFERENCE_FLOOR,
    ENTRY_FLOOR,
    FINITE_DIFFERENCE_TOLERANCE,
    LOSS_FLOOR,
    NORM_FLOOR,
    RELU_DIFFERENCE_TOLERANCE,
    TOLERANCE,
)
from .by_hand import ByHand, Recorded
from .oracles import directional_error
from .reference_model import Part, ReferenceModel
from .rounding import MARGIN, SAMPLES, rounder, rounding_size
from .tensor_errors import TensorErrors


def signal_names(model: GPT) -> list[str]:
    """Every error signal that a trace of the model has, from the lowest block's Δ_1 to Δ_12."""
    found = []
    for i, block in enumerate(model.blocks):
        steps = block.steps()
        names = [signal(x) for x in steps[0].inputs]
        for step in steps:
            names += [*step.inside, *(signal(x) for x in step.outputs)]
        found += [f"blocks.{i}.{name}" for name in names]
    return [*found, "delta_11", "delta_12"]


def activation_names(model: GPT) -> list[str]:
    """Every activation that has an error signal, except the scores, which are not stored: ρ is rebuilt from them."""
    found = []
    for i, block in enumerate(model.blocks):
        steps = block.steps()
        names = [*steps[0].inputs, *(x for step in steps for x in step.outputs)]
        found += [f"blocks.{i}.{name}" for name in names]
    return [*found, "a_11", "a_12"]


def difference_steps(config: ModelConfig) -> tuple[tuple[float, ...], float]:
    """Step sizes for finite differences, and their tolerance."""
    if config.activation == "relu":  # a large step would cross the kinks
        return (1e-6,), RELU_DIFFERENCE_TOLERANCE
    return (1e-3, 1e-4, 1e-5, 1e-6), FINITE_DIFFERENCE_TOLERANCE


def check_finite_and_trained(model: GPT) -> None:
    """Raise if the model is all frozen or holds NaN."""
    if not any(p.requires_grad for p in model.parameters()):
        raise HandgradError(
            "every parameter is frozen, so there is no gradient to verify: set requires_grad=True on at least one"
        )
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise NonFiniteError(f"the weights hold NaN or infinity in {broken[0]}: load an intact checkpoint")


class Checker:
    """Check one model on one batch. The model belongs to the checker: give a `float64_copy`, or a `shared_copy` to check a
    block at a time. Finite differences run on request.

    computed   the tensors that the model computed in its own `dtype`, a trace
    collect    called with every part of the reference
    pause      called before every intermediate; it may block

    errors     relative errors, by the trace's names of activations and signals and the model's names of parameters
    shapes     of the same tensors, but the loss
    absent     names of tensors that were not computed; their errors are infinite
    rounding   errors of `computed`
    rounding_limits   the largest such errors allowed: the tolerance of the dtype; where that is exceeded, what rounding
               explains, if that is more
    trained    sizes of the trainable parameters by name
    """

    def __init__(
        self,
        model: GPT,
        tokens: Tensor,
        targets: Tensor,
        computed: Mapping[str, Tensor] | None = None,
        *,
        lengths: list[int] | None = None,
        objective: Objective = MEAN_LOSS,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        collect: Callable[[Part], None] = lambda part: None,
        pause: Callable[[], None] = lambda: None,
    ):
        check_finite_and_trained(model)
        dtype = dtype or model.dtype
        self.reference = ReferenceModel(model, tokens, targets, lengths, objective, pause)
        self._layers = self.reference.layers
        self.whole = self._layers.whole
        self.ours = (Recorded if self.whole else ByHand)(self._layers, tokens, targets, lengths, objective)
        self.loss = self.ours.loss
        self.trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        self.limit = TOLERANCE[torch.float64]
        self.steps, self.difference_limit = difference_steps(model.config)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.absent: set[str] = set()
        self._generator = torch.Generator(model.device).manual_seed(seed)
        self._activations, self._signals, self._gradients, self._roundings = (TensorErrors() for _ in range(4))
        expected_loss, activations = math.nan, set(activation_names(model))
        for part in self.reference.parts():
            expected_loss = expected_loss if part.loss is None else part.loss
            self._compare(part, activations, computed or {})
            collect(part)
        self.errors = {
            **self._activations.relative(0.0),
            **self._signals.relative(ENTRY_FLOOR),
            **self._gradients.relative(ENTRY_FLOOR),
            "loss": abs(self.loss - expected_loss) / max(abs(expected_loss), LOSS_FLOOR),
        }
        if self.ours.routers is not None and self.reference.with_routers:
            expected = self.reference.routers[1]
            self.errors["losses of the routers"] = abs(self.ours.routers.total - expected) / expected
        self.expected_loss = expected_loss
        self.rounding = self._roundings.relative(NORM_FLOOR)
        self.rounding_limits = dict.fromkeys(self.rounding, TOLERANCE[dtype])
        if any(error > TOLERANCE[dtype] for error in self.rounding.values()):
            explained = self._errors_by_rounding(dtype, seed)
            self.rounding_limits |= {
                name: max(x, explained[name]) for name, x in self.rounding_limits.items() if self.rounding[name] > x
            }

    def _compare(self, part: Part, activations: set[str], computed: Mapping[str, Tensor]) -> None:
        """Compare a part of the reference with what the formulas and the model computed."""
        for name, value in part.values.items():
            if name in activations:
                self._add(self._activations, name, self.ours.get(name), value)
        for name, delta in part.deltas.items():
            self._add(self._signals, name, self.ours.get(name), delta)
            if name in computed:
                self._roundings.add(name, computed[name], delta, norm=True)
        for name, grad in part.grads.items():
            self._add(self._gradients, name, self.ours.gradient(name, part.rows), grad, part.rows)

    def _add(
        self, errors: TensorErrors, name: str, ours: Tensor | None, expected: Tensor, rows: slice | None = None
    ) -> None:
        start = 0 if rows is None else rows.start
        self.shapes[name] = (start + len(expected), *expected.shape[1:])
        if ours is None:
            self.absent.add(name)
        errors.add(name, torch.full_like(expected, math.nan) if ours is None else ours, expected)

    def _errors_by_rounding(self, dtype: torch.dtype, seed: int) -> dict[str, float]:
        """The largest relative error that rounding in this dtype explains, by the name of the error signal."""
        reference, found, change = self.reference, TensorErrors(), self._rounder(dtype, seed)
        for exact, *samples in reference.signals([None, *[change] * SAMPLES]):
            for sample in samples:
                for name, delta in sample.items():
                    found.add(name, delta, exact[name], norm=True)
        return {name: MARGIN * error for name, error in found.relative(NORM_FLOOR).items()}

    def gradient_errors_by_rounding(self, dtype: torch.dtype, seed: int) -> dict[str, float]:
        """The same of the gradients, by the name of the parameter."""
        reference, found, change = self.reference, TensorErrors(), self._rounder(dtype, seed)
        for _ in range(SAMPLES):
            for exact, sample in zip(reference.parts(), reference.parts(change), strict=True):
                for name, grad in exact.grads.items():
                    found.add(name, sample.grads[name], grad, norm=True)
        return {name: MARGIN * error for name, error in found.relative(NORM_FLOOR).items()}

    def _rounder(self, dtype: torch.dtype, seed: int) -> Callable[[Tensor], Tensor]:
        model = self.reference.model
        size = rounding_size(model.config, len(self.reference.ids), dtype)
        return rounder(size, torch.Generator(model.device).manual_seed(seed))

    # ── single results ──────────────────────────────────────────────────────────────────────────────────────────────

    def gradient(self, name: str) -> Tensor:
        """The gradient of a parameter, as the formulas compute it."""
        found = self.ours.gradient(name)
        if found is None:
            raise KeyError(name)
        return found

    def difference(self, signal: str) -> float:
        """Error of a signal by finite differences of the loss along a random direction."""
        claimed = self.ours[signal]
        name = signal.replace("delta_", "a_")
        first = int(signal.split(".")[1]) if signal.startswith("blocks.") else self.reference.model.config.n_blocks
        f = lambda x: self.reference.loss_with(name, x, first)  # noqa: E731
        floor = DIFFERENCE_FLOOR * self._signals.largest_norm
        return directional_error(f, torch.zeros_like(claimed), claimed, self._generator, floor, self.steps)

    def can_differentiate(self, name: str) -> bool:
        """Whether finite differences of a parameter can be taken: a block at a time not of the head and the embeddings."""
        return self.whole or self._layers.number_of(name) is not None

    def difference_of(self, names: Sequence[str]) -> float:
        """Error of the gradients of several parameters together, by finite differences along a random direction. A block at
        a time, they belong to one layer."""
        numbers = [self._layers.number_of(name) for name in names]
        first = None if None in numbers else min(i for i in numbers if i is not None)
        layer, parameters = None, dict(self.reference.model.named_parameters())
        claimed = concatenate([self.gradient(name) for name in names])
        if not self.whole:
            if first is None or {*numbers} != {first}:
                raise HandgradError("a block at a time, finite differences are taken of the parameters of one layer")
            layer = self._layers.layer(first)
            parameters = self._layers.parameters(first, layer)
        members = [parameters[name] for name in names]
        changed = layer or self.reference.model
        floor = DIFFERENCE_FLOOR * self._gradients.largest_norm
        with (
            torch.no_grad(),
            loss_of(changed, members, lambda: self.reference.loss(first=first, layer=layer).item()) as (f, at),
        ):
            return directional_error(f, at, claimed, self._generator, floor, self.steps)


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """All entries in one vector: of one tensor its own, not copied."""
    rows = [x.detach().reshape(-1) for x in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


@contextmanager
def loss_of(
    changed: nn.Module, members: list[nn.Parameter], loss: Callable[[], float]
) -> Iterator[tuple[Callable[[Tensor], float], Tensor]]:
    """Within the context, the loss as a function of these parameters of a module, concatenated, and their values; then they
    are restored.

    DoRA's gradients take its column norms c as constants. So that the loss does as well, magnitudes are multiplied by
    c / c_0 where c has changed: m / c is then m / c_0."""
    adapters: list[Any] = [x for x in changed.modules() if getattr(x, "magnitude", None) is not None]
    held = [(x, x.magnitude.clone(), x.column_norms()) for x in adapters]
    before = torch.cat([p.detach().reshape(-1) for p in members])

    def put(values: Tensor) -> None:
        for p, part in zip(members, torch.split(values, [p.numel() for p in members]), strict=True):
            p.data.copy_(part.view_as(p))

    def f(values: Tensor) -> float:
        for adapter, magnitude, _ in held:
            adapter.magnitude.data.copy_(magnitude)
        put(values)
        for adapter, _, norms in held:
            adapter.magnitude.data.mul_(adapter.column_norms() / norms)
        return loss()

    try:
        yield f, before
    finally:
        for adapter, magnitude, _ in held:
            adapter.magnitude.data.copy_(magnitude)
        put(before)

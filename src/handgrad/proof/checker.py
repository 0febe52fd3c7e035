"""`Checker`: the checks of `verify` one name at a time, for a page that shows single results."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..model.gpt import GPT
from ..model.objective import MEAN_LOSS, Objective
from ..tolerances import DIFFERENCE_FLOOR, NORM_FLOOR, TOLERANCE
from .oracles import directional_error, relative_error
from .paths import gradients_of
from .reference import Reference, ReferenceModel, float64_copy, in_float64
from .rounding import MARGIN, SAMPLES, rounder, rounding_size
from .verify import (
    check_verifiable,
    concatenate,
    difference_steps,
    entry_floor,
    largest_norm,
    loss_error,
    loss_of,
    norm_error,
)


class Checker:
    """Check one model on one batch. The constructor runs autograd for everything at once, in float64; finite differences
    run on request.

    errors     relative errors, by the trace's names of activations and signals and the model's names of parameters
    rounding   errors of `computed`, the signals that the model computed in its own dtype
    rounding_limits   the largest such errors allowed: the tolerance of the dtype; where that is exceeded, what rounding
               explains, if that is more
    in_place   convert the model itself to float64 instead of a copy
    pause      called before every intermediate; it may block
    """

    def __init__(
        self,
        model: GPT,
        tokens: Tensor,
        targets: Tensor,
        computed: Mapping[str, Tensor] | None = None,
        *,
        objective: Objective = MEAN_LOSS,
        seed: int = 0,
        in_place: bool = False,
        pause: Callable[[], None] = lambda: None,
    ):
        check_verifiable(model)
        dtype = model.dtype
        wide = in_float64(model) if in_place else float64_copy(model)
        self.ours: dict[str, Tensor] = {}

        def record(name: str, value: Tensor) -> None:
            pause()
            self.ours[name] = value

        self.loss, self.grads = gradients_of(
            wide, tokens, targets, None, record=record, all_signals=True, objective=objective
        )
        self._reference = ReferenceModel(wide, tokens, targets, None, objective)
        self._reference.pause = pause
        expected = self._reference.differentiate()
        self.limit = TOLERANCE[torch.float64]
        self.steps, self.difference_limit = difference_steps(model.config)
        self._generator = torch.Generator(model.device).manual_seed(seed)
        self._signal_floor = DIFFERENCE_FLOOR * largest_norm(x for n, x in self.ours.items() if n in expected.deltas)
        self._grad_floor = DIFFERENCE_FLOOR * largest_norm(self.grads.values())
        self.errors: dict[str, float] = {}
        self.rounding: dict[str, float] = {}
        floor, norm_floor = entry_floor(expected.deltas), NORM_FLOOR * largest_norm(expected.deltas.values())
        for name, signal in expected.deltas.items():
            self.errors[name] = relative_error(self.ours[name], signal, floor) if name in self.ours else math.inf
            if computed is not None and name in computed:
                self.rounding[name] = norm_error(computed[name], signal, norm_floor)
        self.rounding_limits = dict.fromkeys(self.rounding, TOLERANCE[dtype])
        if any(error > TOLERANCE[dtype] for error in self.rounding.values()):
            explained = self._errors_by_rounding(expected, dtype, norm_floor, seed)
            self.rounding_limits |= {
                name: max(x, explained[name]) for name, x in self.rounding_limits.items() if self.rounding[name] > x
            }
        for name, value in expected.values.items():
            if (a := name.replace("delta_", "a_")) in self.ours:
                self.errors[a] = relative_error(self.ours[a], value)
        floor = entry_floor(expected.grads)
        for name, grad in self.grads.items():
            self.errors[name] = relative_error(grad, expected.grads[name], floor)
        self.errors["loss"] = loss_error(self.loss, expected)

    def _errors_by_rounding(self, expected: Reference, dtype: torch.dtype, floor: float, seed: int) -> dict[str, float]:
        """The largest relative error that rounding in this dtype explains, by the name of the error signal."""
        reference, config = self._reference, self._reference.model.config
        generator = torch.Generator(reference.model.device).manual_seed(seed)
        reference.inside = change = rounder(rounding_size(config, len(reference.ids), dtype), generator)
        found = dict.fromkeys(expected.deltas, 0.0)
        for _ in range(SAMPLES):
            sample = reference.differentiate(change)
            for name, signal in expected.deltas.items():
                found[name] = max(found[name], MARGIN * norm_error(sample.deltas[name], signal, floor))
        reference.inside = None
        return found

    @property
    def trained(self) -> dict[str, int]:
        """Sizes of the trainable parameters by name."""
        return {name: grad.numel() for name, grad in self.grads.items()}

    def gradient(self, name: str) -> Tensor:
        return self.grads[name]

    def difference(self, signal: str) -> float:
        """Error of a signal by finite differences of the loss along a random direction."""
        at, claimed = torch.zeros_like(self.ours[signal]), self.ours[signal]
        f = lambda x: self._reference.loss_with(signal, x)  # noqa: E731
        return directional_error(f, at, claimed, self._generator, self._signal_floor, self.steps)

    def can_differentiate(self, name: str) -> bool:
        """Whether finite differences of a parameter can be taken: always."""
        return True

    def difference_of(self, names: Sequence[str]) -> float:
        """Error of several parameters' gradients together, by finite differences along a random direction."""
        parameters = dict(self._reference.model.named_parameters())
        members = [parameters[name] for name in names]
        at, claimed = concatenate(members), concatenate([self.grads[name] for name in names])
        f = loss_of(members, self._reference.plain_loss)
        try:
            return directional_error(f, at, claimed, self._generator, self._grad_floor, self.steps)
        finally:
            f(at)  # restores the parameters

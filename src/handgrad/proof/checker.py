"""The verdict name by name, for whoever shows single results. Its tools are those of `verify`, autograd among them."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..model.gpt import GPT
from .oracles import TOLERANCE, directional_error, relative_error
from .paths import gradients_of
from .reference import Twin, made_wide, wide_copy
from .verify import check_judgeable, difference_steps, largest, loss_of, norm_error


class Judge:
    """One model on one batch, judged name by name: for whoever shows single verdicts.

    Autograd judges everything at once, in float64; kept are the relative errors, by the trace's names of activations and
    signals and the model's names of parameters. Finite differences are taken when they are asked for.

    `computed` is what the model has computed in its own dtype; its errors are in `rounding`. With `own` the model is the
    judge's to change, and no copy is made. `pause` is called again and again on the way, and may take its time.
    """

    def __init__(
        self,
        model: GPT,
        tokens: Tensor,
        targets: Tensor,
        computed: Mapping[str, Tensor] | None = None,
        *,
        seed: int = 0,
        own: bool = False,
        pause: Callable[[], None] = lambda: None,
    ):
        check_judgeable(model)
        dtype = model.transformer.wte.weight.dtype
        wide = made_wide(model) if own else wide_copy(model)
        self.ours: dict[str, Tensor] = {}

        def record(name: str, value: Tensor) -> None:
            pause()
            self.ours[name] = value

        self.loss, self.grads = gradients_of(wide, tokens, targets, None, record=record, all_signals=True)
        self._twin = Twin(wide, tokens, targets, None)
        self._twin.pause = pause
        truth = self._twin.run()
        self.limit = TOLERANCE[torch.float64]
        self.rounding_limit = TOLERANCE[dtype]
        self.steps, self.difference_limit = difference_steps(model.config)
        self._generator = torch.Generator(model.transformer.wte.weight.device).manual_seed(seed)
        self._floors = (
            1e-3 * max(x.norm().item() for name, x in self.ours.items() if name in truth.deltas),
            1e-3 * max(x.norm().item() for x in self.grads.values()),
        )
        self.errors: dict[str, float] = {}
        self.rounding: dict[str, float] = {}
        floor, widest = 1e-4 * largest(truth.deltas), 1e-2 * max(x.norm().item() for x in truth.deltas.values())
        for name, signal in truth.deltas.items():
            self.errors[name] = relative_error(self.ours[name], signal, floor) if name in self.ours else math.inf
            if computed is not None and name in computed:
                self.rounding[name] = float(norm_error(computed[name], signal, widest)())  # type: ignore[arg-type]
        for name, value in truth.values.items():
            if (a := name.replace("delta_", "a_")) in self.ours:
                self.errors[a] = relative_error(self.ours[a], value)
        floor = 1e-4 * largest(truth.grads)
        for name, grad in self.grads.items():
            self.errors[name] = relative_error(grad, truth.grads[name], floor)
        self.errors["loss"] = abs(self.loss - truth.loss) / max(abs(truth.loss), 1e-3)

    def difference(self, signal: str) -> float:
        """The error of a signal along a random direction, by finite differences of the loss."""
        at, claimed = torch.zeros_like(self.ours[signal]), self.ours[signal]
        f = lambda x: self._twin.nudged(signal, x)  # noqa: E731
        return directional_error(f, at, claimed, self._generator, self._floors[0], self.steps)

    def difference_of(self, names: Sequence[str]) -> float:
        """The same for some parameters together."""
        parameters = dict(self._twin.model.named_parameters())
        members = [parameters[name] for name in names]
        at = torch.cat([p.detach().reshape(-1) for p in members])
        claimed = torch.cat([self.grads[name].reshape(-1) for name in names])
        f = loss_of(members, self._twin.unchanged)
        try:
            return directional_error(f, at, claimed, self._generator, self._floors[1], self.steps)
        finally:
            f(at)  # puts the parameters back

"""The optimizer inside the backward pass: each layer is updated as soon as its gradients are final, which are then freed.

The optimizers are torch's. The gradients of all layers never exist together, so their memory shrinks from one copy of the
model to its largest layer, and a tied embedding, whose gradient is final last. Clipping by the global norm stays exact: a
first backward pass measures the norm before anything is updated, and a second one updates.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import HandgradError, NonFiniteError
from ..model.gpt import GPT, ForwardState
from ..model.passes.example_gradients import ExampleNorms
from ..model.passes.options import Finished, PassOptions, no_hook
from ..model.passes.router_losses import RouterLosses
from .optimizers import clip_factor, length, norm, step


class OptimizerInBackward:
    """optimizer = OptimizerInBackward(model, lambda p: torch.optim.AdamW(p, lr=3e-4), clip=1.0)
    loss = optimizer.step(tokens, targets)

    clip        largest global norm of the gradient; measuring it costs a second backward pass (None or 0: no clipping)
    recompute   "blocks": save only each block's input and recompute the block in the backward pass
    share       compute prefixes that sequences have in common once
    """

    def __init__(
        self,
        model: GPT,
        make: Callable[[list[nn.Parameter]], Optimizer],
        clip: float | None = None,
        recompute: str = "blocks",
        combine: Finished = no_hook,
        share: bool = False,
    ):
        if clip is not None and not (type(clip) in (int, float) and clip >= 0):
            raise HandgradError(f"clip must be a number of at least 0, or None for no clipping, not {clip!r}")
        self.model = model
        self.combine = combine  # sums the gradients of several processes before they are used
        self.clip = clip
        self.recompute = recompute
        self.share = share
        self.optimizers: dict[nn.Parameter, Optimizer] = {}  # by each parameter of a layer
        for layer in model.layers():
            trained = [p for p in layer if p.requires_grad]
            if trained:
                optimizer = make(trained)
                self.optimizers |= dict.fromkeys(trained, optimizer)
        self.norm = math.nan  # of the last gradient, if it was measured

    @torch.no_grad()
    def step(
        self,
        tokens: Tensor,
        targets: Tensor,
        lengths: list[int] | None = None,
        n_targets: int | None = None,
        seed: int | None = None,
        examples: ExampleNorms | None = None,
        routers: RouterLosses | None = None,
    ) -> float:
        """One step on the batch, which may be large: it is processed in pieces. `n_targets` is the number of targets of all
        processes together; `seed`, `examples` and `routers` as in `GPT.loss_and_grads`."""
        if examples is not None and not examples.grads:
            raise HandgradError(
                "examples=ExampleNorms() fills no gradient to update with: give ExampleNorms(grads=True)"
            )
        model = self.model
        options = PassOptions(
            recompute=self.recompute, seed=seed, examples=examples, routers=routers, share=self.share
        )  # fmt: skip
        work = model.prepare(model.pack(tokens, lengths), targets, n_targets=n_targets, options=options)
        _free_gradients(model.parameters())  # drop gradients of an earlier call
        state = model.forward_pass(work, options)
        factor = 1.0
        if self.clip:
            norms: list[float] = []

            def measure(layer: list[nn.Parameter]) -> None:
                self.combine(layer)
                norms.extend(norm(p.grad) for p in layer if p.grad is not None)
                _free_gradients(layer)

            self._backward_pass(state._replace(examples=None), measure, once=False)
            self.norm = length(norms)
            if not math.isfinite(self.norm):
                raise NonFiniteError("the gradient is not finite")  # before anything is updated
            factor = clip_factor(self.norm, self.clip)

        def update(layer: list[nn.Parameter]) -> None:
            self.combine(layer)
            for optimizer in {self.optimizers[p] for p in layer if p in self.optimizers}:
                step(optimizer, factor)
            _free_gradients(layer)

        return self._backward_pass(state, update)

    def _backward_pass(self, state: ForwardState, finished: Finished, once: bool = True) -> float:
        try:
            return self.model.backward_pass(state, finished, once=once)
        except NonFiniteError:  # raised in the readout, before any layer is finished
            _free_gradients(self.model.parameters())
            raise

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """The groups of all layers, to set the learning rate in."""
        return [group for optimizer in set(self.optimizers.values()) for group in optimizer.param_groups]


def _free_gradients(layer: Iterable[nn.Parameter]) -> None:
    for p in layer:
        p.grad = None

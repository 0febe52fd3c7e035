"""The optimizer inside the backward pass: a layer is updated as soon as its gradients are final, and they are let go.

The optimizers themselves are torch's. The gradients of all layers never exist together, so the memory for them shrinks
from one copy of the model to its largest layer. Clipping by the global norm stays exact: the norm is measured on a way
up of its own, whose gradients are let go as well, before anything is updated.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import NonFiniteError
from .gpt import GPT, Finished, Kept


class OptimizerInBackward:
    """optimizer = OptimizerInBackward(model, lambda p: torch.optim.AdamW(p, lr=3e-4), clip=1.0)
    loss = optimizer.step(tokens, targets)

    clip        largest global norm of the gradient; measuring it costs a second way up
    recompute   "blocks": each block keeps only its input, and is computed again on the way up
    """

    def __init__(
        self,
        model: GPT,
        make: Callable[[list[nn.Parameter]], Optimizer],
        clip: float | None = None,
        recompute: str = "blocks",
    ):
        self.model = model
        self.clip = clip
        self.again = recompute == "blocks"
        self.optimizers: dict[nn.Parameter, Optimizer] = {}  # by each parameter of a layer
        for layer in model.layers():
            trained = [p for p in layer if p.requires_grad]
            if trained:
                optimizer = make(trained)
                self.optimizers |= dict.fromkeys(trained, optimizer)
        self.norm = math.nan  # of the last step's gradient, if it was measured

    @torch.no_grad()
    def step(self, tokens: Tensor, targets: Tensor, lengths: list[int] | None = None) -> float:
        """One step on the whole batch, however large: it is walked in pieces, and every gradient is that of all of them."""
        model = self.model
        pieces = model.pieces(tokens, targets, lengths)
        n_targets = sum(len(piece.targets) for piece in pieces)
        kept = model.down(pieces, again=self.again)
        factor = 1.0
        if self.clip is not None:
            squares: list[Tensor] = []

            def measure(layer: list[nn.Parameter]) -> None:
                squares.extend(p.grad.double().square().sum() for p in layer if p.grad is not None)
                _let_go(layer)

            self._up(kept, n_targets, measure, once=False)
            self.norm = math.sqrt(sum(x.item() for x in squares))
            factor = min(1.0, self.clip / (self.norm + 1e-6))  # as torch's clip_grad_norm_

        def update(layer: list[nn.Parameter]) -> None:
            if factor < 1:
                for p in layer:
                    if p.grad is not None:
                        p.grad.mul_(factor)
            for optimizer in {self.optimizers[p] for p in layer if p in self.optimizers}:
                optimizer.step()
            _let_go(layer)

        return self._up(kept, n_targets, update)

    def _up(self, kept: Kept, n_targets: int, finished: Finished, once: bool = True) -> float:
        try:
            return self.model.up(kept, n_targets, finished=finished, once=once)
        except NonFiniteError:  # it shows in the head, before any layer is finished
            _let_go(self.model.parameters())
            raise

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """Of all layers, for a schedule to write the learning rate into."""
        return [group for optimizer in set(self.optimizers.values()) for group in optimizer.param_groups]


def _let_go(layer: Iterable[nn.Parameter]) -> None:
    for p in layer:
        p.grad = None

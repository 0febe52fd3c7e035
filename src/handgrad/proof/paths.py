"""Every way `GPT` can compute its gradients: with a recorder, and the code paths of training."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..model.example_gradients import ExampleNorms
from ..model.gpt import GPT
from ..optim import OptimizerInBackward

Gradients = tuple[float, dict[str, Tensor]]  # the loss, and the gradients by parameter name
Run = Callable[[], Gradients]


def gradients_of(model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None, **options: Any) -> Gradients:
    """Loss and hand-derived gradient of every trainable parameter; NaN where none was computed, so that its check fails."""
    model.zero_grad()
    loss = model.loss_and_grads(tokens, targets, lengths, **options)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = {name: torch.full_like(p, math.nan) if p.grad is None else p.grad for name, p in trained.items()}
    model.zero_grad()  # the caller owns them now
    return loss, grads


def training_paths(model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None) -> dict[str, Run]:
    """The code paths of training, by name. Unlike a pass with all signals they skip rows without a target in the last
    block, split the batch into pieces, recompute blocks, or update a layer as soon as its gradients are final. A
    recorder must not change what they compute."""

    def path(**options: Any) -> Run:
        return lambda: gradients_of(model, tokens, targets, lengths, **options)

    paths = {
        "gradients, one pass": path(),
        "gradients, with a recorder": path(record=_discard),
        "gradients, recomputed blocks": path(recompute="blocks"),
        "gradients, with norms of examples": path(examples=ExampleNorms(grads=True)),
    }
    if len(model.pack(tokens, lengths).lengths) > 1:
        paths |= {
            "gradients, in pieces": path(tokens_at_once=1),
            "gradients, in pieces, recomputed blocks": path(tokens_at_once=1, recompute="blocks"),
        }
    inside = lambda: _gradients_for_optimizer(model, tokens, targets, lengths)  # noqa: E731
    return paths | {"gradients, optimizer in backward": inside}


def _discard(name: str, value: Tensor) -> None:
    """A recorder that stores nothing. Unlike `no_record`, the model calls it."""


def _gradients_for_optimizer(model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None) -> Gradients:
    """The gradients that the optimizer in the backward pass receives."""
    names = {p: name for name, p in model.named_parameters()}
    received: dict[str, Tensor] = {}

    def collect(layer: list[nn.Parameter]) -> None:
        received.update({names[p]: p.grad for p in layer if p.grad is not None})

    optimizer = OptimizerInBackward(model, lambda p: torch.optim.SGD(p, lr=0.0), clip=math.inf, combine=collect)
    return optimizer.step(tokens, targets, lengths), received

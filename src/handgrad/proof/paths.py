"""The paths by which gradients are computed: with a recorder, and the several that training takes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..model.gpt import GPT
from ..optim import OptimizerInBackward

Gradients = tuple[float, dict[str, Tensor]]  # the loss, and the gradients by the name of their parameter
Run = Callable[[], Gradients]


def gradients_of(model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None, **options: Any) -> Gradients:
    """The loss and the hand-derived gradient of every trainable parameter. A missing one is left NaN: it must fail."""
    model.zero_grad()
    loss = model.loss_and_grads(tokens, targets, lengths, **options)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = {name: torch.full_like(p, math.nan) if p.grad is None else p.grad for name, p in trained.items()}
    model.zero_grad()  # they belong to the caller now
    return loss, grads


def training_paths(model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None) -> dict[str, Run]:
    """What training runs instead of a recorded pass: rows without a target are skipped in the last block, sequences are
    walked in pieces, blocks are computed again, a layer is updated as soon as its gradients are final."""

    def plain(**options: Any) -> Run:
        return lambda: gradients_of(model, tokens, targets, lengths, **options)

    paths = {"gradients in one pass": plain(), "gradients, blocks computed again": plain(recompute="blocks")}
    if len(model.pack(tokens, lengths).lengths) > 1:
        paths |= {
            "gradients in pieces": plain(tokens_at_once=1),
            "gradients in pieces, blocks computed again": plain(tokens_at_once=1, recompute="blocks"),
        }
    return paths | {"gradients for the optimizer inside": lambda: _gradients_inside(model, tokens, targets, lengths)}


def _gradients_inside(model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None) -> Gradients:
    """The gradients that the optimizer inside the backward pass is handed for its step."""
    names = {p: name for name, p in model.named_parameters()}
    seen: dict[str, Tensor] = {}

    def keep(layer: list[nn.Parameter]) -> None:
        seen.update({names[p]: p.grad for p in layer if p.grad is not None})

    optimizer = OptimizerInBackward(model, lambda p: torch.optim.SGD(p, lr=0.0), clip=math.inf, combine=keep)
    return optimizer.step(tokens, targets, lengths), seen

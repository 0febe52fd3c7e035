"""Logits of a wrapped model that carry gradients, for a loss of your own: the backward pass begins with the error signal of
the logits, Δ_12, that autograd hands over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import HandgradError
from ..model.batch import split
from ..model.gpt import GPT, ForwardState
from ..model.objective import Objective
from ..model.passes import PLAIN
from ..model.readout import row_groups
from .functions import first_derivative


def gradients_of(parameters: Sequence[Tensor], compute: Callable[[], float]) -> tuple[float, list[Tensor]]:
    """What `compute` returns, and the gradients that it adds into `.grad`, which afterwards is what it was."""
    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        value = compute()
        return value, [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


@dataclass(frozen=True)
class GivenSignal(Objective):
    """Δ_12 comes from elsewhere. The targets are numbers of its rows."""

    delta: Tensor

    def forward_and_delta(self, logits: Tensor, targets: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        return logits.new_zeros(()), self.delta[targets]  # the value is elsewhere too


class LogitsFunction(Function):
    """(n) ids of sequences packed end to end → (n, V); its inputs are the trainable parameters."""

    @staticmethod
    def forward(ctx: Any, model: GPT, tokens: Tensor, lengths: list[int], recompute: bool, *parameters: Any) -> Tensor:
        every_row = torch.arange(len(tokens), device=tokens.device)
        pieces = split(model.pack(tokens, lengths), every_row, model.tokens_at_once(), model.dropout_seed(None))
        state = model.forward_pass(pieces, recompute=recompute)
        ctx.model, ctx.state, ctx.parameters = model, state, parameters
        ctx.save_for_backward(*parameters)  # torch then refuses a backward pass after the weights have changed
        return _logits(model, state)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.state is None:
            raise HandgradError(
                "the activations are freed by the first backward(): give it retain_graph=True, or compute the logits again"
            )
        _ = ctx.saved_tensors
        state, once = ctx.state, not _graph_is_kept()
        if once:
            ctx.state = None
        compute = partial(ctx.model.backward_pass, state, 1, once=once, objective=GivenSignal(delta))
        _, grads = gradients_of(ctx.parameters, compute)
        return None, None, None, None, *grads


def _graph_is_kept() -> bool:
    """Whether this is backward(retain_graph=True); False where torch does not tell."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is not None and bool(ask())


def _logits(model: GPT, state: ForwardState) -> Tensor:
    """The logits of every row, in the groups of rows, and with the dropout, of the backward pass."""
    found = []
    with model.unpacked(model.head):
        for piece, a_10 in zip(state.pieces, state.a_10, strict=True):
            a_11 = model.final_norm.forward(a_10)[0]
            for rows in row_groups(len(a_11), model.head):
                seed = None if piece.dropout_seed is None else piece.dropout_seed + rows.start
                found.append(model.head.forward(a_11[rows], PLAIN._replace(dropout_seed=seed)))
    return model.check_finite(torch.cat(found))

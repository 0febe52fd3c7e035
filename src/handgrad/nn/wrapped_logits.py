"""Logits and last hidden states of a wrapped model that carry gradients, for a loss of your own: the backward pass begins
with the error signal that autograd hands over, Δ_12 of the logits or Δ_11 of the hidden states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import HandgradError
from ..model.gpt import GPT, ForwardState, Work
from ..model.inspect.trace import own_gradients
from ..model.passes.arguments import PLAIN
from ..model.passes.objective import MEAN_LOSS, TEXT_LOSS, Objective, TargetRows
from ..model.passes.options import DEFAULTS, PassOptions
from ..model.passes.readout import row_groups
from .functions import first_derivative


class Packed(NamedTuple):
    """The tokens of a batch without its padding, sequences end to end."""

    tokens: Tensor  # (n)
    lengths: list[int]
    rows: Tensor  # (n)   where they are in the batch
    positions: Tensor | None  # (n)   None: from 0 in each sequence


def options_of(recompute: bool) -> PassOptions:
    return PassOptions(recompute="blocks" if recompute else "none")


def prepare(
    model: GPT,
    packed: Packed,
    targets: Tensor,
    n_targets: int | None = None,
    options: PassOptions = DEFAULTS,
    objective: Objective = MEAN_LOSS,
) -> Work:
    """`GPT.prepare`, for positions that do not begin at 0 as well."""
    batch = model.pack(packed.tokens, packed.lengths)
    if packed.positions is not None:
        batch = batch._replace(positions=packed.positions.to(batch.positions))
    return model.prepare(batch, targets, objective, n_targets, options)


def gradients_of(parameters: Sequence[Tensor], compute: Callable[[], float]) -> tuple[float, list[Tensor]]:
    """What `compute` returns, and the gradients that it adds into `.grad`, which afterwards is what it was."""
    with own_gradients(parameters):
        value = compute()
        return value, [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


@dataclass(frozen=True)
class GivenSignal(Objective):
    """Δ_12 comes from elsewhere, and so does the value."""

    needs_logits: ClassVar[bool] = False
    delta: Tensor  # (n, V)

    def forward_and_delta(self, logits: Tensor, at: TargetRows, weight: float) -> tuple[Tensor, Tensor]:
        return logits.new_zeros(()), self.delta[at.rows]


class End(NamedTuple):
    """Where a forward pass ends: what is read there, and where its error signal enters the backward pass."""

    value: Callable[[GPT, ForwardState], Tensor]
    backward: Callable[[GPT, ForwardState, Tensor, bool], float]
    without_gradients: Callable[[GPT, Packed], Tensor]


class EndFunction(Function):
    """(n) ids of sequences packed end to end → the logits (n, V) or a_11 (n, d); its inputs are the trainable parameters."""

    @staticmethod
    def forward(ctx: Any, end: End, model: GPT, packed: Packed, recompute: bool, *parameters: Any) -> Tensor:
        ctx.end, ctx.model, ctx.parameters = end, model, parameters
        ctx.state = model.forward_pass(every_row(model, packed), options_of(recompute))
        ctx.save_for_backward(*parameters)  # torch then refuses a backward pass after the weights have changed
        return end.value(model, ctx.state)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        state, once = _state_of(ctx)
        compute = partial(ctx.end.backward, ctx.model, state, delta, once)
        return None, None, None, None, *gradients_of(ctx.parameters, compute)[1]


def every_row(model: GPT, packed: Packed) -> Work:
    """The batch with a target in every row, which nothing reads; its value is not divided."""
    return prepare(model, packed, torch.zeros_like(packed.tokens), 1, objective=TEXT_LOSS)


def _state_of(ctx: Any) -> tuple[ForwardState, bool]:
    """What the forward pass has saved, and whether this is the last backward pass that reads it."""
    if ctx.state is None:
        raise HandgradError(
            "the activations are freed by the first backward(): give it retain_graph=True, or compute the logits again"
        )
    _ = ctx.saved_tensors
    state, once = ctx.state, not _graph_is_kept()
    if once:
        ctx.state = None
    return state, once


def _graph_is_kept() -> bool:
    """Whether this is backward(retain_graph=True); False where torch does not tell."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is not None and bool(ask())


def _hidden(model: GPT, state: ForwardState) -> Tensor:
    """a_11 of every row"""
    return model.check_finite(torch.cat([model.final_norm.forward(a_10)[0] for a_10 in state.a_10]))


def _from_hidden(model: GPT, state: ForwardState, delta: Tensor, once: bool) -> float:
    """Δ_11 of every row → the gradients of what is below the head"""
    deltas = []
    for a_10, delta_11 in zip(state.a_10, torch.split(delta.contiguous(), [len(x) for x in state.a_10]), strict=True):
        saved = model.final_norm.forward(a_10)[1]
        a_bar = model.final_norm.rebuild_output(saved)[0]
        deltas.append(model.final_norm.backward(delta_11, a_bar, saved, PLAIN))
    return model.backward_pass(state, once=once, delta_10=deltas)


def _state_without_gradients(model: GPT, packed: Packed) -> ForwardState:
    """a_10 of every row, and nothing for a backward pass."""
    return model.forward_pass(every_row(model, packed), lowest=len(model.blocks))


def _logits_without_gradients(model: GPT, packed: Packed) -> Tensor:
    if packed.positions is None:
        return model.logits(packed.tokens, packed.lengths)
    return _logits(model, _state_without_gradients(model, packed))


def _logits(model: GPT, state: ForwardState) -> Tensor:
    """The logits of every row, in the groups of rows, and with the dropout, of the backward pass."""
    found = []
    with model.weights(model.head) as weights:
        for piece, a_10 in zip(state.work.pieces, state.a_10, strict=True):
            a_11 = model.final_norm.forward(a_10, model.operand)[0]
            for rows in row_groups(len(a_11), model.head):
                run = PLAIN._replace(
                    dropout_seed=piece.dropout_seed, dropout_rows=(rows.start, len(a_11)), weights=weights
                )
                found.append(model.logit_map.forward(model.head.forward(a_11[rows], run)))
    return model.check_finite(torch.cat(found))


def _from_logits(model: GPT, state: ForwardState, delta: Tensor, once: bool) -> float:
    """Δ_12 of every row → the gradients of all"""
    given = state._replace(work=state.work._replace(objective=GivenSignal(delta)))
    return model.backward_pass(given, once=once)


LOGITS = End(_logits, _from_logits, _logits_without_gradients)
HIDDEN = End(_hidden, _from_hidden, lambda model, packed: _hidden(model, _state_without_gradients(model, packed)))

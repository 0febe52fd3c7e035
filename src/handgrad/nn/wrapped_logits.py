"""Logits and last hidden states of a wrapped model that carry gradients, for a loss of your own: the backward pass begins
with the error signal that autograd hands over, Δ_12 of the logits or Δ_11 of the hidden states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import HandgradError
from ..model.batch import Piece, check_targets, count_targets, split
from ..model.gpt import GPT, ForwardState
from ..model.objective import Objective
from ..model.passes import PLAIN
from ..model.readout import row_groups
from .functions import first_derivative


class Packed(NamedTuple):
    """The tokens of a batch without its padding, sequences end to end."""

    tokens: Tensor  # (n)
    lengths: list[int]
    rows: Tensor  # (n)   where they are in the batch
    positions: Tensor | None  # (n)   None: from 0 in each sequence


def pieces_of(model: GPT, packed: Packed, targets: Tensor) -> list[Piece]:
    """The batch in pieces of complete sequences."""
    batch = model.pack(packed.tokens, packed.lengths)
    if packed.positions is not None:
        batch = batch._replace(positions=packed.positions.to(batch.positions))
    return split(batch, targets, model.tokens_at_once(), model.dropout_seed(None))


def loss_and_grads(
    model: GPT, packed: Packed, targets: Tensor, *, n_targets: int | None = None, recompute: bool = False
) -> float:
    """`GPT.loss_and_grads`, for positions that do not begin at 0 as well."""
    if packed.positions is None:
        how = "blocks" if recompute else "none"
        return model.loss_and_grads(packed.tokens, targets, packed.lengths, n_targets=n_targets, recompute=how)
    pieces = pieces_of(model, packed, check_targets(packed.tokens, targets, model.config, model.device))
    n_targets = count_targets(pieces, n_targets)
    windows = [pieces] if recompute or model.packed else [[piece] for piece in pieces]
    return sum(model.backward_pass(model.forward_pass(window, recompute=recompute), n_targets) for window in windows)


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
    def forward(ctx: Any, model: GPT, packed: Packed, recompute: bool, *parameters: Any) -> Tensor:
        _run(ctx, model, packed, recompute, parameters)
        return _logits(model, ctx.state)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        state, once = _state_of(ctx)
        compute = partial(ctx.model.backward_pass, state, 1, once=once, objective=GivenSignal(delta))
        return None, None, None, *gradients_of(ctx.parameters, compute)[1]


class HiddenFunction(Function):
    """(n) ids of sequences packed end to end → a_11 (n, d); its inputs are the trainable parameters below the head."""

    @staticmethod
    def forward(ctx: Any, model: GPT, packed: Packed, recompute: bool, *parameters: Any) -> Tensor:
        _run(ctx, model, packed, recompute, parameters)
        return hidden(model, ctx.state)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        state, once = _state_of(ctx)
        model, sizes = ctx.model, [len(a_10) for a_10 in state.a_10]

        def compute() -> float:
            deltas = []
            for a_10, delta_11 in zip(state.a_10, torch.split(delta.contiguous(), sizes), strict=True):
                saved = model.final_norm.forward(a_10)[1]
                a_bar = model.final_norm.rebuild_output(saved)[0]
                deltas.append(model.final_norm.backward(delta_11, a_bar, saved, PLAIN))
            return model.backward_pass(state, 1, once=once, delta_10=deltas)  # type: ignore[no-any-return]

        return None, None, None, *gradients_of(ctx.parameters, compute)[1]


def _run(ctx: Any, model: GPT, packed: Packed, recompute: bool, parameters: tuple[Any, ...]) -> None:
    """Compute a_10 of every row, and save what the backward pass needs."""
    pieces = pieces_of(model, packed, torch.arange(len(packed.tokens), device=packed.tokens.device))
    ctx.model, ctx.parameters = model, parameters
    ctx.state = model.forward_pass(pieces, recompute=recompute)
    ctx.save_for_backward(*parameters)  # torch then refuses a backward pass after the weights have changed


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


def hidden(model: GPT, state: ForwardState) -> Tensor:
    """a_11 of every row"""
    return model.check_finite(torch.cat([model.final_norm.forward(a_10)[0] for a_10 in state.a_10]))


def state_without_gradients(model: GPT, packed: Packed) -> ForwardState:
    """a_10 of every row, and nothing for a backward pass."""
    pieces = pieces_of(model, packed, torch.arange(len(packed.tokens), device=packed.tokens.device))
    return model.forward_pass(pieces, lowest=len(model.blocks))


def logits_without_gradients(model: GPT, packed: Packed) -> Tensor:
    """(n, V)"""
    if packed.positions is None:
        return model.logits(packed.tokens, packed.lengths)
    return _logits(model, state_without_gradients(model, packed))


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

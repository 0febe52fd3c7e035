"""The readout: final norm, logits layer and loss, forward and backward at once.

    a_10 → a_11 norm → a_12 logits → loss;   Δ_12 = y_pred − y_gt → Δ_11 → Δ_10

Some models scale or cap a_12 first (`ops/logits.py`): the objective reads the result.

The rows are processed in groups, so that the logits of all rows never exist together.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import loss, per_example
from ...ops.logits import LogitMap
from ..layers.linear import Affine
from ..layers.norms import Norm
from .arguments import PLAIN, Pass
from .batch import Piece
from .example_gradients import PieceExamples
from .objective import Objective, RowObjective, TargetRows

LOGITS_AT_ONCE = 1 << 25  # most entries of the logits matrix that exist at any time; with fewer its products slow down
FROZEN_ROWS = 128  # of a frozen head: products of fewer rows slow down, and packed weights are unpacked for each group


def rows_at_once(n_vocab: int, head_trains: bool) -> int:
    """Rows of a group. A trained head reads and writes its gradient once per group; a frozen one has no such cost, so its
    groups are smaller."""
    most = max(1, LOGITS_AT_ONCE // n_vocab)
    return most if head_trains else max(most // 4, min(most, FROZEN_ROWS))


def row_groups(n: int, head: Affine) -> list[slice]:
    """n rows in groups of equal size, at most `rows_at_once` each."""
    n_vocab = sum(head.plain().widths)
    most = rows_at_once(n_vocab, _trains(head))
    size = math.ceil(n / math.ceil(n / most))
    return [slice(start, start + size) for start in range(0, n, size)]


def _trains(head: Affine) -> bool:
    return any(p.requires_grad for p in head.parameters())


class Ending(NamedTuple):
    """The end of a network: what follows the last block."""

    norm: Norm
    head: Affine
    logits: LogitMap
    check_finite: Callable[[Tensor], Tensor]


def readout(
    end: Ending, a_10: Tensor, piece: Piece, objective: Objective, weight: float, run: Pass
) -> tuple[float, Tensor]:
    """a_10 → the summed objective of the piece and Δ_10; gradients are added into `.grad`. Δ_12 is multiplied by `weight`,
    1/(number of targets)."""
    if run.edited:
        value, delta_12, saved = forward_at_once(end, a_10, piece, objective, weight, run)
        return value, _backward_at_once(end, delta_12, saved, run)
    a_11, norm_10 = end.norm.forward(a_10, run.operand)
    run.note_statistics(end.norm.statistics, norm_10, "10")
    total, delta_11 = _in_groups(end, a_11, piece, objective, weight, run)
    delta_11 = run.at("delta_11", delta_11)
    a_bar_10, _ = end.norm.rebuild_output(norm_10)
    return total, end.norm.backward(delta_11, a_bar_10, norm_10, PLAIN._replace(examples=run.examples))


def _in_groups(
    end: Ending, a_11: Tensor, piece: Piece, objective: Objective, weight: float, run: Pass
) -> tuple[float, Tensor]:
    """a_11 → the summed objective, and Δ_11 of every row. If examples are measured, the groups of rows are complete ones."""
    head, examples = end.head, run.examples
    at = piece.rows_of(len(a_11))  # rows without a target come here only if all signals are wanted
    with_target = a_11 if at is None else a_11[at]
    delta_11 = torch.empty_like(with_target, dtype=head.plain().dtype)
    total = 0.0
    logits, deltas, losses = [], [], []
    groups: list[tuple[slice, PieceExamples | None]]
    if examples is not None and _trains(head):
        groups = [*examples.groups(rows_at_once(sum(head.plain().widths), True))]
    else:
        groups = [(rows, None) for rows in row_groups(len(piece.targets), head)]
    # one buffer for all groups: freed and allocated for each, it would fragment memory
    largest = max(rows.stop - rows.start for rows, _ in groups)
    buffer = delta_11.new_empty(largest, sum(head.plain().widths))
    c: Tensor | None = None  # of an objective that reads the probabilities of all rows before it knows any Δ_12
    if isinstance(objective, RowObjective) and len(piece.targets):
        plain = PLAIN._replace(dropout_seed=piece.dropout_seed, weights=run.weights, operand=run.operand)
        log_p = log_probabilities(end, with_target, piece.targets, plain)
        value, c = objective.coefficients(log_p, piece.numbered)
        total = end.check_finite(value).item()
    for rows, its_examples in groups:
        a = with_target[rows]
        # one mask for all rows: it must not depend on the groups, which differ if examples are measured
        its_run = PLAIN._replace(
            dropout_seed=piece.dropout_seed, dropout_rows=(rows.start, len(piece.targets)), examples=its_examples,
            weights=run.weights, operand=run.operand,
        )  # fmt: skip
        a_12 = buffer[: len(a)]
        if objective.needs_logits or end.logits.cap is not None or run.observer is not None:
            a_12 = head.forward(a, its_run, a_12)
        if run.observer is not None:
            logits.append(a_12.clone())
        y = end.logits.forward(a_12)
        if examples is not None and examples.gradients.needs_losses:
            losses.append(per_example.row_losses(y, piece.targets[rows]))
        read = y if end.logits.cap is None else y.clone()
        if c is None:
            summed, delta = objective.forward_and_delta(read, target_rows(piece, rows), weight)
            total += end.check_finite(summed).item()
        else:
            delta = loss.weighted_delta(read, piece.targets[rows], weight * c[rows])
        delta_12 = end.logits.backward(delta, y)
        upstream = head.upstream(delta_12, its_run)
        delta_11[rows] = head.backward(delta_12, its_run, None, upstream)
        head.accumulate(delta_12, a, its_run, upstream)
        if run.observer is not None:
            deltas.append(delta_12.clone())
    if examples is not None and losses:
        examples.losses(torch.cat(losses))
    if run.observer is not None:
        a_12 = torch.cat(logits) if at is None else head.forward(a_11, PLAIN._replace(weights=run.weights))
        delta_12 = torch.cat(deltas)
        if at is not None:
            delta_12 = torch.zeros_like(a_12).index_add_(0, at, delta_12)
        y_pred = torch.softmax(end.logits.forward(a_12.clone()), 1)
        for name, x in {"a_11": a_11, "a_12": a_12, "y_pred": y_pred, "delta_12": delta_12}.items():
            run.observer.note(name, x)
    if at is None:
        return total, delta_11
    # a row that ends a common prefix has the targets of several sequences: their signals add up
    return total, torch.zeros_like(a_11, dtype=delta_11.dtype).index_add_(0, at, delta_11)


def normalized(end: Ending, a_10: Tensor, piece: Piece, run: Pass) -> Tensor:
    """a_10 → a_11 of the rows with a target (m), one for each target"""
    rows = piece.rows_of(len(a_10))
    return end.norm.forward(a_10 if rows is None else a_10[rows], run.operand)[0]


def value_of(end: Ending, a_10: Tensor, piece: Piece, objective: Objective, run: Pass) -> float:
    """a_10 → the summed objective of the piece, without gradients"""
    a_11 = normalized(end, a_10, piece, run)
    if isinstance(objective, RowObjective):
        value, _ = objective.coefficients(log_probabilities(end, a_11, piece.targets, run), piece.numbered)
        return end.check_finite(value).item()
    total = 0.0
    for rows in row_groups(len(piece.targets), end.head):
        y = end.logits.forward(end.head.forward(a_11[rows], run))
        total += end.check_finite(objective.forward(y, target_rows(piece, rows))).item()
    return total


def log_probabilities(end: Ending, a_11: Tensor, targets: Tensor, run: Pass) -> Tensor:
    """log p of the target of each row (m), in float64"""
    groups = row_groups(len(targets), end.head)
    found = []
    for rows in groups:
        its_run = run._replace(dropout_rows=(rows.start, len(targets)))
        found.append(loss.log_probabilities(end.logits.forward(end.head.forward(a_11[rows], its_run)), targets[rows]))
    return torch.cat(found) if found else a_11.new_zeros(0, dtype=torch.float64)


def forward_at_once(
    end: Ending, a_10: Tensor, piece: Piece, objective: Objective, weight: float, run: Pass
) -> tuple[float, Tensor, tuple[Any, Tensor]]:
    """a_10 → the summed objective, Δ_12 and what `_backward_at_once` needs, with the logits of all rows as one matrix."""
    a_11, norm_10 = end.norm.forward(a_10, run.operand)
    run.note_statistics(end.norm.statistics, norm_10, "10")
    a_11 = run.at("a_11", a_11)
    a_12 = run.at("a_12", end.head.forward(a_11, run))
    y = end.logits.forward(a_12.clone())
    if run.observer is not None:
        run.observer.note("y_pred", torch.softmax(y, 1))
    at = target_rows(piece, slice(None))
    value, delta = objective.forward_and_delta(y[piece.rows].clone(), at, weight)
    delta_12 = torch.zeros_like(a_12).index_copy_(0, piece.rows, end.logits.backward(delta, y[piece.rows].clone()))
    return end.check_finite(value).item(), delta_12, (norm_10, a_11)


def _backward_at_once(end: Ending, delta_12: Tensor, saved: tuple[Any, Tensor], run: Pass) -> Tensor:
    """Δ_12 → Δ_11 → Δ_10"""
    norm_10, a_11 = saved
    delta_12 = run.at("delta_12", delta_12)
    delta_11 = run.at("delta_11", end.head.backward(delta_12, run))
    end.head.accumulate(delta_12, a_11, run)
    a_bar_10, _ = end.norm.rebuild_output(norm_10)
    return end.norm.backward(delta_11, a_bar_10, norm_10)


def target_rows(piece: Piece, rows: slice) -> TargetRows:
    """Some of a piece's rows with a target, numbered in the batch."""
    return TargetRows(piece.targets[rows], piece.numbered[rows])

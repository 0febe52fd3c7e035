"""The readout: final norm, logits layer and loss, forward and backward at once.

    a_10 → a_11 norm → a_12 logits → loss;   Δ_12 = y_pred − y_gt → Δ_11 → Δ_10

The rows are processed in groups, so that the logits of all rows never exist together.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..ops import per_example
from .batch import Piece
from .example_gradients import PieceExamples
from .layers import Affine
from .norms import Norm
from .objective import MEAN_LOSS, Objective
from .passes import PLAIN, Record, no_record

LOGITS_AT_ONCE = 1 << 25  # most entries of the logits matrix that exist at any time; with fewer its products slow down


def rows_at_once(n_vocab: int, head_trains: bool) -> int:
    """Rows of a group. A trained head reads and writes its gradient once per group; a frozen one has no such cost, so its
    groups are smaller."""
    return max(1, LOGITS_AT_ONCE // (n_vocab * (1 if head_trains else 4)))


def row_groups(n: int, head: Affine) -> list[slice]:
    """n rows in groups of equal size, at most `rows_at_once` each."""
    n_vocab = sum(head.plain().widths)
    most = rows_at_once(n_vocab, _trains(head))
    size = math.ceil(n / math.ceil(n / most))
    return [slice(start, start + size) for start in range(0, n, size)]


def _trains(head: Affine) -> bool:
    return any(p.requires_grad for p in head.parameters())


def readout(
    norm: Norm,
    head: Affine,
    a_10: Tensor,
    piece: Piece,
    weight: float,
    check_finite: Callable[[Tensor], Tensor],
    record: Record = no_record,
    examples: PieceExamples | None = None,
    objective: Objective = MEAN_LOSS,
) -> tuple[float, Tensor]:
    """a_10 → the summed loss of the piece and Δ_10; gradients are added into `.grad`. Δ_12 is multiplied by `weight`,
    1/(number of targets). If `examples` are measured, the groups of rows are complete examples."""
    recording = record is not no_record
    a_11, norm_10 = norm.forward(a_10)
    every_row = len(a_10) == len(piece.rows)  # rows without a target come here only if all signals are wanted
    with_target = a_11 if every_row else a_11[piece.rows]
    delta_11 = torch.empty_like(with_target)
    total = 0.0
    logits, deltas, losses = [], [], []
    groups: list[tuple[slice, PieceExamples | None]]
    if examples is not None and _trains(head):
        groups = [*examples.groups(rows_at_once(sum(head.plain().widths), True))]
    else:
        groups = [(rows, None) for rows in row_groups(len(piece.targets), head)]
    # one buffer for all groups: freed and allocated for each, it would fragment memory
    largest = max(rows.stop - rows.start for rows, _ in groups)
    buffer = a_11.new_empty(largest, sum(head.plain().widths))
    for rows, its_examples in groups:
        a = with_target[rows]
        # one mask for all rows: it must not depend on the groups, which differ if examples are measured
        run = PLAIN._replace(
            dropout_seed=piece.dropout_seed, dropout_rows=(rows.start, len(piece.targets)), examples=its_examples
        )
        a_12 = head.forward(a, run, buffer[: len(a)])
        if recording:
            logits.append(a_12.clone())
        if examples is not None:
            losses.append(per_example.row_losses(a_12, piece.targets[rows]))
        summed, delta_12 = objective.forward_and_delta(a_12, piece.targets[rows], weight)
        total += check_finite(summed).item()
        shared = head.share(delta_12)
        delta_11[rows] = head.backward(delta_12, run, None, shared)
        head.accumulate(delta_12, a, run, shared)
        if recording:
            deltas.append(delta_12.clone())
    del a_12, delta_12, shared, buffer
    if examples is not None:
        examples.losses(torch.cat(losses))
    if not every_row:
        delta_11 = torch.zeros_like(a_11).index_copy_(0, piece.rows, delta_11)
    a_bar_10, _ = norm.rebuild_output(norm_10)
    if recording:
        a_12 = torch.cat(logits) if every_row else head.forward(a_11)
        delta_12 = torch.cat(deltas)
        if not every_row:
            delta_12 = torch.zeros_like(a_12).index_copy_(0, piece.rows, delta_12)
        statistics = {f"{name}_10": x for name, x in norm.statistics(norm_10).items()}
        named = {**statistics, "a_11": a_11, "a_12": a_12}
        named |= {"y_pred": torch.softmax(a_12, 1), "delta_12": delta_12, "delta_11": delta_11}
        for name, x in named.items():
            record(name, x)
    return total, norm.backward(delta_11, a_bar_10, norm_10, PLAIN._replace(examples=examples))

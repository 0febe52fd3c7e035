"""Objectives: the number that the backward pass differentiates. Each says which rows it reads, and its Δ_12.

    MeanLoss()                               the mean loss over the targets: −log y_pred[target]
    PositionLoss(t)                          the loss of the target at row t alone
    LogitDifference(t, token, against)       a_12[t, token] − a_12[t, against]
    RowObjective                             any function of the targets' log-probabilities (`preferences.py`)

Everything below Δ_12 follows by the same formulas. Rows are counted over all sequences, end to end.
"""

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...errors import HandgradError, shown
from ...ops import loss
from ...ops.loss import NO_TARGET
from .batch import check_ids


class TargetRows(NamedTuple):
    """Rows of the logits, all of which have a target."""

    targets: Tensor  # (m)
    rows: Tensor  # (m)   their numbers in the batch, all sequences end to end


class Objective(ABC):
    """The interface: what is divided by the number of targets, or of what else it counts, and differentiated."""

    needs_logits: ClassVar[bool] = True  # False: Δ_12 does not depend on them, so they are not computed
    routers = False  # whether the losses of a mixture's routers are differentiated as well

    @property
    def unit(self) -> int:
        """The number of neighboring sequences that are compared with each other: they are computed in one pass."""
        return 1

    def select(self, targets: Tensor, n_vocab: int) -> Tensor:
        """The targets of the rows that this objective reads; no target elsewhere."""
        return targets

    def of(self, lengths: tuple[int, ...], targets: Tensor) -> "Objective":
        """This objective for sequences of these lengths, packed end to end, with their targets (n)."""
        return self

    def count(self, lengths: tuple[int, ...], n_targets: int) -> int:
        """What the sum over a batch is divided by."""
        return n_targets

    def forward(self, logits: Tensor, at: TargetRows) -> Tensor:
        """The value of these rows (m, V), summed"""
        return self.forward_and_delta(logits.clone(), at, 1.0)[0]

    @abstractmethod
    def forward_and_delta(self, logits: Tensor, at: TargetRows, weight: float) -> tuple[Tensor, Tensor]:
        """The summed value, and Δ_12 (m, V) multiplied by `weight`; the logits may be overwritten"""


@dataclass(frozen=True)
class MeanLoss(Objective):
    """The mean loss over all targets. The losses of a mixture's routers are added to what is differentiated, if the model
    has coefficients for them, but not to the value; with `routers=False` they are left out."""

    routers: bool = field(default=True, kw_only=True)

    def forward(self, logits: Tensor, at: TargetRows) -> Tensor:
        return loss.forward(logits, at.targets)

    def forward_and_delta(self, logits: Tensor, at: TargetRows, weight: float) -> tuple[Tensor, Tensor]:
        return loss.forward_and_delta(logits, at.targets, weight)


@dataclass(frozen=True)
class PositionLoss(MeanLoss):
    """The loss of one target: position is its row."""

    position: int
    routers: bool = field(default=False, init=False, repr=False)

    def select(self, targets: Tensor, n_vocab: int) -> Tensor:
        chosen = _only(targets, self.position)
        target = targets.reshape(-1)[self.position]
        if target == NO_TARGET:
            raise HandgradError(f"position {self.position} has no target, so there is no loss: choose another position")
        chosen.view(-1)[self.position] = target
        return chosen


@dataclass(frozen=True)
class LogitDifference(Objective):
    """a_12[position, token] − a_12[position, against]: by how much the model prefers one token to another."""

    position: int
    token: int
    against: int

    def select(self, targets: Tensor, n_vocab: int) -> Tensor:
        chosen = _only(targets, self.position)
        for name, id in (("token", self.token), ("against", self.against)):
            if type(id) is not int or not 0 <= id < n_vocab:
                raise HandgradError(f"{name} must be a token id from 0 to {n_vocab - 1}, not {shown(id)}")
        if self.token == self.against:
            raise HandgradError(f"token and against are both {self.token}: the difference is 0; choose two tokens")
        chosen.view(-1)[self.position] = self.token
        return chosen

    def forward(self, logits: Tensor, at: TargetRows) -> Tensor:
        return (logits[:, self.token] - logits[:, self.against]).sum()

    def forward_and_delta(self, logits: Tensor, at: TargetRows, weight: float) -> tuple[Tensor, Tensor]:
        value = self.forward(logits, at)
        delta = torch.zeros_like(logits)
        delta[:, self.token], delta[:, self.against] = weight, -weight
        return value, delta


class RowObjective(Objective):
    """A sum over units of one or two neighboring sequences, each a function of the log-probabilities of its targets. With
    c_t = −∂L/∂log p_t, Δ_12(t) = c_t (y_pred − y_gt). It is divided by the number of units."""

    lengths: tuple[int, ...] = ()  # of the sequences of the batch

    def of(self, lengths: tuple[int, ...], targets: Tensor) -> "RowObjective":
        if len(lengths) % self.unit:
            raise HandgradError(f"{type(self).__name__} compares sequences in pairs, and the batch has {len(lengths)}")
        edges = torch.tensor((0, *lengths), device=targets.device).cumsum(0)
        counts = (targets != NO_TARGET).cumsum(0)[edges[1:] - 1].diff(prepend=edges.new_zeros(1))
        if not bool(counts.all()):
            raise HandgradError(f"sequence {int(torch.argmin(counts))} has no target, so it has no probability")
        bound = copy(self)
        object.__setattr__(bound, "lengths", lengths)
        return bound

    def count(self, lengths: tuple[int, ...], n_targets: int) -> int:
        return len(lengths) // self.unit

    def sequences_of(self, rows: Tensor) -> Tensor:
        """The number of the sequence that each row of the batch belongs to."""
        edges = torch.tensor(self.lengths, device=rows.device).cumsum(0)
        return torch.searchsorted(edges, rows, right=True)

    @abstractmethod
    def coefficients(self, log_p: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """log p of the targets of complete units (m), float64, and their rows in the batch → the summed value, and c (m)"""

    def forward_and_delta(self, logits: Tensor, at: TargetRows, weight: float) -> tuple[Tensor, Tensor]:
        value, c = self.coefficients(loss.log_probabilities(logits, at.targets), at.rows)
        return value, loss.weighted_delta(logits, at.targets, weight * c)


MEAN_LOSS, TEXT_LOSS = MeanLoss(), MeanLoss(routers=False)


def _only(targets: Tensor, position: int) -> Tensor:
    """Targets of this shape, none of which is set; raises if the position is not one of its rows."""
    check_ids("targets", targets)
    n = targets.numel()
    if type(position) is not int or not 0 <= position < n:
        raise HandgradError(f"position must be a row from 0 to {n - 1}, not {shown(position)}")
    return torch.full_like(targets, NO_TARGET, memory_format=torch.contiguous_format)

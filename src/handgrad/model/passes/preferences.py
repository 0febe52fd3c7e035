"""Objectives of preferences and rewards: sums over pairs, completions or tokens, whose coefficients `ops/preference.py` has.

    DPO(beta), IPO(beta), SimPO(beta, gamma), ORPO(beta)     sequences chosen, rejected, chosen, rejected, …
    KTO(desirable, z, beta)                                  single completions
    GRPO(advantages)                                         sampled completions; RLOO and REINFORCE by their advantages
    RowLoss(function)                                        a function of the user's own

The completion of a sequence is its targets; a prompt has none. `reference` has log p of every target under the reference
model, as `GPT.log_probabilities` returns it.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...errors import HandgradError, shown
from ...ops import preference
from .objective import RowObjective

Share = Literal["completion", "token", "longest"]


class Completions(NamedTuple):
    """The completions of some complete units: what a loss of sums reads."""

    numbers: Tensor  # (B')   of the sequences in the batch
    at: Tensor  # (m)   for each target, which of them it is in
    s: Tensor  # (B')   Σ log p
    n: Tensor  # (B')   number of targets
    ref: Tensor  # (B')   Σ log p of the reference; 0 without one


@dataclass(frozen=True, kw_only=True)
class CompletionLoss(RowObjective):
    """A loss of the sums of log-probabilities of completions: all tokens of one have the same coefficient."""

    reference: Tensor | None = None  # log p of the reference, in the shape of the targets
    needs_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("beta", "gamma", "smoothing", "sft", "z"):
            value = getattr(self, name, 0.0)
            if type(value) not in (int, float) or not 0 <= value < float("inf") or (name == "beta" and not value):
                bound = "above 0" if name == "beta" else "of at least 0"
                raise HandgradError(f"{name} must be a number {bound}, not {shown(value)}")

    @abstractmethod
    def values(self, found: Completions) -> preference.Values:
        """The losses of the units, and C = −∂L/∂s of each completion (B')"""

    def completions(self, log_p: Tensor, rows: Tensor) -> Completions:
        """Sum the log-probabilities of each completion."""
        numbers, at = torch.unique(self.sequences_of(rows), return_inverse=True)
        s, n = log_p.new_zeros(len(numbers)), log_p.new_zeros(len(numbers))
        s.index_add_(0, at, log_p)
        n.index_add_(0, at, torch.ones_like(log_p))
        ref = torch.zeros_like(s)
        if self.needs_reference:
            ref.index_add_(0, at, self._reference_of(rows).to(s))
        return Completions(numbers, at, s, n, ref)

    def _reference_of(self, rows: Tensor) -> Tensor:
        if self.reference is None:
            raise HandgradError(
                f"{type(self).__name__} compares with a reference: give reference=model.log_probabilities(tokens, targets,"
                " lengths) of the model without its adapters"
            )
        if self.reference.numel() != sum(self.lengths):
            raise HandgradError(
                f"reference has {self.reference.numel():,} log-probabilities, and the batch {sum(self.lengths):,} rows: it"
                " needs one for each row, in the shape of the targets"
            )
        return self.reference.reshape(-1).to(rows.device)[rows]

    def coefficients(self, log_p: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        found = self.completions(log_p, rows)
        losses, slope = self.values(found)
        return losses.sum(), slope[found.at]


@dataclass(frozen=True, kw_only=True)
class PairLoss(CompletionLoss):
    """A loss of pairs. `sft` times the mean loss of the tokens of chosen completions is added to it."""

    sft: float = 0.0
    chosen_tokens: float = field(
        default=0.0, repr=False
    )  # the mean number of a pair's; that of all processes, if several

    @property
    def unit(self) -> int:
        return 2

    def of(self, lengths: tuple[int, ...], targets: Tensor) -> "PairLoss":
        bound = super().of(lengths, targets)
        assert isinstance(bound, PairLoss)
        if not self.chosen_tokens:
            rows = torch.nonzero(targets != -100).squeeze(1)
            tokens = int((bound.sequences_of(rows) % 2 == 0).sum())
            object.__setattr__(bound, "chosen_tokens", tokens / max(1, len(lengths) // 2))
        return bound

    @abstractmethod
    def pairs(self, found: Completions) -> preference.Values:
        """The losses of the pairs, without `sft`"""

    def values(self, found: Completions) -> preference.Values:
        losses, slope = self.pairs(found)
        if self.sft:
            more, its_slope = preference.nll(found.s, self.chosen_tokens)
            losses, slope = losses + self.sft * more, slope + self.sft * its_slope
        return losses, slope


@dataclass(frozen=True, kw_only=True)
class DPO(PairLoss):
    """−log σ(β [(s_w − ref_w) − (s_l − ref_l)]), with label smoothing if wanted"""

    beta: float = 0.1
    smoothing: float = 0.0

    def pairs(self, found: Completions) -> preference.Values:
        return preference.dpo(found.s, found.ref, self.beta, self.smoothing)


@dataclass(frozen=True, kw_only=True)
class IPO(PairLoss):
    """[(m_w − m_l) − (ref m_w − ref m_l) − 1/(2β)]²"""

    beta: float = 0.1

    def pairs(self, found: Completions) -> preference.Values:
        return preference.ipo(found.s, found.n, found.ref, self.beta)


@dataclass(frozen=True, kw_only=True)
class SimPO(PairLoss):
    """−log σ(β (m_w − m_l) − γ), without a reference"""

    beta: float = 2.0
    gamma: float = 1.0
    smoothing: float = 0.0
    needs_reference: ClassVar[bool] = False

    def pairs(self, found: Completions) -> preference.Values:
        return preference.simpo(found.s, found.n, self.beta, self.gamma, self.smoothing)


@dataclass(frozen=True, kw_only=True)
class ORPO(PairLoss):
    """The mean loss of the chosen tokens, − β log σ(o(m_w) − o(m_l)), o(m) = m − log(1 − e^m); without a reference"""

    beta: float = 0.1
    sft: float = 1.0
    needs_reference: ClassVar[bool] = False

    def pairs(self, found: Completions) -> preference.Values:
        return preference.orpo(found.s, found.n, self.beta)


@dataclass(frozen=True, kw_only=True)
class KTO(CompletionLoss):
    """λ (1 − σ(± β (s − ref − z))) of single completions; z, the divergence from the reference, is a constant"""

    desirable: Tensor  # (B) bool
    z: float
    beta: float = 0.1
    weights: tuple[float, float] = (1.0, 1.0)  # of desirable and of other completions

    def values(self, found: Completions) -> preference.Values:
        if self.desirable.dtype != torch.bool or len(self.desirable) != len(self.lengths):
            raise HandgradError(f"desirable must be bool, one for each of the {len(self.lengths)} sequences")
        its = self.desirable.to(found.s.device)[found.numbers]
        return preference.kto(found.s, found.ref, its, self.z, self.beta, self.weights)


@dataclass(frozen=True, kw_only=True)
class GRPO(RowObjective):
    """−min(r A, clip(r) A) of every token, and β times an estimate of the divergence from the reference.

    advantages   (B), of every completion
    sampled      log p of the model that sampled, in the shape of the targets; None: these weights, so r = 1
    per          what a token's loss is divided by: the tokens of its completion, all tokens (their mean per completion), or
                 `longest`, the most tokens that a completion may have
    corrected    estimate the divergence by r (e^x − x − 1), whose gradient is right, instead of e^x − x − 1, x = ref − log p
    """

    advantages: Tensor
    sampled: Tensor | None = None
    reference: Tensor | None = None
    clip: tuple[float, float] = (0.2, 0.2)
    beta: float = 0.0
    corrected: bool = True
    per: Share = "token"
    longest: int = 0
    tokens: float = field(
        default=0.0, repr=False
    )  # the mean number of a completion's; that of all processes, if several

    def of(self, lengths: tuple[int, ...], targets: Tensor) -> "GRPO":
        if self.advantages.shape != (len(lengths),) or not bool(torch.isfinite(self.advantages).all()):
            raise HandgradError(f"advantages must be {len(lengths)} finite numbers, one for each sequence")
        if self.per not in get_args(Share) or (self.per == "longest" and self.longest < 1):
            raise HandgradError(
                f"per must be one of {', '.join(get_args(Share))}, the last with longest=, not {self.per!r}"
            )
        if self.beta and self.reference is None:
            raise HandgradError("beta is the weight of the divergence from a reference: give reference=, or beta=0")
        bound = super().of(lengths, targets)
        if not self.tokens:
            object.__setattr__(bound, "tokens", int((targets != -100).sum()) / len(lengths))
        assert isinstance(bound, GRPO)
        return bound

    def coefficients(self, log_p: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        numbers, at = torch.unique(self.sequences_of(rows), return_inverse=True)
        old = log_p if self.sampled is None else self._of(self.sampled, rows)
        advantage = self.advantages.to(log_p)[numbers][at]
        losses, c = preference.clipped(log_p, old, advantage, *self.clip)
        if self.beta:
            assert self.reference is not None
            ref = self._of(self.reference, rows)
            if self.corrected:
                more, its = preference.corrected_kl(log_p, old, ref, self.beta)
            else:
                more, its = preference.kl(log_p, ref, self.beta)
            losses, c = losses + more, c + its
        if self.per == "completion":
            share = 1 / torch.bincount(at)[at].to(log_p)
        else:
            share = torch.full_like(log_p, 1 / (self.tokens if self.per == "token" else self.longest))
        return (share * losses).sum(), share * c

    def _of(self, x: Tensor, rows: Tensor) -> Tensor:
        if x.numel() != sum(self.lengths):
            raise HandgradError(f"{x.numel():,} log-probabilities for {sum(self.lengths):,} rows: give one for each")
        return x.reshape(-1).to(rows.device, torch.float64)[rows]


@dataclass(frozen=True)
class RowLoss(RowObjective):
    """A sum over sequences by any function(log_p, sequence) → (value, c), c = −∂value/∂log_p, of the targets of one or more
    complete sequences, in order. log_p is float64, and `sequence` the number of each target's sequence."""

    function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def coefficients(self, log_p: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        value, c = self.function(log_p, self.sequences_of(rows))
        if c.shape != log_p.shape:
            raise HandgradError(f"the loss returned coefficients of shape {tuple(c.shape)} for {len(log_p)} targets")
        return value, c.to(log_p)

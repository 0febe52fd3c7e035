"""Preferences and rewards in torch's functions, for autograd to differentiate: logits (n, V) → what is divided by the units.

Each is written for one pair, or one completion, as its authors define it. It shares no formula with `ops/preference.py`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.passes.objective import RowObjective
from ..model.passes.preferences import DPO, GRPO, IPO, KTO, ORPO, RowLoss, SimPO
from ..ops.loss import NO_TARGET

Rows = list[Tensor]  # of each sequence, something of its targets


def reference_preference(
    objective: RowObjective, targets: Tensor, lengths: tuple[int, ...]
) -> Callable[[Tensor], Tensor] | None:
    """What is differentiated, as a function of the logits; None if the reference does not know it."""
    loss = KNOWN.get(type(objective))
    if loss is None:
        return None
    chosen = [torch.nonzero(part != NO_TARGET)[:, 0] for part in torch.split(targets, [*lengths])]

    def of(x: Tensor) -> Rows:
        return [part[rows] for part, rows in zip(torch.split(x, [*lengths]), chosen, strict=True)]

    def value(logits: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="none")
        return loss(objective, of(-losses), of)

    return value


Of = Callable[[Tensor], Rows]


def _ratios(objective: DPO | IPO | KTO, log_p: Rows, of: Of) -> Rows:
    """log p − log p of the reference, of every token."""
    assert objective.reference is not None
    return [p - ref for p, ref in zip(log_p, of(objective.reference.reshape(-1)), strict=True)]


def _mean_over_pairs(losses: list[Tensor], log_p: Rows, sft: float) -> Tensor:
    return torch.stack(losses).mean() - sft * torch.cat(log_p[0::2]).mean()


def _dpo(objective: DPO, log_p: Rows, of: Of) -> Tensor:
    ratios, e = [x.sum() for x in _ratios(objective, log_p, of)], objective.smoothing
    losses = []
    for chosen, rejected in zip(ratios[0::2], ratios[1::2], strict=True):
        p = torch.softmax(objective.beta * torch.stack([chosen, rejected]), 0)
        losses.append(-(1 - e) * p[0].log() - e * p[1].log())
    return _mean_over_pairs(losses, log_p, objective.sft)


def _ipo(objective: IPO, log_p: Rows, of: Of) -> Tensor:
    ratios = [x.mean() for x in _ratios(objective, log_p, of)]
    losses = [(w - l - 0.5 / objective.beta) ** 2 for w, l in zip(ratios[0::2], ratios[1::2], strict=True)]
    return _mean_over_pairs(losses, log_p, objective.sft)


def _simpo(objective: SimPO, log_p: Rows, of: Of) -> Tensor:
    means, e = [x.mean() for x in log_p], objective.smoothing
    losses = []
    for w, l in zip(means[0::2], means[1::2], strict=True):
        x = objective.beta * (w - l) - objective.gamma
        losses.append((1 - e) * F.softplus(-x) + e * F.softplus(x))
    return _mean_over_pairs(losses, log_p, objective.sft)


def _orpo(objective: ORPO, log_p: Rows, of: Of) -> Tensor:
    odds = [p / (1 - p) for p in (x.mean().exp() for x in log_p)]
    losses = [-objective.beta * F.logsigmoid((w / l).log()) for w, l in zip(odds[0::2], odds[1::2], strict=True)]
    return _mean_over_pairs(losses, log_p, objective.sft)


def _kto(objective: KTO, log_p: Rows, of: Of) -> Tensor:
    losses = []
    for ratio, desirable in zip(_ratios(objective, log_p, of), objective.desirable.tolist(), strict=True):
        distance = objective.beta * (ratio.sum() - objective.z)
        losses.append(objective.weights[not desirable] * (1 - torch.sigmoid(distance if desirable else -distance)))
    return torch.stack(losses).mean()


def _grpo(objective: GRPO, log_p: Rows, of: Of) -> Tensor:
    def given(x: Tensor | None) -> Rows:
        return [p.detach() for p in log_p] if x is None else of(x.reshape(-1))

    sums, (low, high) = [], objective.clip
    for p, old, ref, advantage in zip(
        log_p, given(objective.sampled), given(objective.reference), objective.advantages.tolist(), strict=True
    ):
        ratio = torch.exp(p - old)
        bound = torch.clamp(ratio, 1 - low, 1 + high)
        losses = -torch.minimum(ratio * advantage, bound * advantage)
        if objective.beta:
            estimate = torch.exp(ref - p) - (ref - p) - 1
            losses = losses + objective.beta * estimate * (ratio if objective.corrected else 1)
        sums.append(losses.mean() if objective.per == "completion" else losses.sum())
    divisor = {"completion": 1.0, "token": sum(map(len, log_p)) / len(log_p), "longest": float(objective.longest)}
    return torch.stack(sums).mean() / divisor[objective.per]


def _own(objective: RowLoss, log_p: Rows, of: Of) -> Tensor:
    """The value alone, of which autograd says what the coefficients should be"""
    sequence = torch.cat([torch.full_like(p, i, dtype=torch.int64) for i, p in enumerate(log_p)])
    return objective.function(torch.cat(log_p), sequence)[0] / len(log_p)


KNOWN: dict[type, Callable[..., Tensor]] = {
    DPO: _dpo,
    IPO: _ipo,
    SimPO: _simpo,
    ORPO: _orpo,
    KTO: _kto,
    GRPO: _grpo,
    RowLoss: _own,
}

"""Which examples of a fine-tuning run fit the others least: garbage, wrong labels, broken templates, another language.

An example has t targets, the mean loss ℓ over them, and its gradient ∂. Both ℓ and ‖∂‖ are large for short answers without
being wrong, so each is compared with what is typical for that number of targets at that time of the run:

    ℓ       = c(time) + s · log t + r_ℓ     what to say is decided early, and the tokens that follow cost less: s ≤ 0
    log ‖∂‖ = c(time) + s · log t + r_∂     a mean over few targets averages less: −1 ≤ s ≤ 0

s is the median of the slopes between pairs of examples (Theil–Sen), which a few odd ones cannot move; an answer that is one
decision costs B/t, so that of ℓ is not steeper than ℓ itself. c is the median over the examples measured just before and
after, because both fall as the model learns. Residuals are divided by their robust standard deviation in the epoch, which
falls too, and averaged over the epochs. The score adds the two:

    score = r_ℓ/σ_ℓ + r_∂/σ_∂

The norm is not compared with what the loss predicts: the loss is how a wrong answer shows, so it would excuse all of them.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import Shown

FAR = 3.0  # robust standard deviations above the median from which a score is outlying
LISTED = 25  # most examples that are listed
NEAR = 32  # examples before and after whose median is typical of the time
PAIRS = 64  # pairs of each example from which a slope is computed
FEW = 10  # measurements: an epoch with fewer, in which a run has stopped, is left out
FINDS = (
    "It finds answers that are improbable for the model beside the others: garbage, wrong labels, broken templates, another"
    " language. It cannot find wrong answers that are as plausible as right ones, and it lists rare or hard examples too:"
    " read them before you remove any."
)


class Measurement(NamedTuple):
    """One example in one step."""

    example: int
    epoch: int
    targets: int
    norm: float
    loss: float  # mean over its targets, before the step


class Outlier(NamedTuple):
    """An example and how it compares; means over its measurements."""

    example: int
    norm: float
    times: float  # how many times longer its gradient is than is typical for its number of targets
    loss: float
    excess: float  # by how much its loss is higher than is typical for its number of targets, in nats
    score: float
    outlying: bool  # FAR above the others


class Outlying(NamedTuple):
    """What is shown of the examples of a run."""

    rows: list[tuple[Outlier, Shown]]  # those with the highest scores
    far: int  # how many are outlying, listed or not
    total: int  # how many were measured


def ranked(measured: Iterable[Measurement]) -> list[Outlier]:
    """All examples that were measured, given in the order of the run; those with the highest scores first."""
    by_epoch: dict[int, list[Measurement]] = {}
    for m in measured:
        if m.norm > 0 and math.isfinite(m.norm) and math.isfinite(m.loss):
            by_epoch.setdefault(m.epoch, []).append(m)
    complete = [group for group in by_epoch.values() if len(group) >= FEW]
    found: dict[int, list[tuple[float, ...]]] = {}
    for group in complete or by_epoch.values():
        t, norms, losses = (torch.tensor(x, dtype=torch.float64) for x in zip(*(m[2:] for m in group), strict=True))
        longer = _above_typical(t, norms.log(), 1.0)
        higher = _above_typical(t, losses, float(losses.quantile(0.9)))
        columns = (norms, longer, losses, higher, _standardized(longer), _standardized(higher))
        for m, row in zip(group, torch.stack(columns, 1).tolist(), strict=True):
            found.setdefault(m.example, []).append(tuple(row))
    if not found:
        return []
    averaged = [[sum(x) / len(x) for x in zip(*rows, strict=True)] for rows in found.values()]
    means = torch.tensor(averaged, dtype=torch.float64)
    scores = _standardized(means[:, 4]) + _standardized(means[:, 5])
    far = (_standardized(scores) > FAR).tolist()
    outliers = [
        Outlier(i, row[0], math.exp(row[1]), row[2], row[3], score, is_far)
        for i, row, score, is_far in zip(found, averaged, scores.tolist(), far, strict=True)
    ]
    return sorted(outliers, key=lambda outlier: -outlier.score)


def _standardized(x: Tensor) -> Tensor:
    """In robust standard deviations from the median: outliers must not hide themselves. 0 if most are equal."""
    spread = 1.4826 * (x - x.median()).abs().median()
    return (x - x.median()) / spread if spread > 0 else torch.zeros_like(x)


def _above_typical(targets: Tensor, values: Tensor, steepest: float) -> Tensor:
    """The values without their dependence on the number of targets and on the time. A slope steeper than −`steepest` would
    excuse an outlier of unusual length."""
    x = targets.log()
    left = values - min(0.0, max(-steepest, _slope(x, values))) * x
    return torch.stack([left[i] - left[max(0, i - NEAR) : i + NEAR + 1].median() for i in range(len(left))])


def _slope(x: Tensor, y: Tensor) -> float:
    """The median slope between an example and those that follow it in the run, which are in random order; 0 if all x are
    equal."""
    slopes = []
    for k in range(1, min(PAIRS, len(x) - 1) + 1):
        dx, dy = x[k:] - x[:-k], y[k:] - y[:-k]
        slopes.append(dy[dx != 0] / dx[dx != 0])
    found = torch.cat(slopes) if slopes else x[:0]
    return float(found.median()) if len(found) else 0.0

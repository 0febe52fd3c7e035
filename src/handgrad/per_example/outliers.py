"""Which examples of a fine-tuning run fit the others least: garbage, wrong labels, broken templates, another language.

An example has t targets, the mean loss ℓ over them, and its gradient ∂. Both ℓ and ‖∂‖ are large for short answers without
being wrong, so each is compared with what is typical for so many targets at that time of the run:

    log ℓ   = c(time) + s · log t + r_ℓ     s = −1: the answer is one decision, its other tokens cost nothing; 0: all cost
                                            the same
    log ‖∂‖ = c(time) + s · log t + r_∂     a mean over few targets averages less, by −1 at most

s is the median of the slopes between pairs of examples (Theil–Sen), which a few odd ones cannot move, within −1 … 0: more
would excuse an outlier of unusual length. c is the median over the examples measured just before and after, because both
fall as the model learns. Residuals are averaged over the epochs in which the example was measured. The score adds the two,
each divided by its robust standard deviation:

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
LEAST = 1e-6  # losses below are equal: the model is certain
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
    loss_times: float  # how many times higher its loss is than is typical for its number of targets
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
    found: dict[int, list[tuple[float, float, float, float]]] = {}
    for group in by_epoch.values():
        t = torch.tensor([m.targets for m in group], dtype=torch.float64)
        norms = _above_typical(t, torch.tensor([m.norm for m in group], dtype=torch.float64))
        losses = _above_typical(t, torch.tensor([m.loss for m in group], dtype=torch.float64))
        for m, longer, higher in zip(group, norms, losses, strict=True):
            found.setdefault(m.example, []).append((m.norm, longer, m.loss, higher))
    if not found:
        return []
    averaged = [[sum(x) / len(x) for x in zip(*rows, strict=True)] for rows in found.values()]
    means = torch.tensor(averaged, dtype=torch.float64)
    scores = _standardized(means[:, 1]) + _standardized(means[:, 3])
    far = _standardized(scores) > FAR
    outliers = [
        Outlier(i, norm, math.exp(longer), loss, math.exp(higher), score, bool(is_far))
        for i, (norm, longer, loss, higher), score, is_far in zip(
            found, means.tolist(), scores.tolist(), far, strict=True
        )
    ]
    return sorted(outliers, key=lambda outlier: -outlier.score)


def _standardized(x: Tensor) -> Tensor:
    """In robust standard deviations from the median: outliers must not hide themselves. 0 if most are equal."""
    spread = 1.4826 * (x - x.median()).abs().median()
    return (x - x.median()) / spread if spread > 0 else torch.zeros_like(x)


def _above_typical(targets: Tensor, values: Tensor) -> list[float]:
    """log(value) without its dependence on the number of targets and on the time."""
    x, y = targets.log(), values.clamp(min=LEAST).log()
    left = y - min(0.0, max(-1.0, _slope(x, y))) * x
    return [float(left[i] - left[max(0, i - NEAR) : i + NEAR + 1].median()) for i in range(len(left))]


def _slope(x: Tensor, y: Tensor) -> float:
    """The median slope between an example and those that follow it in the run, which are in random order; 0 if all x are
    equal."""
    slopes = []
    for k in range(1, min(PAIRS, len(x) - 1) + 1):
        dx, dy = x[k:] - x[:-k], y[k:] - y[:-k]
        slopes.append(dy[dx != 0] / dx[dx != 0])
    found = torch.cat(slopes) if slopes else x[:0]
    return float(found.median()) if len(found) else 0.0

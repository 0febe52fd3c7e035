"""Which examples of a fine-tuning run have outlying gradients: wrong answers, broken templates, another language.

A norm is compared with what is typical for its number of targets at that time of the run:

    log ‖∂_i‖ = c(time) + s · log(targets_i) + r_i

A mean over few targets averages less, so its gradient is longer: s, by least squares over an epoch. All norms fall as the
model learns: c, the median over the examples measured just before and after. The residual r_i, averaged over the epochs in
which the example was measured, is its score; exp(r_i) says how many times longer than typical.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .inputs import Shown

FAR = 3.0  # robust standard deviations above the median from which a score is outlying
LISTED = 25  # most examples that are listed
NEAR = 32  # examples before and after whose median is typical of the time


class Measurement(NamedTuple):
    """The norm of one example in one step."""

    example: int
    epoch: int
    targets: int
    norm: float


class Outlier(NamedTuple):
    """An example and how its gradient compares."""

    example: int
    norm: float  # mean over its measurements
    times: float  # how many times longer than is typical for its number of targets
    outlying: bool  # FAR above the others


class Outlying(NamedTuple):
    """What is shown of the examples of a run."""

    rows: list[tuple[Outlier, Shown]]  # those with the longest gradients for their number of targets
    far: int  # how many are outlying, listed or not
    total: int  # how many were measured


def ranked(measured: Iterable[Measurement]) -> list[Outlier]:
    """All examples that were measured, given in the order of the run; those with the longest gradients for their number of
    targets first."""
    by_epoch: dict[int, list[Measurement]] = {}
    for m in measured:
        if m.norm > 0 and math.isfinite(m.norm):
            by_epoch.setdefault(m.epoch, []).append(m)
    scores: dict[int, list[float]] = {}
    norms: dict[int, list[float]] = {}
    for group in by_epoch.values():
        for m, residual in zip(group, _residuals(group), strict=True):
            scores.setdefault(m.example, []).append(residual)
            norms.setdefault(m.example, []).append(m.norm)
    means = {i: sum(found) / len(found) for i, found in scores.items()}
    values = torch.tensor(list(means.values()), dtype=torch.float64)
    # by the median: outliers must not hide themselves
    middle = values.median().item() if len(values) else 0.0
    spread = 1.4826 * (values - middle).abs().median().item() if len(values) else 0.0
    order = sorted(means, key=lambda i: -means[i])
    return [
        Outlier(i, sum(norms[i]) / len(norms[i]), math.exp(means[i]), means[i] > middle + FAR * spread > middle)
        for i in order
    ]


def _residuals(group: Sequence[Measurement]) -> list[float]:
    """log ‖∂_i‖ without its dependence on the number of targets and on the time."""
    x = torch.tensor([math.log(m.targets) for m in group], dtype=torch.float64)
    y = torch.tensor([math.log(m.norm) for m in group], dtype=torch.float64)
    x = x - x.mean()
    slope = float((x @ (y - y.mean())) / (x @ x)) if x @ x > 0 else 0.0
    slope = min(0.0, max(-1.0, slope))  # what averaging can explain; more would hide an outlier of unusual length
    left = y - slope * x
    return [float(left[i] - left[max(0, i - NEAR) : i + NEAR + 1].median()) for i in range(len(left))]

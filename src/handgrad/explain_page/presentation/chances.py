"""Probabilities of the next token by their logarithms, so that none is rounded to 0, and their ranks, in which equal logits
share a rank."""

import math

import torch
from torch import Tensor

from ..json_types.common import Position, Prediction, Target
from ..session.session import Session

LEAST = 5e-324  # a softmax is never 0; smaller ones are written as this


def log_chances(logits: Tensor) -> Tensor:
    """The logarithm of the probability of every token, in float64. (V) → (V): row by row, because a float64 copy of a whole
    sentence's logits is large"""
    x = logits.double()
    log_p = torch.log_softmax(x, 0)
    best = int(x.argmax())
    others = torch.exp(x - x[best])
    others[best] = 0
    if others.sum() < 1:  # p = 1/(1 + others), which near 1 has no digits for them
        log_p[best] = -torch.log1p(others.sum())
    return log_p


def chance(log_p: Tensor | float) -> float:
    """The probability of a logarithm, above 0."""
    return max(math.exp(float(log_p)), LEAST)


def predicted(session: Session, row: Tensor, top: int) -> list[Prediction]:
    """The most probable tokens of a row of logarithms (V)."""
    best = torch.topk(row, min(top, len(row)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"id": i, "word": session.token_text(i), "p": chance(log_p)} for i, log_p in pairs]


def standing(session: Session, row: Tensor, target: int) -> Target:
    """A target in a row of logarithms: its probability, its loss, its rank, and how many other tokens share the rank."""
    if target < 0:
        return {"target": None, "target_id": None, "probability": None, "loss": None, "rank": None, "ties": 0}
    log_p = row[target]
    return {
        "target": session.token_text(target), "target_id": target, "probability": chance(log_p), "loss": -log_p.item(),
        "rank": int((row > log_p).sum()) + 1, "ties": int((row == log_p).sum()) - 1,
    }  # fmt: skip


def position_of(session: Session, row: Tensor, id: int, target: int, top: int) -> Position:
    """A position with its token, its target if it has one (≥ 0), and the most probable tokens."""
    return {**standing(session, row, target), "token": session.token_text(id), "top": predicted(session, row, top)}


def losses_of(logits: Tensor, targets: Tensor) -> list[float]:
    """−log y_pred[target] of every row (m) that has one of these targets (m)."""
    return [-log_chances(row)[target].item() for row, target in zip(logits, targets.tolist(), strict=True)]

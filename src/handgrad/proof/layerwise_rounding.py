"""The error that rounding explains in each error signal of a large model: `rounding.py` with a float64 copy of one block at
a time. The samples go through each block one after the other, beside a pass without errors."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..tolerances import NORM_FLOOR
from .reference import (
    Hook,
    Part,
    block_weights,
    differentiate_part,
    reference_block,
    reference_norm,
    reference_objective,
)
from .rounding import MARGIN, SAMPLES, rounder, rounding_size
from .tensor_errors import TensorErrors

if TYPE_CHECKING:
    from .layerwise import LayerwiseChecker

Change = Callable[[Tensor], Tensor]


@torch.no_grad()
def errors_by_rounding(checker: "LayerwiseChecker", seed: int = 0) -> dict[str, float]:
    """The largest relative error that rounding in the model's dtype explains, by the name of the error signal."""
    model, found = checker.model, TensorErrors()
    size = rounding_size(model.config, len(checker.piece.ids), model.dtype)
    rounded = rounder(size, torch.Generator().manual_seed(seed))
    changes: list[Change] = [lambda x: x, *[rounded] * SAMPLES]  # the first pass has no errors
    inputs = [[checker.embeddings()] * len(changes)]  # of every block, in every pass
    for i in range(len(model.blocks)):
        block = _block(checker, i)
        inputs.append([block(change, a, lambda _, x: x) for a, change in zip(inputs[-1], changes, strict=True)])
    deltas = _compared(found, (_readout(checker, a, change) for a, change in zip(inputs.pop(), changes, strict=True)))
    for i in reversed(range(len(model.blocks))):
        block, passes = _block(checker, i), zip(inputs.pop(), deltas, changes, strict=True)
        parts = (differentiate_part(partial(block, change), a, (), delta) for a, delta, change in passes)
        deltas = _compared(found, parts)
    return {name: MARGIN * error for name, error in found.relative(NORM_FLOOR).items()}


def _compared(found: TensorErrors, passes: Iterator[Part]) -> list[Tensor]:
    """Compare the error signals of every pass with those of the first, one pass at a time; return what each sends on."""
    exact = next(passes)
    sent = [exact.delta]
    for delta, deltas in ((part.delta, part.deltas) for part in passes):
        for name, signal in deltas.items():
            found.add(name, signal, exact.deltas[name], norm=True)
        sent.append(delta)
        del delta, deltas  # as large as the vocabulary: freed before the next pass
    return sent


def _block(checker: "LayerwiseChecker", i: int) -> Callable[[Change, Tensor, Hook], Tensor]:
    """a_1 → a_10 of a block, with every intermediate changed before the hook sees it"""
    weights = block_weights(checker.ours.block(i), checker.model.config)

    def run(change: Change, a: Tensor, hook: Hook) -> Tensor:
        return reference_block(weights, checker.choices, i, a, lambda name, x: hook(name, change(x)), change)

    return run


def _readout(checker: "LayerwiseChecker", a_10: Tensor, change: Change) -> Part:
    """a_10 → Δ_12, Δ_11 and Δ_10"""
    norm, choices = copy.deepcopy(checker.model.final_norm).double().requires_grad_(False), checker.choices
    pair = (norm.weight, getattr(norm, "bias", None))

    def normalized(a: Tensor, _: Hook) -> Tensor:
        return reference_norm(a, pair, choices.norm, choices.eps, change)

    def objective(logits: Tensor, _: Hook) -> Tensor:
        return reference_objective(logits, checker.targets, checker.objective) / len(checker.piece.targets)

    a_11 = change(normalized(a_10, lambda _, x: x))
    logits = change(torch.cat([a_11 @ w.T if b is None else a_11 @ w.T + b for _, w, b in checker.vocabulary()], 1))
    delta_12 = change(differentiate_part(objective, logits).delta)
    del logits
    delta_11 = torch.zeros_like(a_11)
    for columns, w, _ in checker.vocabulary():
        delta_11 += delta_12[:, columns] @ w
    delta_11 = change(delta_11)
    end = differentiate_part(normalized, a_10, (), delta_11)
    return end._replace(deltas={"delta_12": delta_12, "delta_11": delta_11})

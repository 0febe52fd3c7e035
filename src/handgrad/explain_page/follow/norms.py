"""What a norm sends back, by the paper's formula, and the numbers inside it."""

import torch
from torch import Tensor

from ...model.layers.norms import Norm
from ..session.session import TracedSentence
from ..stations.network import NetworkStep
from .tensors import Cell, Tensors, wide
from .terms import Sum, number, one, row

Answer = tuple[str, list[Sum]]


def sent(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    """[G − mean(G) − ā ∘ mean(G ∘ ā)]/σ; an RMSNorm has no mean(G)"""
    (n, _), here, i, j = step.norm(), step.here, cell.row, cell.column
    centered = f"{here}sigma_{n}" in t.trace
    spread = Cell(f"{here}{'sigma' if centered else 'rms'}_{n}", i, 0)
    inverse = number(1 / t.value(spread), "1/σ" if centered else "1/rms", lambda k: spread)
    along = one(t, f"{here}mean_Ga_{n}", i, 0)
    sums = [Sum((one(t, f"{here}G_{n}", i, j), inverse)), Sum((one(t, f"{here}a_bar_{n}", i, j), along, inverse), -1)]
    if centered:
        sums.insert(1, Sum((one(t, f"{here}mean_G_{n}", i, 0), inverse), -1))
    which = "last " if step.block is None else ""
    return f"Δ through the {which}norm", sums


def inside(t: Tensors, here: str, last: str, i: int, j: int) -> Answer:
    """G = Δ diag(w), or a mean of its rows"""
    n = last.rpartition("_")[2]
    name, (step, _) = f"{here}G_{n}", t.network.holder(here, n) or (None, "")
    assert step is not None
    if not last.startswith("G_"):
        also = () if last.startswith("mean_G_") else (row(t, f"{here}a_bar_{n}", i),)
        return "the mean of the row", [Sum((row(t, name, i), *also), 1 / t[name].shape[1])]
    layer, delta = step.norm()[1], one(t, step.signals[0], i, j)
    sums = [Sum((delta, one(t, f"{here}w_{n}", 0, j)))] + ([Sum((delta,), layer.offset)] if layer.offset else [])
    return "Δ of the output times the gain", sums


def derivative(norm: Norm, a: Tensor) -> Tensor:
    """(d, d): entry k, j is ∂ output_k / ∂ input_j of a norm at the row a: its backward pass of every unit vector"""
    d, layer = len(a), wide(norm)
    saved = layer.forward(a.expand(d, d).contiguous())[1]
    return layer.backward(torch.eye(d, dtype=torch.float64), layer.rebuild_output(saved)[0], saved)

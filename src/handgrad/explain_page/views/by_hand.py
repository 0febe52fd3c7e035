"""What a reader can compute by hand at a station: its results, forward, backward and the gradients, each with a few entries.
The terms of an entry are those of `follow`; an exported file has those of these entries, with all their digits."""

import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from ...model.layers.norms import LayerNorm
from ...model.steps import signal
from ..follow.follow import symbol_of, terms_of
from ..follow.tensors import Cell, Tensors
from ..json_types.station import Factor, Followed, HandCell, HandPart, HandResult, HandTerms, Term, Way
from ..session.session import Session, TracedSentence
from ..stations.network import NetworkStep
from ..stations.table import Station

SMALL = 1e-4  # of the largest: not worth computing
FEW = 2  # the first rows of attention see too little to be an exercise


def by_hand(
    session: Session, sentence: TracedSentence, t: Tensors, station: Station, stored: int = 0, every: bool = True
) -> list[HandResult]:
    """Every result of a station, or one of them: its first gradient, else what it sends back. Without `stored` the terms are
    asked of `follow`, else each result has that many entries, with their terms."""
    found: list[HandResult] = []
    results = [*_results(session, sentence, station)]
    if not every:
        results = next(([x] for x in results if x[0] == "gradient"), results[-1:])
    for way, name in results:
        x = t[name]
        cells: list[HandCell] = []
        for head, row, column in entries(x):
            cell = Cell(name, row, column, head)
            terms = packed(t, terms_of(session, sentence, t, cell)) if len(cells) < stored else None
            cells.append({"row": row, "column": column, "head": head, "terms": terms})
        if cells:
            found.append({
                "way": way, "name": name, "symbol": symbol_of(name.rpartition(".")[2]), "shape": list(x.shape[-2:]),
                "heads": len(x) if x.ndim == 3 else None, "cells": cells if stored == 0 else cells[:stored],
            })  # fmt: skip
    return found


def _results(session: Session, sentence: TracedSentence, station: Station) -> Iterator[tuple[Way, str]]:
    """The names of what a station computes, in this order."""
    if station.kind == "tokens":
        yield "backward", "delta_0"
        return
    step = session.network.maker(station.a[0])
    assert step is not None
    for name in (*_before(step), *step.outputs):
        yield "forward", name
    for name in (*_inside(step), *(signal(x) for x in step.inputs if x != "a_0")):
        yield "backward", name
    for parameter in station.parameters:
        if sentence.trace.get(parameter.gradient) is not None:
            yield "gradient", parameter.gradient


def _before(step: NetworkStep) -> list[str]:
    """What a step computes on the way to its outputs."""
    if step.kind == "norm":
        return [f"{step.here}a_bar_{step.norm()[0]}"]
    inner = {"attention": ("q", "k", "v", "score", "sum_e", "rho"), "convolution": ("a_z", "a_conv")}
    return ["sum_e"] if step.kind == "loss" else [step.here + name for name in inner.get(step.kind, ())]


def _inside(step: NetworkStep) -> list[str]:
    """What a step computes on the way back to its inputs."""
    if step.kind == "norm":
        n, layer = step.norm()
        means = ("mean_G", "mean_Ga") if isinstance(layer, LayerNorm) else ("mean_Ga",)
        return [f"{step.here}{name}_{n}" for name in ("G", *means)]
    inner = {
        "attention": ("delta_v", "delta_causal", "delta_raw", "delta_q", "delta_k"),
        "convolution": ("delta_conv", "delta_z"),
    }  # fmt: skip
    return [step.here + name for name in inner.get(step.kind, ())]


def entries(x: Tensor) -> Iterator[tuple[int | None, int, int]]:
    """Head, row and column of a few entries of a tensor, if they are not nearly 0: that furthest from 0, that furthest with
    the other sign, and that furthest in other rows and columns."""
    first = FEW if x.ndim == 3 and x.shape[1] > FEW else 0
    part = x[..., first:, :]
    head, row, column = _furthest(part)
    best = part[head, row, column] if head is not None else part[row, column]
    if not best:
        return
    yield head, row + first, column
    own = part if head is None else part[head]
    rest = own.clone()
    rest[row], rest[:, column] = 0, 0
    _, i, j = _furthest(torch.where(own * best < 0, own, 0))
    if own[i, j] * best < 0 and abs(own[i, j]) > SMALL * abs(best):
        yield head, i + first, j
        rest[i], rest[:, j] = 0, 0
    _, i, j = _furthest(rest)
    if abs(rest[i, j]) > SMALL * abs(best):
        yield head, i + first, j


def _furthest(x: Tensor) -> tuple[int | None, int, int]:
    """Head, if there are heads, row and column of the entry furthest from 0."""
    k = int(x.abs().argmax())
    h, (i, j) = k // (x.shape[-2] * x.shape[-1]), divmod(k % (x.shape[-2] * x.shape[-1]), x.shape[-1])
    return (h if x.ndim == 3 else None), i, j


# ── terms in little space ───────────────────────────────────────────────────────────────────────────────────────────


def packed(t: Tensors, found: Followed) -> HandTerms:
    """The terms of an entry in a tenth of the space: names once, numbers as texts with all their digits, from which
    assets/hand_terms.js makes them again."""
    parts: dict[tuple[object, ...], HandPart] = {}
    for term in found["terms"]:
        cells = [factor["cell"] for factor in term["factors"]]
        names = [None if cell is None else cell["name"] for cell in cells]
        heads = [None if cell is None else cell["head"] for cell in cells]
        symbols = [factor["symbol"] for factor in term["factors"]]
        tensors = [None if cell is None else cell["symbol"] for cell in cells]
        part = parts.setdefault((*names, *heads, *symbols, term["scale"]), {
            "names": names, "heads": heads, "tensors": tensors, "symbols": symbols, "scale": digits(term["scale"]),
            "shapes": [None if name is None else list(t[name].shape[-2:]) for name in names], "terms": [],
        })  # fmt: skip
        part["terms"].append([_place(term), *(x for factor in term["factors"] for x in _factor(factor))])
    return {
        "symbol": found["symbol"], "block": found["block"], "row_label": found["row_label"],
        "column_label": found["column_label"], "formula": found["formula"],
        "count": found["count"], "parts": [*parts.values()], "rest": digits(found["rest"]["value"]),
        "sum": digits(found["sum"]), "value": digits(found["value"]),
    }  # fmt: skip


def _place(term: Term) -> int | str | list[int] | None:
    """What tells a term from the others: a position, from 0; a token of the vocabulary; a feature in a list."""
    if term["token"] is not None:
        return term["token"] if term["position"] is None else term["position"] - 1
    return None if term["feature"] is None else [term["feature"]]


def _factor(factor: Factor) -> list[int | str]:
    cell = factor["cell"]
    return [digits(factor["value"]), *([] if cell is None else [cell["row"], cell["column"]])]


def digits(x: float) -> str:
    """A number of float32 or less exactly, any other to twelve digits."""
    short = f"{x:.9g}"
    try:
        exact = struct.unpack("f", struct.pack("f", x))[0] == x
    except OverflowError:
        exact = False
    return short if exact else f"{x:.12g}"

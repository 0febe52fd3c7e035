"""The data of a comparison: two sentences, or one sentence on two versions of the weights, at one station and at all."""

from typing import Any

import torch
from torch import Tensor

from .. import adapters
from ..errors import HandgradError
from ..formatting import percent
from .pictures import picture
from .session import Session, TracedSentence, Version
from .stations import Station
from .symbols import symbol
from .views import labels_of


def compare(
    session: Session, first: TracedSentence, second: TracedSentence, station: Station, limit: int = 256
) -> dict[str, Any]:
    """Return the matrices of a station of both, with their difference if both have equally many tokens, and the relative
    difference of every station and gradient."""
    same = len(first.ids) == len(second.ids)
    deltas = station.incoming or station.outgoing
    names = [*station.a, *(deltas if station.id != "a_0" else ())]
    stations = []
    for other in session.stations:
        kinds = {"a": other.a if other.id != "loss" else (), "delta": other.incoming}
        stations.append({
            "id": other.id, **{kind: _lengths(first, second, x, same) for kind, x in kinds.items()}
        })  # fmt: skip
    return {
        "labels": [labels_of(session, sentence) for sentence in (first, second)],
        "losses": [sentence.trace.loss for sentence in (first, second)], "same_length": same,
        "maps": [_pictures(first.trace[name], second.trace[name], name, same, limit) for name in names],
        "stations": stations, "gradients": _gradients(session, first, second),
        "caption": _caption(session, stations, same),
    }  # fmt: skip


def _pictures(x: Tensor, y: Tensor, name: str, same: bool, limit: int) -> dict[str, Any]:
    """Both matrices on one scale, and their difference on its own."""
    scale = max(picture(one, limit=limit)["scale"] for one in (x, y))
    return {
        "name": name, "symbol": symbol(name), "kind": "delta" if "delta" in name else "a",
        "pictures": [picture(one, limit=limit, scale=scale) for one in (x, y)],
        "difference": picture(y - x, limit=limit) if same else None,
        "lengths": [x.norm().item(), y.norm().item(), (y - x).norm().item() if same else None],
    }  # fmt: skip


def _lengths(first: TracedSentence, second: TracedSentence, names: tuple[str, ...], same: bool) -> list[float | None]:
    """The lengths of both, and of their difference."""
    if not names:
        return [None, None, None]
    x, y = (torch.cat([sentence.trace[name] for name in names], 1) for sentence in (first, second))
    return [x.norm().item(), y.norm().item(), (y - x).norm().item() if same else None]


def _gradients(session: Session, first: TracedSentence, second: TracedSentence) -> list[dict[str, Any]]:
    """The length of every gradient in both, and the cosine of the angle between them."""
    rows = []
    for station in session.stations:
        for parameter in station.parameters:
            x, y = (sentence.trace.get(parameter.gradient) for sentence in (first, second))
            if x is None or y is None or parameter.symbol.startswith("w_11 ="):
                continue
            a, b = x.norm().item(), y.norm().item()
            cosine = torch.sum(x.double() * y.double()).item() / (a * b) if a and b else None
            rows.append({
                "station": station.id, "block": station.block, "symbol": parameter.symbol, "first": a, "second": b,
                "cosine": cosine,
            })  # fmt: skip
    return rows


def _caption(session: Session, stations: list[dict[str, Any]], same: bool) -> str:
    if not same:
        return "The sentences have different numbers of tokens, so there is no difference entry by entry."
    changed = [(row["a"][2] / row["a"][0], row["id"]) for row in stations if row["a"][0] and row["a"][2] is not None]
    share, id = max(changed)
    if not share:
        return "Both forward passes are equal."
    found = session.by_id[id]
    where = "" if found.block is None else f" of block {found.block + 1}"
    return f"Forward, the largest relative difference is at {found.title}{where}: {percent(share)} of the length of a."


def base_version(session: Session) -> int:
    """Add the version of the weights without the adapters' contribution, and return its number."""
    with session.model_at(0) as model, torch.no_grad():
        found = adapters.adapters_of(model)
        if not found:
            raise HandgradError("this model has no adapters: compare sentences, or weights before and after steps")
        weights: dict[str, Tensor] = {}
        names = {p: name for name, p in model.named_parameters()}
        for layer in found.values():
            weights[names[layer.up]] = torch.zeros_like(layer.up)
            if layer.magnitude is not None:  # of the plain weight
                before, layer.up.data = layer.up.data, torch.zeros_like(layer.up)
                weights[names[layer.magnitude]] = layer.column_norms().clone()
                layer.up.data = before
    return session.add_version(Version(weights))

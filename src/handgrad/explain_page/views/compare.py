"""Compare two traced sentences at every station: two texts, before and after steps, or the base and its adapter."""

import math
from typing import Literal

import torch
from torch import Tensor

from ..json_types.questions import ComparedMap, ComparedStation, Comparison, Side, StationDifference
from ..presentation.captions import quote
from ..presentation.notation import percent, symbol, typeset
from ..presentation.pictures import COLUMNS, picture, statistics
from ..session.session import Session, TracedSentence
from ..stations.table import Station
from .station import vocabulary, vocabulary_columns


def compare_at(
    session: Session, sentence: TracedSentence, other: TracedSentence, station: Station | None
) -> Comparison | ComparedStation:
    """Compare two traces at every station, or the matrices of one."""
    return compare(session, sentence, other) if station is None else compare_station(session, sentence, other, station)


def compare(session: Session, one: TracedSentence, other: TracedSentence) -> Comparison:
    """Return how far apart two traces are at every station, in a and in Δ: ‖x − y‖ / ‖x‖ over the tokens they share."""
    n = _rows(one, other)
    rows: list[StationDifference] = []
    for station in session.stations:
        if not station.a:
            continue
        deltas = station.incoming or station.outgoing
        rows.append({
            "station": station.id, "a": _apart(one, other, station.a, n), "delta": _apart(one, other, deltas, n),
        })  # fmt: skip
    losses = [x.trace.loss for x in (one, other)]
    furthest = max(rows, key=lambda row: row["a"])
    place = session.by_id[furthest["station"]]
    where = place.title + ("" if place.block is None else f" of block {place.block + 1}")
    text = f"The objective is {typeset(losses[0])} here and {typeset(losses[1])} there."
    if one.ids != other.ids:
        differs = next((t for t in range(n) if one.ids[t] != other.ids[t]), n)
        if differs:
            causal = session.model.config.causal and one.version == other.version
            text += f" The first {differs} tokens are equal"
            text += ", and so are their activations, up to rounding." if causal else "."
    if furthest["a"]:
        text += f" The activations differ most at “{where}”: by {percent(furthest['a'])} of their length."
    else:
        text += " All activations of the tokens that they share are equal."
    return {
        "one": _side(session, one), "other": _side(session, other), "rows": n, "stations": rows,
        "caption": text,
    }  # fmt: skip


def compare_station(
    session: Session, one: TracedSentence, other: TracedSentence, station: Station, limit: int = COLUMNS
) -> ComparedStation:
    """Return the matrices of a station of both traces, on one scale, and their difference, other minus one."""
    n = _rows(one, other)
    deltas = station.incoming or station.outgoing  # none arrives at the loss
    maps: list[ComparedMap] = []
    kinds: list[tuple[Literal["a", "delta"], tuple[str, ...]]] = [("a", station.a), ("delta", deltas)]
    for kind, name in [(kind, name) for kind, names in kinds for name in names]:
        x, y = (sentence.trace[name] for sentence in (one, other))
        if x.ndim != 2:
            continue
        difference = y[:n] - x[:n]
        columns = vocabulary_columns(one, difference) if station.over_vocabulary else None
        sides = [part if columns is None else part[:, columns] for part in (x, y, difference)]
        scale = max(picture(side, limit=limit)["scale"] for side in sides[:2])
        part = "" if columns is None else f"[:, {columns}]"
        maps.append({
            "kind": kind, "name": name, "symbol": symbol(name), "one": picture(sides[0], limit=limit, scale=scale),
            "other": picture(sides[1], limit=limit, scale=scale), "difference": picture(sides[2], limit=limit),
            "vocabulary": None if columns is None else vocabulary(session, columns), "width": x.shape[1],
            "lengths": difference.norm(dim=1).tolist(), "statistics": statistics(difference),
            "relative": _relative(x[:n], y[:n]), "caption": _about(session, one, x[:n], difference),
            "python": f"(other[{name!r}][:{n}] - trace[{name!r}][:{n}]){part}", "python_one": f"trace[{name!r}]{part}",
            "python_other": f"other[{name!r}]{part}",
        })  # fmt: skip
    return {
        "station": station.id, "rows": n, "one": _side(session, one), "other": _side(session, other), "maps": maps,
    }  # fmt: skip


def _rows(one: TracedSentence, other: TracedSentence) -> int:
    return min(len(one.ids), len(other.ids))


def _side(session: Session, sentence: TracedSentence) -> Side:
    return {
        "id": sentence.id, "text": sentence.text, "version": sentence.version, "loss": sentence.trace.loss,
        "steps": session.version(sentence.version).steps, "tokens": session.labels(sentence),
    }  # fmt: skip


def _apart(one: TracedSentence, other: TracedSentence, names: tuple[str, ...], n: int) -> float:
    pairs = [(one.trace[name], other.trace[name]) for name in names if one.trace[name].ndim == 2]
    return max((_relative(x[:n], y[:n]) for x, y in pairs), default=0.0)


def _relative(x: Tensor, y: Tensor) -> float:
    size = x.norm().item()
    change = torch.dist(y, x).item()
    return change / size if size else (math.inf if change else 0.0)


def _about(session: Session, one: TracedSentence, x: Tensor, difference: Tensor) -> str:
    lengths = difference.double().norm(dim=1)
    if not lengths.any():
        return "Equal."
    t = int(lengths.argmax())
    whole = x[t].double().norm().item()
    share = f"{percent(lengths[t].item() / whole)} of the row" if whole else "where the row is 0 here"
    return (
        f"The largest difference is at {quote(session.token_text(one.ids[t]))} (position {t + 1}): length"
        f" {typeset(lengths[t].item())}, {share}."
    )

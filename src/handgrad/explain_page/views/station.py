"""The data of one station: its matrices, its parameters with their gradients, and at the loss every position."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...model.gpt import GPT
from ...model.passes.objective import TEXT_LOSS, LogitDifference
from ...model.steps import signal
from ..follow.tensors import Tensors
from ..json_types.common import LossPosition, Position, Vocabulary
from ..json_types.station import FrozenParameter, Map, Matrix, StationView
from ..json_types.station import Parameter as ShownParameter
from ..presentation import captions
from ..presentation.chances import log_chances, position_of
from ..presentation.notation import symbol
from ..presentation.pictures import COLUMNS, ROWS, picture, statistics
from ..session.session import Session, TracedSentence
from ..stations.table import Parameter, Station
from . import swaps
from .by_hand import by_hand

VOCABULARY_COLUMNS = 64  # of a matrix with a column for every token of the vocabulary
VOCABULARY_ROWS = 32  # of a gradient with a row or a column for every token of the vocabulary
VOCABULARY_AXIS = {"grad_w_tok": 0, "grad_w_11": 1}


def at_station(
    session: Session,
    sentence: TracedSentence,
    station: Station,
    *,
    limit: int = COLUMNS,
    stored: int = 0,
    every: bool = True,
) -> StationView:
    """Return the matrices, parameters and gradients of one station; pictures have at most `limit` columns, and of what can
    be computed by hand `stored` entries have their terms, of one result unless `every`."""
    view: StationView = {
        "id": station.id, "maps": [], "parameters": [], "frozen": [], "parameters_caption": "", "by_hand": [],
    }  # fmt: skip
    labels = session.labels(sentence)
    if station.kind == "loss":
        view["positions"] = positions(session, sentence)
        targets = [session.token_text(int(i)) for i in sentence.targets[0, :-1]]
        losses = [row["loss"] for row in view["positions"] if row["loss"] is not None]
        view["loss_caption"] = captions.about_loss(labels, targets, losses)
    deltas = station.incoming or station.outgoing  # none arrives at the loss
    for a, delta in zip(station.a, deltas, strict=True) if station.a else ():
        view["maps"] += [
            _activation(session, sentence, station, a, limit),
            _error(session, sentence, station, delta, limit),
        ]
    if station.kind == "tokens":
        change = swaps.estimates(session, sentence)
        view["swaps"], view["swaps_caption"] = swaps.best_swaps(session, sentence, change)
        view["maps"] = [_swap_map(session, sentence, change, view["swaps_caption"])]
    with session.model_at(sentence.version) as model, torch.no_grad():
        tensors = Tensors(model, sentence.trace, session.network)
        _add_parameters(view, session, model, sentence, station, limit)
        view["by_hand"] = by_hand(session, sentence, tensors, station, stored, every)
    return view


def _activation(session: Session, sentence: TracedSentence, station: Station, name: str, limit: int) -> Map:
    x, labels = sentence.trace[name], session.labels(sentence)
    matrix, part = _matrix(session, sentence, x, station.over_vocabulary, limit)
    caption = captions.about_activations(x, labels)
    if station.over_vocabulary:
        what = "probability" if station.kind == "loss" else "score"
        caption = captions.about_scores(x, labels, session.token_text, what)
    python = f"trace[{name!r}]{part}"
    return {**matrix, "kind": "a", "name": name, "symbol": symbol(name), "caption": caption, "python": python}


def _error(session: Session, sentence: TracedSentence, station: Station, name: str, limit: int) -> Map:
    x = sentence.trace[name]
    matrix, part = _matrix(session, sentence, x, station.over_vocabulary, limit)
    caption = captions.about_error(x, session.labels(sentence), depends_on(session, sentence, station))
    python = f"trace[{name!r}]{part}"
    return {**matrix, "kind": "delta", "name": name, "symbol": symbol(name), "caption": caption, "python": python}


def _swap_map(session: Session, sentence: TracedSentence, change: Tensor, caption: str) -> Map:
    """The estimated change of the objective if another token stood at a position."""
    matrix, part = _matrix(session, sentence, change, True, VOCABULARY_COLUMNS)
    python = f"(trace[{signal(session.network.start)!r}] @ model.embed.w.T)"
    python = f"({python}[:, :{change.shape[1]}] - {python}.gather(1, trace['a_0'][:, None])){part}"
    return {**matrix, "kind": "delta", "name": "swaps", "symbol": "Δ₀ − Δ₀[own]", "caption": caption, "python": python}


def _matrix(
    session: Session, sentence: TracedSentence, x: Tensor, over_vocabulary: bool, limit: int
) -> tuple[Matrix, str]:
    """A matrix as the page draws it, and the index of what is drawn: of a matrix with a column per token of the vocabulary
    only some columns."""
    shown, words, part = x, None, ""
    if over_vocabulary:
        columns = vocabulary_columns(sentence, x)
        shown, words, part, limit = x[:, columns], vocabulary(session, columns), f"[:, {columns}]", VOCABULARY_COLUMNS
    return {
        "shape": list(x.shape), "picture": picture(shown, limit=limit), "vocabulary": words, "statistics": statistics(x),
        "lengths": x.norm(dim=1).tolist(),
    }, part  # fmt: skip


def vocabulary(session: Session, ids: list[int], axis: int = 1) -> Vocabulary:
    """The ids and the texts of the tokens whose columns or rows are shown."""
    return {"ids": ids, "words": [session.token_text(i) for i in ids], "axis": axis}


def vocabulary_columns(sentence: TracedSentence, x: Tensor, most: int = VOCABULARY_COLUMNS) -> list[int]:
    """The columns of a matrix over the vocabulary that are worth showing: the targets, then those with the largest
    entries."""
    targets = list(dict.fromkeys(t for t in sentence.targets[0].tolist() if t >= 0))[:most]
    size = torch.linalg.vector_norm(x, torch.inf, dim=0)
    size[targets] = -1
    best = torch.topk(size, min(most, x.shape[1])).indices.tolist()
    return [*targets, *(i for i in best if i not in targets)][:most]


def _add_parameters(
    view: StationView, session: Session, model: GPT, sentence: TracedSentence, station: Station, limit: int
) -> None:
    """Add the station's parameters to its view, those that are frozen by their sizes only."""
    norms: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for parameter in station.parameters:
        full = model.get_parameter(parameter.name)
        value = parameter.view(full.data)
        size: FrozenParameter = {
            "symbol": parameter.symbol, "shape": list(value.shape), "norm": value.norm().item()
        }  # fmt: skip
        sizes[parameter.symbol] = size["norm"]
        if not full.requires_grad:
            view["frozen"].append(size)
            continue
        shown = _parameter(session, sentence, parameter, size, limit)
        view["parameters"].append(shown)
        if shown["grad_norm"] is not None:
            norms[parameter.symbol] = shown["grad_norm"]
    if station.parameters:
        view["parameters_caption"] = captions.about_gradients(norms, sizes)


def _parameter(
    session: Session, sentence: TracedSentence, parameter: Parameter, size: FrozenParameter, limit: int
) -> ShownParameter:
    """A parameter and its gradient; of a gradient over the vocabulary the rows or columns of some tokens."""
    grad = sentence.trace.get(parameter.gradient)
    axis, part, words = VOCABULARY_AXIS.get(parameter.gradient), "", None
    shown = grad
    if grad is not None and axis is not None:
        ids = vocabulary_columns(sentence, grad if axis else grad.t(), VOCABULARY_ROWS)
        shown, part = grad.index_select(axis, torch.tensor(ids)), f"[:, {ids}]" if axis else f"[{ids}]"
        words = vocabulary(session, ids, axis)
    columns, rows = max(VOCABULARY_ROWS, limit // 2), max(VOCABULARY_ROWS, min(ROWS, limit))
    return {
        **size, "name": parameter.gradient, "grad_norm": sentence.trace.norms.get(parameter.gradient),
        "picture": None if shown is None else picture(shown, limit=columns, rows_limit=rows), "vocabulary": words,
        "python": f"trace[{parameter.gradient!r}]{part}",
    }  # fmt: skip


def depends_on(session: Session, sentence: TracedSentence, station: Station) -> Callable[[int], bool]:
    """Whether what is explained depends on a row of this station: at the end, on the rows whose targets it reads; before
    each attention, on all rows that these can see, and before each convolution, on the few before them."""
    config, stations = session.model.config, session.stations
    read = set(torch.nonzero(sentence.objective.select(sentence.targets[0], config.n_vocab) >= 0)[:, 0].tolist())
    for after in reversed(stations[stations.index(station) + 1 :]):
        if after.kind == "attention":
            read = {*range(max(read) + 1 if config.causal else len(sentence.ids))}
        elif after.kind == "convolution":
            read = {row - j for row in read for j in range(min(config.conv_taps, row + 1))}
    return lambda row: row in read


def positions(session: Session, sentence: TracedSentence, *, top: int = 5, bars: int = 6) -> list[LossPosition]:
    """Return, for every position, the target, the most probable tokens, and the largest entries of Δ_12."""
    logits, delta = session.logits(sentence), sentence.trace["delta_12"]
    rows: list[LossPosition] = []
    for t, target in enumerate(sentence.targets[0].tolist()):
        row = position_of(session, log_chances(logits[t]), sentence.ids[t], target, top)
        best = torch.topk(delta[t].abs(), min(bars, delta.shape[1])).indices.sort().values
        strongest = best[delta[t, best].abs().argsort(descending=True, stable=True)].tolist()  # equal ones by their ids
        rows.append({
            **row,
            "push": [
                {"word": session.token_text(i), "delta": delta[t, i].item(), "target": i == target}
                for i in strongest if delta[t, i]
            ],
            "caption": _about_push(session, sentence, t, row),
        })  # fmt: skip
    return rows


def _about_push(session: Session, sentence: TracedSentence, t: int, row: Position) -> str:
    """Describe row t of Δ_12, which depends on what is differentiated."""
    objective, after = sentence.objective, f"After {captions.quote(row['token'])}"
    if getattr(objective, "position", t) != t:
        return f"{after}: what is explained does not depend on this position, so its row of Δ₁₂ is 0."
    if isinstance(objective, LogitDifference):
        word, other = (captions.quote(session.token_text(id)) for id in (objective.token, objective.against))
        if not session.model.logit_map.identity:
            return f"{after}: the logit of {word} minus that of {other}, both as the softmax reads them, is differentiated."
        return (
            f"{after}: the logit of {word} minus that of {other} is differentiated, so Δ₁₂ is 1 for {word}, −1 for {other}"
            " and 0 for every other token."
        )
    if row["target"] is None:
        return "The last token has no target, so its row of Δ₁₂ is 0."
    push = sentence.trace["delta_12"][t, int(sentence.targets[0, t])].abs().item()
    mapped = not session.model.logit_map.identity
    return captions.about_push(row, push, len(sentence.ids) - 1 if objective == TEXT_LOSS else 1, mapped)

"""The data of each view of the page, ready for JSON: exact numbers from the trace, matrices reduced for drawing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import HandgradError
from ..model.objective import MEAN_LOSS, LogitDifference
from . import captions, swaps_view
from .chances import log_chances, losses_of, predicted, standing
from .exercises import offered_at
from .follow import by_hand
from .follow_tensors import Tensors
from .formulas import ERRATA, LOSSES, Formula, mathml
from .objectives import describe
from .pictures import ROWS, picture, statistics
from .session import Session, TracedSentence
from .sources import readable_first, source
from .stations import Parameter, Station
from .steps import OPTIMIZERS
from .symbols import symbol, symbols

VOCABULARY_COLUMNS = 64  # of a matrix with a column for every token of the vocabulary
VOCABULARY_ROWS = 32  # of a gradient with a row or a column for every token of the vocabulary
VOCABULARY_AXIS = {"grad_w_tok": 0, "grad_w_11": 1}
LARGE = 5_000_000  # parameters; above, finite differences are taken only for the station being viewed


def table(session: Session) -> dict[str, Any]:
    """Return what does not depend on the sentence: the model and its stations."""
    c = session.model.config
    trains = sum(p.numel() for p in session.model.parameters() if p.requires_grad)
    functions = sorted({name for station in session.stations for _, name in readable_first(station.sources)})
    used = sorted({id for station in session.stations for id in station.errata}, key=lambda id: int(id[1:]))
    return {
        "name": session.name, "note": session.note, "python": session.python, "better": session.better,
        "text": session.text, "max_tokens": session.max_tokens,
        "parameters": session.size, "trains": trains, "blocks": c.n_blocks, "heads": c.n_heads, "d": c.d_model,
        "vocabulary": c.n_vocab, "unit": session.tokenizer.unit,
        "hidden": c.hidden_width, "optimizers": OPTIMIZERS, "lora": trains < session.size,
        "large": session.size > LARGE, "errata": {id: ERRATA[id] for id in used},
        "code": {name: source(name) for name in functions},
        "stations": [_station_entry(session, station) for station in session.stations],
    }  # fmt: skip


def _station_entry(session: Session, station: Station) -> dict[str, Any]:
    def split(formulas: tuple[Formula, ...]) -> list[dict[str, Any]]:
        """Split a line of several formulas, so that a narrow page can break it."""
        parts = [(f.latex.split(r"\qquad"), f.equation) for f in formulas]
        return [
            {"math": [{"mathml": mathml(x), "latex": x.strip()} for x in line], "equation": equation}
            for line, equation in parts
        ]

    by_objective = {
        kind: {"summary": one["summary"], "forward": split(one["forward"]), "backward": split(one["backward"])}
        for kind, one in LOSSES.items()
        if station.id == "loss"
    }
    return {
        "id": station.id, "index": station.index, "block": station.block, "title": station.title,
        "summary": station.summary, "forward": split(station.forward), "backward": split(station.backward),
        "errata": station.errata, "sources": readable_first(station.sources), "stream": station.stream,
        "outgoing": symbols(station.outgoing), "symbol": symbols(station.a) if station.a else "a₀",
        "delta_symbol": symbols(station.incoming), "derived_in": [f"docs/layers/{page}.md" for page in station.derived_in],
        "exercises": offered_at(station, session.model), "by_objective": by_objective,
    }  # fmt: skip


# ── overview ───────────────────────────────────────────────────────────────────────────────────────────────────────


def overview(session: Session, sentence: TracedSentence) -> dict[str, Any]:
    """Return the tokens, the loss, ‖a‖ and ‖Δ‖ per token at every station, and the norm of every gradient."""
    t = sentence.trace
    labels = labels_of(session, sentence)
    losses = losses_of(t["a_12"][:-1], sentence.targets[0, :-1])
    flows = []
    for station in session.stations:
        a = _lengths(sentence, station.a) if station.id != "loss" else None
        flows.append({"id": station.id, "a": _listed(a), "delta": _listed(_lengths(sentence, station.incoming))})
    groups, sizes = _groups(session, sentence)
    flow = _flow(session, sentence)
    return {
        "id": sentence.id, "text": sentence.text, "version": sentence.version,
        "steps": session.version(sentence.version).steps,
        "tokens": [{"id": id, "label": label} for id, label in zip(sentence.ids, labels, strict=True)],
        "loss": sum(losses) / len(losses) if sentence.objective != MEAN_LOSS else t.loss, "losses": losses,
        "objective": describe(session, sentence), "flows": flows,
        "flow": flow,
        "groups": groups, "groups_caption": captions.about_groups(sizes),
    }  # fmt: skip


def _flow(session: Session, sentence: TracedSentence) -> dict[str, Any]:
    """Return the error of every token at every depth, from Δ_1 to Δ_11, each row also as shares of its own squares. Δ_4 is
    Δ_5 and Δ_9 is Δ_10: each pair is one row."""
    rows: list[dict[str, Any]] = []
    for station in session.stations:
        if station.index in (0, 4, 9, 12, 13):
            continue
        a, delta = _lengths(sentence, station.a), _lengths(sentence, station.incoming)
        assert a is not None and delta is not None
        squares = delta.double().square()
        where = "" if station.block is None else f" of block {station.block + 1}"
        equal = {5: "Δ₄ = ", 10: "Δ₉ = "}.get(station.index, "")
        rows.append({
            "station": station.id, "label": f"{equal}{symbols(station.incoming)}{where}",
            "a_label": f"{symbols(station.a)}{where}", "name": station.incoming[0],
            "a": a.tolist(), "delta": delta.tolist(), "share": (squares / squares.sum().clamp(min=1e-300)).tolist(),
            "python": f"trace[{station.incoming[0]!r}].norm(dim=1)",
        })  # fmt: skip
    return {"rows": rows, "python": _flow_python(session)}


def _flow_python(session: Session) -> dict[str, str]:
    """The lines of Python that make the data of the gradient flow, by what is shown."""
    inside = [s for s in session.stations if s.block == 0 and s.index not in (4, 9)]
    parts = [[name.rpartition("_")[2] for name in s.incoming] for s in inside]
    lengths = (
        f"parts = {parts}\n\ndef lengths(kind):\n"
        f"    inside = [[f'blocks.{{b}}.{{kind}}_{{i}}' for i in part] for b in range({session.model.config.n_blocks})"
        " for part in parts]\n"
        "    rows = [[f'blocks.0.{kind}_1'], *inside, [f'{kind}_11']]\n"
        "    return torch.stack([torch.cat([trace[x] for x in row], 1).norm(dim=1) for row in rows])\n\n"
    )
    shown = {
        "share": "lengths('delta') ** 2 / (lengths('delta') ** 2).sum(1, keepdim=True)",
        "delta": "lengths('delta')", "product": "lengths('a') * lengths('delta')", "a": "lengths('a')",
    }  # fmt: skip
    return {key: lengths + line for key, line in shown.items()}


def _groups(session: Session, sentence: TracedSentence) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the norm of every parameter's gradient, layer by layer."""
    groups: list[dict[str, Any]] = []
    sizes: dict[str, float] = {}
    for station in session.stations:
        for parameter in station.parameters:
            layer = _layer(station)
            tied = parameter.symbol == "w_tok" and session.model.config.tied
            where = f"{layer} and logits (tied)" if tied else layer
            norm = sentence.trace.norms.get(parameter.gradient)
            if norm is None or parameter.shared:
                continue
            group = {"layer": layer, "where": where, "station": station.id, "symbol": parameter.symbol, "norm": norm}
            groups.append(group)
            sizes[f"{parameter.symbol} in {where}"] = norm
    return groups, sizes


def _layer(station: Station) -> str:
    if station.block is not None:
        return f"block {station.block + 1}"
    return "embedding" if station.index <= 1 else "head"


def labels_of(session: Session, sentence: TracedSentence) -> list[str]:
    return [session.token_text(id) for id in sentence.ids]


def _lengths(sentence: TracedSentence, names: tuple[str, ...]) -> Tensor | None:
    """The length of each token's row, over all these matrices side by side."""
    return torch.cat([sentence.trace[name] for name in names], 1).norm(dim=1) if names else None


def _listed(x: Tensor | None) -> list[float] | None:
    return None if x is None else x.tolist()


# ── one station ─────────────────────────────────────────────────────────────────────────────────────────────────────


def find_station(session: Session, id: str) -> Station:
    if id not in session.by_id:
        raise HandgradError(f"there is no station {id!r}: valid ids are a_0, a_1, blocks.0.a_2 … a_12, loss")
    return session.by_id[id]


def at_station(session: Session, sentence: TracedSentence, station: Station, limit: int = 256) -> dict[str, Any]:
    """Return the matrices, parameters and gradients of one station; pictures have at most `limit` columns."""
    labels = labels_of(session, sentence)
    view: dict[str, Any] = {"id": station.id, "maps": [], "parameters": [], "frozen": []}
    deltas = station.incoming
    if station.id == "loss":
        deltas = station.outgoing  # none arrives here
        view["positions"] = _positions(session, sentence)
        targets = [session.token_text(int(i)) for i in sentence.targets[0, :-1]]
        losses = [row["loss"] for row in view["positions"] if row["target"] is not None]
        view["loss_caption"] = captions.about_loss(labels, targets, losses)
    pairs = zip(station.a, deltas, strict=True)
    for kind, name in [(kind, name) for pair in pairs for kind, name in zip(("a", "delta"), pair, strict=True)]:
        x = sentence.trace[name]
        if kind == "delta":
            caption = captions.about_error(x, labels, depends_on(session, sentence, station))
        elif station.index >= 12:
            what = "probability" if station.id == "loss" else "score"
            caption = captions.about_scores(x, labels, session.token_text, what)
        else:
            caption = captions.about_activations(x, labels)
        columns = vocabulary_columns(sentence, x) if station.index >= 12 else None
        view["maps"].append(_map(session, x, kind, name, caption, limit, columns))
    if station.id == "a_0":
        found = swaps_view.swaps(session, sentence, labels)
        change = found.pop("matrix")
        python = "(trace['blocks.0.delta_1'] @ model.embed.w.T)"
        python = f"{python}[:, :{change.shape[1]}] - {python}.gather(1, trace['a_0'][:, None])"
        columns = vocabulary_columns(sentence, change)
        made = _map(
            session, change, "delta", "swaps", found["swaps_caption"], limit, columns, f"({python})[:, {columns}]"
        )
        view |= {**found, "maps": [{**made, "symbol": "Δ₀ − Δ₀[own]"}]}
    norms: dict[str, float] = {}
    sizes: dict[str, float] = {}
    with session.model_at(sentence.version) as model:
        tensors = Tensors(model, sentence.trace)
        for parameter in station.parameters:
            shown = _parameter(session, tensors, sentence, parameter, limit)
            sizes[parameter.symbol] = shown["norm"]
            if shown["frozen"]:
                view["frozen"].append({key: shown[key] for key in ("symbol", "shape", "norm")})
                continue
            view["parameters"].append(shown)
            if shown["grad_norm"] is not None:
                norms[parameter.symbol] = shown["grad_norm"]
    view["parameters_caption"] = captions.about_gradients(norms, sizes) if station.parameters else ""
    return view


def _map(
    session: Session,
    x: Tensor,
    kind: str,
    name: str,
    caption: str,
    limit: int,
    columns: list[int] | None = None,
    python: str | None = None,
) -> dict[str, Any]:
    """A matrix as the page draws it; of a matrix with a column per token of the vocabulary only these columns."""
    shown = x if columns is None else x[:, columns]
    words = vocabulary(session, columns)
    return {
        "kind": kind, "name": name, "symbol": symbol(name), "shape": list(x.shape),
        "picture": picture(shown, limit=limit if columns is None else VOCABULARY_COLUMNS),
        "vocabulary": words, "statistics": statistics(x),
        "lengths": x.norm(dim=1).tolist(), "caption": caption,
        "python": python or f"trace[{name!r}]" + ("" if columns is None else f"[:, {columns}]"),
    }  # fmt: skip


def vocabulary(session: Session, columns: list[int] | None) -> dict[str, Any] | None:
    """The ids and the texts of the tokens whose columns are shown."""
    return None if columns is None else {"ids": columns, "words": [session.token_text(i) for i in columns]}


def vocabulary_columns(sentence: TracedSentence, x: Tensor, most: int = VOCABULARY_COLUMNS) -> list[int]:
    """The columns of a matrix over the vocabulary that are worth showing: the targets, then those with the largest
    entries."""
    targets = list(dict.fromkeys(t for t in sentence.targets[0].tolist() if t >= 0))[:most]
    size = torch.linalg.vector_norm(x, torch.inf, dim=0)
    size[targets] = -1
    best = torch.topk(size, min(most, x.shape[1])).indices.tolist()
    return [*targets, *(i for i in best if i not in targets)][:most]


def _parameter(
    session: Session, tensors: Tensors, sentence: TracedSentence, parameter: Parameter, limit: int
) -> dict[str, Any]:
    """A parameter and its gradient; of a gradient over the vocabulary the rows or columns of some tokens."""
    full = tensors.model.get_parameter(parameter.name)
    value = parameter.view(full.data)
    grad = sentence.trace.get(parameter.gradient) if full.requires_grad else None
    axis, part, words = VOCABULARY_AXIS.get(parameter.gradient), "", None
    shown = grad
    if grad is not None and axis is not None:
        ids = vocabulary_columns(sentence, grad if axis else grad.t(), VOCABULARY_ROWS)
        shown, part = grad.index_select(axis, torch.tensor(ids)), f"[:, {ids}]" if axis else f"[{ids}]"
        words = {**(vocabulary(session, ids) or {}), "axis": axis}
    columns, rows = max(VOCABULARY_ROWS, limit // 2), max(VOCABULARY_ROWS, min(ROWS, limit))
    return {
        "symbol": parameter.symbol, "shape": list(value.shape), "frozen": not full.requires_grad,
        "norm": value.norm().item(), "name": parameter.gradient,
        "grad_norm": sentence.trace.norms.get(parameter.gradient),
        "picture": None if shown is None else picture(shown, limit=columns, rows_limit=rows), "vocabulary": words,
        "by_hand": None if grad is None else by_hand(tensors, sentence, parameter.gradient, grad),
        "python": f"trace[{parameter.gradient!r}]{part}",
    }  # fmt: skip


def depends_on(session: Session, sentence: TracedSentence, station: Station) -> Callable[[int], bool]:
    """Whether what is explained depends on a row of this station: after the last attention, on the rows whose targets it
    reads; before, on all rows that these can see."""
    config = session.model.config
    read = set(torch.nonzero(sentence.objective.select(sentence.targets[0], config.n_vocab) >= 0)[:, 0].tolist())
    if (station.block is None and station.index > 1) or (station.block == config.n_blocks - 1 and station.index >= 3):
        return lambda row: row in read
    return lambda row: not config.causal or row <= max(read)


def _positions(session: Session, sentence: TracedSentence, top: int = 5, bars: int = 6) -> list[dict[str, Any]]:
    """Return, for every position, the target, the most probable tokens, and the largest entries of Δ_12."""
    logits, delta = sentence.trace["a_12"], sentence.trace["delta_12"]
    labels = labels_of(session, sentence)
    rows = []
    for t, target in enumerate(sentence.targets[0].tolist()):
        log_p = log_chances(logits[t])
        strongest = torch.topk(delta[t].abs(), min(bars, delta.shape[1])).indices.tolist()
        row: dict[str, Any] = {
            "token": labels[t], "target": None, "probability": None, "rank": None,
            "top": predicted(session, log_p, top),
            "push": [
                {"word": session.token_text(i), "delta": delta[t, i].item(), "target": i == target}
                for i in strongest if delta[t, i]
            ],
        }  # fmt: skip
        if target >= 0:
            row |= standing(session, log_p, target)
        rows.append({**row, "caption": _about_push(session, sentence, t, row)})
    return rows


def _about_push(session: Session, sentence: TracedSentence, t: int, row: dict[str, Any]) -> str:
    """Describe row t of Δ_12, which depends on what is differentiated."""
    objective, after = sentence.objective, f"After {captions.quote(row['token'])}"
    if getattr(objective, "position", t) != t:
        return f"{after}: what is explained does not depend on this position, so its row of Δ₁₂ is 0."
    if isinstance(objective, LogitDifference):
        word, other = (captions.quote(session.token_text(id)) for id in (objective.token, objective.against))
        return (
            f"{after}: the logit of {word} minus that of {other} is differentiated, so Δ₁₂ is 1 for {word}, −1 for {other}"
            " and 0 for every other token."
        )
    if row["target"] is None:
        return "The last token has no target, so its row of Δ₁₂ is 0."
    push = sentence.trace["delta_12"][t, row["target_id"]].abs().item()
    return captions.about_push(row, push, len(sentence.ids) - 1 if objective == MEAN_LOSS else 1)

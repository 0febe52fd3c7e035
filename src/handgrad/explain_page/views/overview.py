"""What does not depend on a station: the model and its stations, a traced sentence as a whole, and the gradient flow."""

import torch
from torch import Tensor

from ...model.passes.objective import TEXT_LOSS
from ...model.steps import signal
from ..exercises import offered_at
from ..json_types.model import Flow, FlowPython, FlowRow, FormulaLine, Group, More, Overview, StationEntry, Table
from ..presentation import captions
from ..presentation.chances import losses_of
from ..presentation.notation import symbol, symbols
from ..presentation.symbols import entries
from ..session.objectives import describe
from ..session.session import Session, TracedSentence
from ..stations.end_formulas import LOSSES, explained
from ..stations.formulas import ERRATA, Formula, mathml
from ..stations.network import NEURONS, letter_of
from ..stations.sources import readable_first, source
from ..stations.table import Station
from .step import OPTIMIZERS


def table(session: Session) -> Table:
    """Return what does not depend on the sentence: the model and its stations."""
    c = session.model.config
    trains = sum(p.numel() for p in session.model.parameters() if p.requires_grad)
    functions = sorted({name for station in session.stations for _, name in readable_first(station.sources)})
    used = sorted({id for station in session.stations for id in station.errata}, key=lambda id: int(id[1:]))
    return {
        "name": session.name, "note": session.note, "python": session.python, "better": session.better,
        "text": session.text, "unit": session.tokenizer.unit, "parameters": session.size, "trains": trains,
        "blocks": c.n_blocks, "heads": c.n_heads, "d": c.d_model, "hidden": c.hidden_width,
        "optimizers": OPTIMIZERS, "lora": trains < session.size,
        "large": session.large, "torch": True, "errata": {id: ERRATA[id] for id in used},
        "code": {name: source(name) for name in functions},
        "stations": [_station_entry(session, station) for station in session.stations],
        "symbols": entries(),
    }  # fmt: skip


def _station_entry(session: Session, station: Station) -> StationEntry:
    losses = LOSSES if station.kind == "loss" else {}
    return {
        "id": station.id, "kind": station.kind, "block": station.block, "title": station.title,
        "summary": station.summary, "forward": _lines(station.forward), "backward": _lines(station.backward),
        "errata": list(station.errata), "sources": readable_first(station.sources), "more": _more(session, station),
        "reads": list(dict.fromkeys(_shown_at(session, name) for name in station.inputs)),
        "outgoing": symbols(station.outgoing), "symbol": symbols(station.a) if station.a else "a₀",
        "delta_symbol": symbols(station.incoming), "derived_in": [f"docs/layers/{page}.md" for page in station.derived_in],
        "exercises": offered_at(station, session.model),
        "by_objective": {
            kind: {"summary": one.summary, "forward": _lines(one.forward), "backward": _lines(one.backward)}
            for kind, one in ((kind, explained(kind, session.model.logit_map)) for kind in losses)
        },
    }  # fmt: skip


def _shown_at(session: Session, name: str) -> str | None:
    """The station with this output; None of what comes into a block."""
    maker = session.network.maker(name)
    if maker is not None and maker.kind in ("embedding", "next"):
        return None
    return next((s.id for s in session.stations if name in s.a), None)


def _lines(formulas: tuple[Formula, ...]) -> list[FormulaLine]:
    """Split a line of several formulas, so that a narrow page can break it."""
    return [{"math": [mathml(x) for x in f.latex.split(r"\qquad")], "equation": f.equation} for f in formulas]


def _more(session: Session, station: Station) -> list[More]:
    found: list[More] = []
    if station.kind == "tokens":
        found.append("swaps")
    if station.kind == "attention":
        found.append("head")
    if station.stream:
        found.append("lens")
    b, network = station.block, session.network
    if b in network.having(*NEURONS) and station.a in [s.outputs for s in network.neurons(b)]:
        found.append("neurons")
    return found


def overview(session: Session, sentence: TracedSentence) -> Overview:
    """Return the tokens, the loss, ‖a‖ and ‖Δ‖ per token at every station, and the norm of every gradient."""
    t = sentence.trace
    losses = losses_of(session.logits(sentence)[:-1], sentence.targets[0, :-1])
    groups, sizes = _groups(session, sentence)
    return {
        "id": sentence.id, "text": sentence.text, "version": sentence.version,
        "steps": session.version(sentence.version).steps, "tokens": session.tokens(sentence.ids),
        "loss": sum(losses) / len(losses) if sentence.objective != TEXT_LOSS else t.loss, "losses": losses,
        "objective": describe(session, sentence),
        "flows": [
            {"id": s.id, "a": _lengths(sentence, () if s.kind == "loss" else s.a), "delta": _lengths(sentence, s.incoming)}
            for s in session.stations
        ],
        "groups": groups, "groups_caption": captions.about_groups(sizes),
    }  # fmt: skip


def _lengths(sentence: TracedSentence, names: tuple[str, ...]) -> list[float] | None:
    return rows_of(sentence, names).tolist() if names else None


def rows_of(sentence: TracedSentence, names: tuple[str, ...]) -> Tensor:
    """The length of each token's row, over all these matrices side by side."""
    beside = torch.cat([sentence.trace[name] for name in names], 1)
    lengths: Tensor = beside.norm(dim=1)
    return lengths


def _groups(session: Session, sentence: TracedSentence) -> tuple[list[Group], dict[str, float]]:
    """Return the norm of every parameter's gradient, layer by layer."""
    groups: list[Group] = []
    sizes: dict[str, float] = {}
    for station in session.stations:
        layer = "embedding" if station.kind == "embedding" else "head"
        layer = layer if station.block is None else f"block {station.block + 1}"
        for parameter in station.parameters:
            tied = parameter.symbol == "w_tok" and session.model.config.tied
            where = f"{layer} and logits (tied)" if tied else layer
            norm = sentence.trace.norms.get(parameter.gradient)
            if norm is None or parameter.shared:
                continue
            groups.append(
                {"layer": layer, "where": where, "station": station.id, "symbol": parameter.symbol, "norm": norm}
            )
            sizes[f"{parameter.symbol} in {where}"] = norm
    return groups, sizes


# ── the gradient flow ───────────────────────────────────────────────────────────────────────────────────────────────


def flow(session: Session, sentence: TracedSentence) -> Flow:
    """Return the error of every token at every depth, each row also as shares of its own squares. What an addition adds has
    the addition's error signal: both are one row."""
    rows: list[FlowRow] = []
    for station in _rows(session):
        a, delta = rows_of(sentence, station.a), rows_of(sentence, station.incoming)
        squares = delta.double().square()
        where = "" if station.block is None else f" of block {station.block + 1}"
        equal = [signal(name) for name in station.inputs if session.network.added(name) is not None]
        label = " = ".join([*map(symbol, equal), symbols(station.incoming)])
        ends = station.block is None or station.a == session.network.blocks[station.block][-1].outputs
        rows.append({
            "station": station.id, "inside": None if ends else station.block, "label": f"{label}{where}",
            "a_label": f"{symbols(station.a)}{where}", "name": station.incoming[0],
            "a": a.tolist(), "delta": delta.tolist(), "share": (squares / squares.sum().clamp(min=1e-300)).tolist(),
            "python": f"trace[{station.incoming[0]!r}].norm(dim=1)",
        })  # fmt: skip
    return {"rows": rows, "python": _flow_python(session)}


def _rows(session: Session) -> list[Station]:
    """The stations with a row: not the tokens and what is over the vocabulary, nor what only an addition reads."""
    return [
        s
        for s in session.stations
        if s.kind != "tokens" and not s.over_vocabulary and session.network.added(s.a[0]) is None
    ]


def _flow_python(session: Session) -> FlowPython:
    """The lines of Python that make the data of the gradient flow, by what is shown."""
    parts = [[letter_of(name) for name in s.incoming] for s in _rows(session) if s.block == 0]
    lengths = (
        f"parts = {parts}\n\ndef lengths(kind):\n"
        f"    inside = [[f'blocks.{{b}}.{{kind}}_{{i}}' for i in part] for b in range({session.model.config.n_blocks})"
        " for part in parts]\n"
        f"    rows = [[f'blocks.0.{{kind}}_{letter_of(session.network.start)}'], *inside, [f'{{kind}}_11']]\n"
        "    return torch.stack([torch.cat([trace[x] for x in row], 1).norm(dim=1) for row in rows])\n\n"
    )
    return {
        "share": lengths + "lengths('delta') ** 2 / (lengths('delta') ** 2).sum(1, keepdim=True)",
        "delta": lengths + "lengths('delta')", "product": lengths + "lengths('a') * lengths('delta')",
        "a": lengths + "lengths('a')",
    }  # fmt: skip

"""What if: a head, a skip connection, a neuron or one attention weight is set to 0, or the error on its way back is.

Forward, the change of the objective predicted from the gradient, −⟨Δ, a⟩ over what is set to 0, stands beside the measured
one. Backward the objective cannot change: what changes are the error signals below and the gradients. Either way the model
runs twice by the same path, without and with the change, so that what the change does not reach is equal bit for bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HandgradError
from ..files.scratch import TensorFile
from ..model.edited import Edits
from ..model.gpt import GPT
from ..model.objective import MEAN_LOSS, Objective
from ..model.trace import Trace, edited_pass, gradients, own_gradients, record_pass
from . import captions
from .chances import chance, log_chances
from .marks import percent, typeset
from .pictures import length
from .session import Session, TracedSentence
from .symbols import symbol

Index = tuple[Any, ...]
KINDS = ("head", "skip", "neuron", "weight")
GRADIENTS_MOVED = "{x: (changed[x] - base[x]).norm() for x in base if 'grad_' in x}"  # in Python, for the reader


@dataclass(frozen=True)
class Place:
    """What is set to 0: entries of a tensor of the trace, and of the error signal in the backward pass."""

    name: str  # of the activation
    delta: str  # of the error signal
    index: Index
    label: str
    cut: str = ""  # where the error is set to 0, if this is one of several ways that it takes through the place

    def zeroed(self, x: Tensor) -> Tensor:
        x[self.index] = 0
        return x

    def python(self, name: str, objective: Objective, compared: str) -> str:
        """Lines that make the same change to a tensor of that name, and what to compare then."""
        index = ", ".join(map(_written, self.index)) or "..."
        zero = f"def zero(x):\n    x[{index}] = 0\n    return x\n"
        what = "" if objective == MEAN_LOSS else f"objective=hg.{objective}, "
        run = f"hg.trace(model, tokens, targets, {what}edit="
        return f"{zero}\nbase = {run}{{}})\nchanged = {run}{{{name!r}: zero}})\n{compared}"


def place_of(session: Session, sentence: TracedSentence, kind: str, block: int, **where: int | None) -> Place:
    """The place that a request means: head; skip (edge=5 or 10); neuron; weight (head, row, column)."""
    config, n = session.model.config, len(sentence.ids)

    def number(name: str, end: int) -> int:
        value = where.get(name)
        if value is None or not 0 <= value < end:
            raise HandgradError(f"{kind}: {name} must be between 0 and {end - 1}, not {value}")
        return value

    if kind not in KINDS:
        raise HandgradError(f"unknown change {kind[:40]!r}: choose one of {', '.join(KINDS)}")
    if not 0 <= block < config.n_blocks:
        raise HandgradError(f"there is no block {block}: blocks go from 0 to {config.n_blocks - 1}")
    here, in_block = f"blocks.{block}.", f"of block {block + 1}"
    if kind == "head":
        h, width = number("head", config.n_heads), config.value_width
        columns = slice(h * width, (h + 1) * width)
        return Place(here + "a_3", here + "delta_3", (slice(None), columns), f"head {h + 1} {in_block}")
    if kind == "skip":
        edge = where.get("edge")
        if edge not in (5, 10):
            raise HandgradError("skip: edge must be 5 (past the attention) or 10 (past the feed-forward layer)")
        past = "attention" if edge == 5 else "feed-forward layer"
        label = f"the skip connection past the {past} {in_block}"
        return Place(f"{here}skip_{edge}", f"{here}delta_skip_{edge}", (), label)
    if kind == "neuron":
        j = number("neuron", config.hidden_width)
        return Place(here + "a_8", here + "delta_8", (slice(None), j), f"neuron {j} {in_block}")
    h, t, s = number("head", config.n_heads), number("row", n), number("column", n)
    labels = [captions.quote(session.token_text(sentence.ids[i])) for i in (t, s)]
    label = f"the attention of {labels[0]} to {labels[1]} in head {h + 1} {in_block}"
    cut = f"the score of {label} (through the value it still flows)"
    return Place(here + "rho", here + "delta_raw", (h, t, s), label, cut)


def signal_at(t: Trace, place: Place) -> tuple[Tensor, Tensor]:
    """The activation of a place and its error signal, from a trace without edits."""
    here, _, last = place.name.rpartition(".")
    a, delta = {
        "skip_5": ("a_1", "delta_5"), "skip_10": ("a_5", "delta_10"), "a_3": ("a_3", "delta_3"), "a_8": ("a_8", "delta_8"),
        "rho": ("rho", "delta_3"),
    }[last]  # fmt: skip
    x, signal = t[f"{here}.{a}"], t[f"{here}.{delta}"]
    if last == "rho":  # Δ_ρ = Δ_3 vᵗ
        v = t[f"{here}.v"].repeat_interleave(len(x) // len(t[f"{here}.v"]), 0)
        signal = signal.view(len(signal), len(x), -1).transpose(0, 1) @ v.mT.to(signal.dtype)
    return x, signal


def predicted(t: Trace, place: Place) -> float:
    """−⟨Δ, a⟩: the change of the objective to first order if these entries become 0."""
    x, delta = (tensor[place.index].double() for tensor in signal_at(t, place))
    return -(x * delta).sum().item()


def what_if(session: Session, sentence: TracedSentence, place: Place) -> dict[str, Any]:
    """Set a place to 0 in the forward pass: predicted and measured change, and the probabilities before and after."""
    with session.model_at(sentence.version) as model:
        (value, before), (measured, after) = (
            _forward_pass(model, sentence, edit) for edit in ({}, {place.name: place.zeroed})
        )
    guess = predicted(sentence.trace, place)
    moves = []
    for t, target in enumerate(sentence.targets[0].tolist()):
        first, second = int(before[t].argmax()), int(after[t].argmax())
        was, now = (chance(log_chances(x[t])[target]) if target >= 0 else None for x in (before, after))
        moves.append({
            "token": session.token_text(sentence.ids[t]),
            "target": session.token_text(target) if target >= 0 else None,
            "before": was, "after": now,
            "first_before": session.token_text(first), "first_after": session.token_text(second),
        })  # fmt: skip
    return {
        "label": place.label, "name": place.name, "value": value, "predicted": guess, "measured": measured - value,
        "moves": moves, "caption": _about(place, guess, measured - value),
        "python": place.python(place.name, sentence.objective, "changed.loss - base.loss"),
    }  # fmt: skip


def _forward_pass(model: GPT, sentence: TracedSentence, edit: Edits) -> tuple[float, Tensor]:
    """The value of the objective with these edits, and the logits (n, V)."""
    values: dict[str, Tensor] = {}
    run = edited_pass(model, sentence.tokens, sentence.targets, None, sentence.objective, edit, values.__setitem__)
    with torch.no_grad():
        return run.forward(sentence.objective)[0], values["a_12"]


def _about(place: Place, guess: float, change: float) -> str:
    if change == 0:
        return f"Without {place.label} the objective is the same; the gradient predicted a change of {typeset(guess)}."
    text = f"Without {place.label} the objective changes by {typeset(change)}; the gradient predicted {typeset(guess)}."
    if guess * change < 0 or abs(change - guess) > max(abs(change), abs(guess)) / 2:
        text += " Removing it is too large a step for a first-order prediction."
    return text


def what_if_error(session: Session, sentence: TracedSentence, place: Place) -> dict[str, Any]:
    """Set the error signal of a place to 0 in the backward pass: which signals and gradients change, and by how much."""
    base_grads = TensorFile()  # as large as the model, so not in memory
    moved: dict[str, tuple[float, float, float]] = {}  # of each gradient: its lengths, and the length of its change
    equal: set[str] = set()

    def keep(grads: dict[str, Tensor]) -> None:
        for name, grad in grads.items():
            base_grads.append(name, grad.shape, grad)

    def compare(grads: dict[str, Tensor]) -> None:
        for name, grad in grads.items():
            base = base_grads[name]
            if torch.equal(grad, base):
                equal.add(name)
            moved[name] = (length(base), length(grad), length(grad - base))

    with session.model_at(sentence.version) as model:
        before = _complete_pass(model, sentence, {}, keep)
        after = _complete_pass(model, sentence, {place.delta: place.zeroed}, compare)
    rows: list[dict[str, Any]] = []
    stations = []
    for station in session.stations:
        for name in station.incoming:
            stations.append({
                "station": station.id, "symbol": symbol(name), "before": length(before[name]),
                "change": length(after[name] - before[name]),
            })  # fmt: skip
        for parameter in station.parameters:
            if parameter.gradient not in moved or parameter.shared:
                continue
            whole, cut, change = moved[parameter.gradient]
            rows.append({
                "station": station.id, "block": station.block, "symbol": parameter.symbol, "name": parameter.gradient,
                "before": whole, "after": cut, "change": change,
            })  # fmt: skip
    rows.sort(key=lambda row: _share(row["change"], row["before"]), reverse=True)
    touched = [row for row in rows if row["name"] not in equal]
    path = place.cut or place.label
    caption = f"{len(touched)} of {len(rows)} gradients change if no error flows back through {path}."
    if touched:
        first = touched[0]
        where = "" if first["block"] is None else f" of block {first['block'] + 1}"
        by = f"by {percent(_share(first['change'], first['before']))}"
        by = by if first["before"] else f"from 0 to {typeset(first['after'])}"
        caption += f" The most, relative to its length: ∂{first['symbol']}{where}, {by}."
        caption += " The others are equal bit for bit." if len(touched) < len(rows) else ""
    return {
        "label": path, "name": place.delta, "gradients": touched, "count": len(rows), "signals": stations,
        "caption": caption, "python": place.python(place.delta, sentence.objective, GRADIENTS_MOVED),
    }  # fmt: skip


def _share(change: float, whole: float) -> float:
    return change / whole if whole else (math.inf if change else 0.0)


def _complete_pass(
    model: GPT, sentence: TracedSentence, edit: Edits, finished: Callable[[dict[str, Tensor]], None]
) -> dict[str, Tensor]:
    """The tensors of a pass with these edits; `finished` gets the gradients of each layer, which are then freed."""
    values: dict[str, Tensor] = {}

    def done(parameters: list[nn.Parameter]) -> None:
        finished(gradients(model, parameters))
        for p in parameters:
            p.grad = None

    with own_gradients(model.parameters()):
        record_pass(
            model, sentence.tokens, sentence.targets, objective=sentence.objective, edit=edit,
            record=values.__setitem__, finished=done,
        )  # fmt: skip
    return values


def effects(session: Session, sentence: TracedSentence, neurons: int = 5) -> dict[str, Any]:
    """The predicted change for every head and skip connection, and for the neurons of each block with the largest."""
    t, config = sentence.trace, session.model.config
    heads, skips, best = [], [], []

    def by_column(a: str, delta: str) -> Tensor:
        return -(t[a].double() * t[delta].double()).sum(0)

    for b in range(config.n_blocks):
        here = f"blocks.{b}."
        heads.append(by_column(here + "a_3", here + "delta_3").view(config.n_heads, -1).sum(1).tolist())
        skips.append(
            [
                by_column(here + "a_1", here + "delta_5").sum().item(),
                by_column(here + "a_5", here + "delta_10").sum().item(),
            ]
        )
        blame = by_column(here + "a_8", here + "delta_8")
        top = torch.topk(blame.abs(), min(neurons, len(blame))).indices.tolist()
        best.append([{"neuron": j, "predicted": blame[j].item()} for j in top])
    return {"heads": heads, "skips": skips, "neurons": best}


def _written(i: object) -> str:
    if isinstance(i, slice):
        return ":" if i == slice(None) else f"{i.start}:{i.stop}"
    return str(i)

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

from ...errors import HandgradError
from ...files.scratch import TensorFile
from ...model.gpt import GPT
from ...model.inspect.edits import Edits
from ...model.inspect.trace import Trace, edited_forward, gradients, own_gradients, record_pass
from ...model.passes.objective import TEXT_LOSS, Objective
from ..json_types.questions import Effects, MovedGradient, MovedSignal, NeuronEffect, WhatIf, WhatIfError, WhatIfMove
from ..presentation import captions
from ..presentation.chances import chance, log_chances
from ..presentation.notation import percent, symbol, typeset
from ..presentation.pictures import length
from ..session.session import Session, TracedSentence
from ..stations.network import NEURONS, Network, NetworkStep, letter_of

Index = tuple[Any, ...]
KINDS = ("head", "skip", "neuron", "weight")
GRADIENTS_MOVED = "{x: (changed[x] - base[x]).norm() for x in base if 'grad_' in x}"  # in Python, for the reader


@dataclass(frozen=True)
class Place:
    """What is set to 0: entries of a tensor of the trace, and of the error signal in the backward pass."""

    name: str  # of the activation, as edits call it
    delta: str  # of the error signal, as edits call it
    index: Index
    label: str
    a: str  # the activation and its error signal in a trace without edits
    signal: str
    cut: str = ""  # where the error is set to 0, if this is one of several ways that it takes through the place

    def zeroed(self, x: Tensor) -> Tensor:
        x[self.index] = 0
        return x

    def python(self, name: str, objective: Objective, compared: str) -> str:
        """Lines that make the same change to a tensor of that name, and what to compare then."""
        index = ", ".join(map(_written, self.index)) or "..."
        zero = f"def zero(x):\n    x[{index}] = 0\n    return x\n"
        what = "" if objective == TEXT_LOSS else f"objective=hg.{objective}, "
        run = f"hg.trace(model, tokens, targets, {what}edit="
        return f"{zero}\nbase = {run}{{}})\nchanged = {run}{{{name!r}: zero}})\n{compared}"


def place_of(
    session: Session, sentence: TracedSentence, kind: str, block: int, edge: str | None = None, **where: int | None
) -> Place:
    """The place that a request means: head; skip (edge); neuron; weight (head, row, column)."""
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
    here, in_block, network = f"blocks.{block}.", f"of block {block + 1}", session.network
    if kind == "skip":
        return _skip(network, block, edge)
    step = network.neurons(block)[1] if kind == "neuron" else network.find(block, "attention")
    (a,), (delta,) = step.outputs, step.signals
    if kind == "neuron":
        j = number("neuron", config.hidden_width)
        return Place(a, delta, (slice(None), j), f"neuron {j} {in_block}", a, delta)
    h, width = number("head", config.n_heads), config.value_width
    if kind == "head":
        columns = slice(h * width, (h + 1) * width)
        return Place(a, delta, (slice(None), columns), f"head {h + 1} {in_block}", a, delta)
    t, s = number("row", n), number("column", n)
    labels = [captions.quote(session.token_text(sentence.ids[i])) for i in (t, s)]
    label = f"the attention of {labels[0]} to {labels[1]} in head {h + 1} {in_block}"
    cut = f"the score of {label} (through the value it still flows)"
    return Place(here + "rho", here + "delta_raw", (h, t, s), label, here + "rho", delta, cut)


def _skip(network: Network, block: int, edge: str | None) -> Place:
    """A skip connection: skip_5 is what the addition with the output a_5 adds to its branch."""
    edges = {letter_of(step.outputs[0]): step for step in _additions(network, block)}
    step = edges.get(edge or "")
    if step is None:
        choices = " or ".join(f"{letter} (past the {_past(network, x)})" for letter, x in edges.items())
        raise HandgradError(f"skip: edge must be {choices}")
    name, label = f"skip_{edge}", f"the skip connection past the {_past(network, step)} of block {block + 1}"
    return Place(step.here + name, f"{step.here}delta_{name}", (), label, step.inputs[0], step.signals[0])


def _additions(network: Network, block: int) -> list[NetworkStep]:
    return [step for step in network.blocks[block] if step.kind == "add"]


def _all_additions(network: Network) -> list[list[NetworkStep]]:
    return [_additions(network, b) for b in range(len(network.blocks))]


def _past(network: Network, addition: NetworkStep) -> str:
    """What a skip connection passes by."""
    kinds = [[step.kind for step in branch] for branch in network.branches(addition)]
    names = (
        next((kind for kind in ("attention", "convolution") if kind in own), "feed-forward layer") for own in kinds
    )
    return " and ".join(names)


def signal_at(t: Trace, place: Place) -> tuple[Tensor, Tensor]:
    """The activation of a place and its error signal, from a trace without edits."""
    x, signal = t[place.a], t[place.signal]
    here, _, last = place.a.rpartition(".")
    if last == "rho":  # Δ_ρ = Δ_3 vᵗ
        v = t[f"{here}.v"].repeat_interleave(len(x) // len(t[f"{here}.v"]), 0)
        signal = signal.view(len(signal), len(x), -1).transpose(0, 1) @ v.mT.to(signal.dtype)
    return x, signal


def predicted(t: Trace, place: Place) -> float:
    """−⟨Δ, a⟩: the change of the objective to first order if these entries become 0."""
    x, delta = (tensor[place.index].double() for tensor in signal_at(t, place))
    return -(x * delta).sum().item()


def what_if_at(
    session: Session,
    sentence: TracedSentence,
    kind: str,
    block: int,
    head: int | None,
    edge: str | None,
    neuron: int | None,
    row: int | None,
    column: int | None,
    error: bool = False,
) -> WhatIf | WhatIfError:
    """Set what a request means to 0: in the forward pass, or the error on its way back."""
    place = place_of(session, sentence, kind, block, head=head, edge=edge, neuron=neuron, row=row, column=column)
    return (what_if_error if error else what_if)(session, sentence, place)


def what_if(session: Session, sentence: TracedSentence, place: Place) -> WhatIf:
    """Set a place to 0 in the forward pass: predicted and measured change, and the probabilities before and after."""
    with session.model_at(sentence.version) as model:
        (value, plain), (measured, zeroed) = (
            edited_forward(model, sentence.tokens, sentence.targets, edit, sentence.objective)
            for edit in ({}, {place.name: place.zeroed})
        )
    guess = predicted(sentence.trace, place)
    moves = moves_of(session, sentence, plain["a_12"], zeroed["a_12"])
    return {
        "label": place.label, "name": place.name, "value": value, "predicted": guess, "measured": measured - value,
        "moves": moves, "caption": _about(place, guess, measured - value),
        "python": place.python(place.name, sentence.objective, "changed.loss - base.loss"),
    }  # fmt: skip


def moves_of(session: Session, sentence: TracedSentence, before: Tensor, after: Tensor) -> list[WhatIfMove]:
    """What an edit does to the prediction at every position, from the logits without and with it."""
    moves: list[WhatIfMove] = []
    for t, target in enumerate(sentence.targets[0].tolist()):
        first, second = int(before[t].argmax()), int(after[t].argmax())
        was, now = (chance(log_chances(x[t])[target]) if target >= 0 else None for x in (before, after))
        moves.append({
            "token": session.token_text(sentence.ids[t]),
            "target": session.token_text(target) if target >= 0 else None,
            "before": was, "after": now,
            "first_before": session.token_text(first), "first_after": session.token_text(second),
        })  # fmt: skip
    return moves


def _about(place: Place, guess: float, change: float) -> str:
    if change == 0:
        return f"Without {place.label} the objective is the same; the gradient predicted a change of {typeset(guess)}."
    text = f"Without {place.label} the objective changes by {typeset(change)}; the gradient predicted {typeset(guess)}."
    if guess * change < 0 or abs(change - guess) > max(abs(change), abs(guess)) / 2:
        text += " Removing it is too large a step for a first-order prediction."
    return text


def what_if_error(session: Session, sentence: TracedSentence, place: Place) -> WhatIfError:
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
    rows: list[MovedGradient] = []
    stations: list[MovedSignal] = []
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


def effects(session: Session, sentence: TracedSentence, *, neurons: int = 5) -> Effects:
    """The predicted change for every head and skip connection, and for the neurons of each block with the largest."""
    t, config, network = sentence.trace, session.model.config, session.network
    heads, skips = [], []
    best: list[list[NeuronEffect]] = []

    def activation_of(b: int) -> tuple[str, str]:
        step = network.neurons(b)[1]
        return step.outputs[0], step.signals[0]

    def by_column(a: str, delta: str) -> Tensor:
        return -(t[a].double() * t[delta].double()).sum(0)

    activating = network.having(*NEURONS)  # a mixture of experts has no row of neurons for every token
    neuron = ""
    for b in range(config.n_blocks):
        mixing = network.find(b, "attention", "convolution")
        attends = mixing.kind == "attention"  # a block with a convolution has no heads
        additions = [(s.inputs[0], s.signals[0]) for s in _additions(network, b)]
        change = by_column(mixing.outputs[0], mixing.signals[0]).view(config.n_heads, -1).sum(1) if attends else None
        heads.append([] if change is None else change.tolist())
        skips.append([by_column(*names).sum().item() for names in additions])
        best.append([])
        if b in activating:
            names = activation_of(b)
            blame, neuron = by_column(*names), _product(names)
            top = torch.topk(blame.abs(), min(neurons, len(blame))).indices.tolist()
            best[b] = [{"neuron": j, "predicted": blame[j].item()} for j in top]
    products = [_product(names) for names in [(mixing.outputs[0], mixing.signals[0]), *additions]]
    with_heads = network.every("attention")
    every, with_neurons = f"for b in range({config.n_blocks})", network.every(*NEURONS)
    past = [{_past(network, step): None for step in steps} for steps in zip(*_all_additions(network), strict=True)]
    return {
        "heads": heads, "skips": skips, "neurons": best,
        "edges": [
            {"edge": letter_of(s.outputs[0]), "past": " or ".join(which)}
            for s, which in zip(_additions(network, b), past, strict=True)
        ],
        "python": {
            "heads": f"{{b: {products[0]}.sum(0).view({config.n_heads}, -1).sum(1) {with_heads}}}",
            "skips": f"{{b: [{', '.join(f'{x}.sum()' for x in products[1:])}] {every}}}",
            "neurons": f"{{b: {neuron}.sum(0) {with_neurons}}}" if activating else "",
        },
    }  # fmt: skip


def _product(names: tuple[str, str]) -> str:
    """−a Δ of block b, in Python"""
    a, delta = (f"trace[f'blocks.{{b}}.{name.rpartition('.')[2]}']" for name in names)
    return f"-({a} * {delta})"


def _written(i: object) -> str:
    if isinstance(i, slice):
        return ":" if i == slice(None) else f"{i.start}:{i.stop}"
    return str(i)

"""The list of stations: every step of a model in the order of the forward pass, as in Table 2 of the paper.

A station is one step. Forward, it computes a_i, or several outputs from the same input (gate and up). Backward, it receives
Δ_i and computes the error signal of its input and the gradients of its parameters. What a station shows follows from its
step: the kind, the inputs and outputs, and the layers with their `named_symbols()` and `parts_of`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from ...formatting import subscript
from ...model.gpt import GPT
from ...model.layers.experts import Experts
from ...model.layers.linear import Affine
from ...model.layers.taps import Taps
from ...model.steps import Layer, signal
from . import end_formulas, formulas, mixture_formulas
from .attention_formulas import attention
from .conv_formulas import convolution
from .formulas import About, Branch, Formula, subscripted, written
from .network import HEAD, Network, NetworkStep, letter_of


class Parameter(NamedTuple):
    symbol: str  # w_6
    name: str  # of the model's parameter that contains it
    view: Callable[[Tensor], Tensor]  # the parameter, or its gradient → this part of it, oriented as in the paper
    gradient: str  # its gradient's name in the trace

    @property
    def shared(self) -> bool:
        """Whether this is the weight of another station: a tied head."""
        return " = " in self.symbol


@dataclass(frozen=True, kw_only=True)
class Station(About):
    id: str  # a_1, blocks.0.a_6, loss
    kind: str  # of its step; "tokens"
    block: int | None
    inputs: tuple[str, ...] = ()  # by their names in the trace
    a: tuple[str, ...] = ()  # the outputs, by their names in the trace
    incoming: tuple[str, ...] = ()  # the error signals at the outputs, by their names in the trace
    outgoing: tuple[str, ...] = ()  # the error signals it computes, by their names in the trace
    parameters: tuple[Parameter, ...] = ()

    @property
    def stream(self) -> bool:
        """Whether its output is the residual stream: the logit lens applies."""
        return self.kind in ("embedding", "add")

    @property
    def over_vocabulary(self) -> bool:
        """Whether its output has a column for every token of the vocabulary."""
        return self.id in ("a_12", "loss")


Names = dict[nn.Parameter, str]  # the name of each parameter in the model


def stations_of(model: GPT, network: Network) -> list[Station]:
    """Return the stations of a model in the order of the forward pass."""
    names = {p: name for name, p in model.named_parameters()}
    found = [Station(**vars(end_formulas.tokens()), id="a_0", kind="tokens", block=None)]
    for step in network.steps:
        if step.kind == "next":
            continue
        found.append(
            Station(
                **vars(_ABOUT[step.kind](step, network, model)),
                id=_id(step, network),
                kind=step.kind,
                block=step.block,
                inputs=step.inputs,
                a=step.outputs,
                incoming=() if step.kind == "loss" else step.signals,
                outgoing=_outgoing(step, network),
                parameters=_parameters_of(step, model, names),
            )
        )
    return found


def _id(step: NetworkStep, network: Network) -> str:
    """The name of its output. Several outputs stand at the number before that of what is computed from them, gate and up at
    a_7, unless that is another activation: B, C and x, before a_3, stand at the first of them."""
    if step.kind in ("embedding", "loss"):
        return {"embedding": "a_1", "loss": "loss"}[step.kind]
    if len(step.outputs) == 1:
        return step.outputs[0]
    after = letter_of(network.readers(step.outputs[0])[0].outputs[0])
    number = int(after) - 1 if after.isdigit() else int(letter_of(step.inputs[0])) + 1
    between = f"{step.here}a_{number}"
    return step.outputs[0] if network.maker(between) else between


def _outgoing(step: NetworkStep, network: Network) -> tuple[str, ...]:
    """The error signals that are complete after this step, then those inside it in the order of the backward pass."""
    if step.kind == "embedding":
        return ()
    return (*map(signal, network.first_read(step)), *reversed(step.inside))


# ── what is told about a kind of step ───────────────────────────────────────────────────────────────────────────────


TITLES = {
    "norm_1": "First norm", "norm_5": "Second norm", "norm_4": "Norm of a₄", "norm_9": "Norm of a₉",
    "last_norm": "Last norm", "head": "Logits",
}  # fmt: skip
SUMMARIES = {
    "gates": "Maps each token separately to three vectors: x, what the convolution mixes, and the gates B and C, which"
    " decide how much of each feature enters it and leaves it. In the backward pass, the errors of the three add up.",
    "out_projection": "Maps what the convolution has mixed, feature by feature, back into the residual stream.",
    "projection": "Mixes the outputs of all heads, side by side, into one vector of the residual stream's width.",
    "contract": "Maps back to the stream's width: each hidden value adds its row of {w}, scaled by that value.",
    "expand": "Maps each token separately to a wider hidden vector; each hidden value responds to one pattern.",
    "head": "Scores every token of the vocabulary by how well it matches the final vector at each position.",
}
MATRIX = "Multiplies each token by the matrix {w}."
BRANCHES = (
    "Maps each token separately to two wider hidden vectors: up, whose values respond to patterns, and gate, which decides"
    " how much of each passes. In the backward pass, the errors of both add up."
)


def _title(step: NetworkStep) -> str:
    return TITLES.get(step.name) or step.name.replace("_", " ").capitalize()


def _embedding(step: NetworkStep, network: Network, model: GPT) -> About:
    return end_formulas.embedding(model.config.tied, "w_pos" in model.tables(), model.embed.scale)


def _norm(step: NetworkStep, network: Network, model: GPT) -> About:
    (name,), (output,) = step.inputs, step.outputs
    number, layer = step.norm()
    return replace(formulas.norm(layer, number, (name, output), _back(step, network)), title=_title(step))


def _back(step: NetworkStep, network: Network) -> str:
    """In LaTeX, what is added to what a step sends back to its input: + Δ_5"""
    signals, more = network.beside(step, step.inputs[0])
    return "".join(f"{written(x)} + " for x in signals) + (r"(\text{through the other branch}) + " if more else "")


def _attention(step: NetworkStep, network: Network, model: GPT) -> About:
    assert step.block is not None
    attn, back = model.blocks[step.block].attn, _back(step, network)
    return attention(attn, model.config, (step.inputs[0], step.outputs[0]), step.block, back)


def _convolution(step: NetworkStep, network: Network, model: GPT) -> About:
    assert step.block is not None
    return convolution(model.blocks[step.block].conv, step.inputs, step.outputs[0])


def _linear(step: NetworkStep, network: Network, model: GPT) -> About:
    """The layers that read one activation. A layer that holds several matrices has their outputs side by side."""
    branches: list[Branch] = []
    joined: list[Formula] = []
    outputs = iter(step.outputs)
    for number, layer, letters in step.products():
        each = [next(outputs) for _ in letters]
        output, delta = (_beside(map(written, names)) for names in (each, map(signal, each)))
        if len(letters) > 1:
            w = _beside(subscripted("w", letter) for letter in letters)
            joined.append(Formula(f"{subscripted('w', number)} = {w}", "L-gate-branches"))
        branches.append(Branch(number, output, delta, layer))
    several = len(step.outputs) > 1
    w = "w" + (subscript(int(number)) if number.isdigit() else f"_{number}")
    summary = BRANCHES if several and step.name != "gates" else SUMMARIES.get(step.name, MATRIX).format(w=w)
    beyond, back = "L-gate-branches" if several else "", _back(step, network)
    made = formulas.linear(step.inputs[0], branches, (_title(step), summary), beyond, back)
    if several:
        sources = (*made.sources, ("backward", "paper/gated.py delta_prev"))
        made = replace(
            made,
            forward=(*made.forward, *joined),
            sources=sources,
            derived_in=("short_conv" if step.name == "gates" else "gated",),
        )
    return _tied(made, model) if number == HEAD and model.config.tied else made


def _beside(symbols: Iterable[str]) -> str:
    first, *rest = symbols
    return "[" + r" \; ".join([first, *rest]) + "]" if rest else first


def _tied(made: About, model: GPT) -> About:
    """The head with the weight of the embedding."""
    backward = made.backward
    if not model.head.adapted:  # one gradient for both uses
        scale = "" if model.embed.scale == 1 else rf"{model.embed.scale:.4g} \, "
        both = rf"\partial w_{{\mathrm{{tok}}}} = \Delta_{{12}}^t a_{{11}} + {scale}\mathrm{{ohe}}(a_0)^t \Delta_1"
        backward = (*backward[:-1], Formula(both, "Table 3, R9"))
    sources = (*made.sources, ("backward", "model/layers/linear.py Linear.accumulate_weight"))
    return replace(made, backward=backward, errata=(*made.errata, "R9"), sources=sources)


def _add(step: NetworkStep, network: Network, model: GPT) -> About:
    return formulas.skip(step.inputs, step.outputs[0], step.scale)


def _activation(step: NetworkStep, network: Network, model: GPT) -> About:
    assert step.block is not None
    g, output = model.blocks[step.block].mlp.g, step.outputs[0]
    if step.kind == "activation":
        return formulas.activation(g, step.inputs[0], output)
    gate, up = step.inputs
    return formulas.gated_activation(g, (gate, up), output)


def _mixture(step: NetworkStep, network: Network, model: GPT) -> About:
    assert step.block is not None
    layers = model.blocks[step.block].mlp
    assert isinstance(layers, Experts)
    if step.kind == "router":
        return mixture_formulas.router(layers)
    if step.kind == "experts":
        return mixture_formulas.experts(layers, step.inputs, step.outputs[0])
    return mixture_formulas.mixture(step.inputs, step.outputs[0])


def _loss(step: NetworkStep, network: Network, model: GPT) -> About:
    return end_formulas.loss(model.logit_map)


_ABOUT: dict[str, Callable[[NetworkStep, Network, GPT], About]] = {
    "embedding": _embedding, "norm": _norm, "attention": _attention, "convolution": _convolution,
    "linear": _linear, "add": _add,
    "activation": _activation, "gated": _activation, "loss": _loss,
    "router": _mixture, "experts": _mixture, "mixture": _mixture,
}  # fmt: skip


# ── parameters ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _parameters_of(step: NetworkStep, model: GPT, names: Names) -> tuple[Parameter, ...]:
    if step.kind == "embedding":  # a packed table is no parameter
        return tuple(
            Parameter(name, names[table.weight], _unchanged, f"grad_{name}")
            for name, table in model.tables().items()
            if table.weight is not None
        )
    found = [p for number, layer in step.layers.items() for p in _parameters(layer, number, names, step.here)]
    if model.config.tied:
        found = [
            Parameter("w_11 = w_tokᵗ", p.name, _unchanged, "grad_w_tok") if p.gradient == f"grad_w_{HEAD}" else p
            for p in found
        ]
    return tuple(found)


def _parameters(layer: Layer, number: str, names: Names, here: str) -> tuple[Parameter, ...]:
    """Return the parameters of a layer, those of its adapter first, under the trace's names."""
    found = []
    plain = layer.plain() if isinstance(layer, Affine) else None
    for letter, p in layer.named_symbols().items():
        if p is None:
            continue
        views: dict[str, Callable[[Tensor], Tensor]] = {number: _unchanged}
        if plain is not None and plain.parts and letter in "wb":
            parts = plain.parts_of(letter, p.detach())
            views = {part: partial(_part, plain.parts_of, letter, part) for part in parts}
        elif plain is not None and letter == "w" and not plain.in_out:
            views = {number: Tensor.t}
        elif isinstance(layer, Taps) and letter == "w":
            views = {number: layer.in_order}
        for part, view in views.items():
            found.append(Parameter(f"{letter}_{part}", names[p], view, f"{here}grad_{letter}_{part}"))
    return tuple(found)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _part(parts_of: Callable[[str, Tensor], dict[str, Tensor]], letter: str, part: str, x: Tensor) -> Tensor:
    return parts_of(letter, x)[part]

"""The list of stations: every layer of a model in the order of the forward pass, as in Table 2 of the paper.

A station is one layer. Forward, it computes a_i, or several outputs from the same input (gate and up). Backward, it receives
Δ_i and computes the error signal of its input and the gradients of its parameters. What a station shows follows from the
layers: their kind, `numbered()`, `named_symbols()` and `parts_of`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..model.block import Block
from ..model.gpt import GPT
from ..model.layers import Affine
from ..model.mlp import MLP
from ..model.norms import Norm
from . import formulas
from .attention_formulas import attention
from .formulas import Branch, Formula, subscripted


class Parameter(NamedTuple):
    symbol: str  # w_6
    name: str  # of the model's parameter that contains it
    view: Callable[[Tensor], Tensor]  # the parameter, or its gradient → this part of it, oriented as in the paper
    gradient: str  # its gradient's name in the trace

    @property
    def shared(self) -> bool:
        """Whether this is the weight of another station: a tied head."""
        return " = " in self.symbol


@dataclass(frozen=True)
class Station:
    id: str  # a_1, blocks.0.a_6, loss
    index: int  # i of a_i; 13 for the loss
    block: int | None
    title: str
    summary: str
    forward: tuple[Formula, ...]
    backward: tuple[Formula, ...]
    errata: tuple[str, ...]
    a: tuple[str, ...]  # the outputs, by their names in the trace
    incoming: tuple[str, ...]  # the error signals at the outputs, by their names in the trace
    outgoing: tuple[str, ...]  # the error signals it computes, by their names in the trace
    parameters: tuple[Parameter, ...]
    sources: tuple[tuple[str, str], ...]  # "forward" or "backward", and a name of sources.SOURCES
    stream: bool = False  # part of the residual stream: the logit lens applies
    derived_in: tuple[str, ...] = ()  # pages of docs/layers that derive what is not in the paper


Names = dict[nn.Parameter, str]  # the name of each parameter in the model


def stations_of(model: GPT) -> list[Station]:
    """Return the stations of a model in the order of the forward pass."""
    config = model.config
    names = {p: name for name, p in model.named_parameters()}
    found: list[Station] = []

    def add(id: str, index: int, block: int | None, kind: dict[str, Any], **rest: object) -> None:
        fields: dict[str, Any] = {"parameters": (), "outgoing": (), "a": (), "incoming": (), **kind, **rest}
        found.append(Station(id=id, index=index, block=block, **fields))

    tables = tuple(
        Parameter(name, names[table.weight], _unchanged, f"grad_{name}")
        for name, table in model.tables().items()
        if table.weight is not None  # a packed table is no parameter
    )
    add("a_0", 0, None, formulas.tokens())
    add(
        "a_1",
        1,
        None,
        formulas.embedding(config.tied, positions="w_pos" in model.tables()),
        a=("blocks.0.a_1",),
        incoming=("blocks.0.delta_1",),
        parameters=tables,
        stream=True,
    )
    for b, block in enumerate(model.blocks):
        here = f"blocks.{b}."
        for i, (kind, outputs, outgoing, numbers) in enumerate(_block(block, model), 2):
            layers = block.numbered()
            add(
                f"{here}a_{i}",
                i,
                b,
                kind,
                a=tuple(f"{here}a_{output}" for output in outputs),
                incoming=tuple(f"{here}delta_{output}" for output in outputs),
                outgoing=tuple(f"{here}delta_{name}" for name in outgoing),
                parameters=tuple(p for n in numbers for p in _parameters(layers[n], n, names, here)),
            )
    last = f"blocks.{len(model.blocks) - 1}.delta_10"
    add(
        "a_11",
        11,
        None,
        formulas.norm(model.final_norm, 10, ""),
        title="Last norm",
        a=("a_11",),
        incoming=("delta_11",),
        outgoing=(last,),
        parameters=_parameters(model.final_norm, "10", names),
    )
    kind, parameters = _head(model, names)
    add("a_12", 12, None, kind, a=("a_12",), incoming=("delta_12",), outgoing=("delta_11",), parameters=parameters)
    add("loss", 13, None, formulas.loss(), a=("y_pred",), outgoing=("delta_12",))
    return found


def _block(block: Block, model: GPT) -> list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], list[str]]]:
    """The layers of a block from a_2 to a_10: formulas, outputs, outgoing error signals, numbers of their parameters."""
    attn, mlp = block.attn, block.mlp
    norm_1 = {**formulas.norm(block.norm_1, 1, r"\Delta_5 + "), "title": "First norm"}
    norm_5 = {**formulas.norm(block.norm_2, 5, r"\Delta_{10} + "), "title": "Second norm"}
    mixes = "Mixes the outputs of all heads, side by side, into one vector of the residual stream's width."
    back = "Maps back to the stream's width: each hidden value adds its row of w₈, scaled by that value."
    projection = {**formulas.linear(3, [_branch("3", "4", attn.out)], mixes), "title": "Projection"}
    contract = {**formulas.linear(8, [_branch("8", "9", mlp.contract)], back), "title": "Contract"}
    activation = formulas.gated_activation(mlp.g) if mlp.gated else formulas.activation(mlp.g)
    skip = [{**formulas.skip(*numbers), "title": "Skip connection"} for numbers in ((1, 4, 5), (5, 9, 10))]
    inner = mlp.letters()
    in_attention = [number for number in attn.numbered() if number != "3"]
    return [
        (norm_1, ("2",), ("1",), ["1"]),
        (attention(attn, model.config), ("3",), ("2", "causal", "raw"), in_attention),
        (projection, ("4",), ("3",), ["3"]),
        (skip[0], ("5",), ("4",), []),
        (norm_5, ("6",), ("5",), ["5"]),
        (_expand(mlp), inner, ("6",), _reading_a_6(mlp)),
        (activation, ("8",), inner, []),
        (contract, ("9",), ("8",), ["8"]),
        (skip[1], ("10",), ("9",), []),
    ]


def _branch(number: str, output: str, layer: Affine) -> Branch:
    """The layer of w_number, with output a_i; an output with a word for a name is that word."""
    a = subscripted("a", output) if output.isdigit() else rf"\mathrm{{{output}}}"
    return Branch(number, a, subscripted(r"\Delta", output), layer)


def _expand(mlp: MLP) -> dict[str, Any]:
    """The layers that read a_6. A layer that holds several side by side has their outputs side by side."""
    branches: list[Branch] = []
    joined: list[Formula] = []
    letters = iter(mlp.letters())
    for number, layer in zip(_reading_a_6(mlp), mlp.projections(), strict=True):
        here = list(islice(letters, len(layer.plain().widths)))
        each = [_branch(letter, letter, layer) for letter in here]
        one = each[0]._replace(number=number)
        if len(each) > 1:
            w = _beside(subscripted("w", letter) for letter in here)
            joined.append(Formula(f"{subscripted('w', number)} = {w}", "L-gate-branches"))
            one = one._replace(output=_beside(e.output for e in each), delta=_beside(e.delta for e in each))
        branches.append(one)
    if not mlp.gated:
        summary = "Maps each token separately to a wider hidden vector; each hidden value responds to one pattern."
        return {**formulas.linear(6, branches, summary), "title": "Expand"}
    summary = (
        "Maps each token separately to two wider hidden vectors: up, whose values respond to patterns, and gate, which"
        " decides how much of each passes. In the backward pass, the errors of both add up."
    )
    made = formulas.linear(6, branches, summary, "L-gate-branches")
    both = ("backward", "paper/gated.py delta_prev")
    return {
        **made,
        "forward": (*made["forward"], *joined),
        "sources": (*made["sources"], both),
        "title": "Expand",
        "derived_in": ("gated",),
    }


def _reading_a_6(mlp: MLP) -> list[str]:
    """The numbers of the layers that read a_6."""
    return [number for number in mlp.numbered() if number != "8"]


def _beside(symbols: Iterable[str]) -> str:
    return "[" + r" \; ".join(symbols) + "]"


def _head(model: GPT, names: Names) -> tuple[dict[str, Any], tuple[Parameter, ...]]:
    summary = "Scores every token of the vocabulary by how well it matches the final vector at each position."
    kind = {**formulas.linear(11, [_branch("11", "12", model.head)], summary), "title": "Logits"}
    parameters = _parameters(model.head, "11", names)
    if model.config.tied:
        if not model.head.adapted:  # one gradient for both uses
            both = r"\partial w_{\mathrm{tok}} = \Delta_{12}^t a_{11} + \mathrm{ohe}(a_0)^t \Delta_1"
            kind["backward"] = (*kind["backward"][:-1], Formula(both, "Table 3, R9"))
        kind |= {
            "errata": (*kind["errata"], "R9"),
            "sources": (*kind["sources"], ("backward", "model/layers.py Linear.accumulate_weight")),
        }
        shared = [
            Parameter("w_11 = w_tokᵗ", p.name, _unchanged, "grad_w_tok") if p.symbol == "w_11" else p
            for p in parameters
        ]
        parameters = tuple(shared)
    return kind, parameters


# ── parameters ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _parameters(layer: Affine | Norm, number: str, names: Names, here: str = "") -> tuple[Parameter, ...]:
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
        for part, view in views.items():
            found.append(Parameter(f"{letter}_{part}", names[p], view, f"{here}grad_{letter}_{part}"))
    return tuple(found)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _part(parts_of: Callable[[str, Tensor], dict[str, Tensor]], letter: str, part: str, x: Tensor) -> Tensor:
    return parts_of(letter, x)[part]

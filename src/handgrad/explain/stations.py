"""The list of stations: every layer of a GPT in the order of the forward pass, as in Table 2 of the paper.

A station is one layer. Forward, it computes a_i. Backward, it receives Δ_i and computes the error signal of its input
and the gradients of its parameters.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ..model.block import Block
from ..model.gpt import GPT
from ..model.layers import Affine, LayerNorm
from . import formulas
from .formulas import Formula


class Parameter(NamedTuple):
    symbol: str  # w_6
    names: tuple[str, ...]  # of the model's parameters that contain it
    columns: tuple[int, int] | None = None  # its range of the last axis, if it is a part


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
    a: str | None  # the output, by its name in the trace
    incoming: str | None  # the error signal at the output, by its name in the trace
    outgoing: tuple[str, ...]  # the error signals it computes, by their names in the trace
    parameters: tuple[Parameter, ...]
    sources: tuple[tuple[str, str], ...]  # "forward" or "backward", and a name of sources.SOURCES
    stream: bool = False  # part of the residual stream: the logit lens applies


def stations_of(model: GPT) -> list[Station]:
    """Return the stations of a model in the order of the forward pass."""
    config = model.config
    t = model.transformer
    names = {p: name for name, p in model.named_parameters()}
    found: list[Station] = []

    def add(id: str, index: int, block: int | None, kind: dict[str, Any], **rest: object) -> None:
        fields: dict[str, Any] = {"stream": False, "parameters": (), "outgoing": (), **kind, **rest}
        found.append(Station(id=id, index=index, block=block, **fields))

    tables = (Parameter("w_tok", ("transformer.wte.weight",)), Parameter("w_pos", ("transformer.wpe.weight",)))
    add("a_0", 0, None, formulas.tokens(), a=None, incoming=None)
    add(
        "a_1",
        1,
        None,
        formulas.embedding(config.tied),
        a="blocks.0.a_1",
        incoming="blocks.0.delta_1",
        parameters=tables,
        stream=True,
    )
    for b, block in enumerate(model.blocks):
        here = f"blocks.{b}."

        def add_to_block(
            i: int, kind: dict[str, Any], outgoing: tuple[str, ...], b: int = b, here: str = here, **rest: object
        ) -> None:
            names = tuple(here + name for name in outgoing)
            add(f"{here}a_{i}", i, b, kind, a=f"{here}a_{i}", incoming=f"{here}delta_{i}", outgoing=names, **rest)

        attn, mlp = block.attn, block.mlp
        norm_1, norm_5 = formulas.norm(1, r"\Delta_5 + "), formulas.norm(5, r"\Delta_{10} + ")
        add_to_block(2, norm_1, ("delta_1",), title="First norm", parameters=_parameters(block.ln_1, 1, names))
        add_to_block(
            3,
            formulas.attention(config.causal, attn.c_attn, config.key_bias),
            ("delta_2", "delta_causal", "delta_raw"),
            parameters=_attention_parameters(block, config.key_bias, names),
        )
        summary = "Mixes the outputs of all heads, side by side, into one vector of the residual stream's width."
        add_to_block(
            4,
            formulas.linear(3, 4, summary, attn.c_proj),
            ("delta_3",),
            title="Projection",
            parameters=_parameters(attn.c_proj, 3, names),
        )
        add_to_block(5, formulas.skip(1, 4, 5), ("delta_4",), title="Skip connection")
        add_to_block(6, norm_5, ("delta_5",), title="Second norm", parameters=_parameters(block.ln_2, 5, names))
        summary = "Maps each token separately to a wider hidden vector; each hidden value responds to one pattern."
        add_to_block(
            7,
            formulas.linear(6, 7, summary, mlp.c_fc),
            ("delta_6",),
            title="Expand",
            parameters=_parameters(mlp.c_fc, 6, names),
        )
        add_to_block(8, formulas.activation(config.activation), ("delta_7",))
        summary = "Maps back to the stream's width: each hidden value adds its row of w₈, scaled by that value."
        add_to_block(
            9,
            formulas.linear(8, 9, summary, mlp.c_proj),
            ("delta_8",),
            title="Contract",
            parameters=_parameters(mlp.c_proj, 8, names),
        )
        add_to_block(10, formulas.skip(5, 9, 10), ("delta_9",), title="Skip connection")
    last = f"blocks.{len(model.blocks) - 1}.delta_10"
    add(
        "a_11",
        11,
        None,
        formulas.norm(10, ""),
        title="Last norm",
        a="a_11",
        incoming="delta_11",
        outgoing=(last,),
        parameters=_parameters(t.ln_f, 10, names),
    )
    summary = "Scores every token of the vocabulary by how well it matches the final vector at each position."
    head = formulas.linear(11, 12, summary, model.lm_head, config.logits_bias)
    head_parameters = _parameters(model.lm_head, 11, names)
    if config.tied:
        if not model.lm_head.adapted:  # one gradient for both uses
            both = r"\partial w_{\mathrm{tok}} = \Delta_{12}^t a_{11} + \mathrm{ohe}(a_0)^t \Delta_1"
            head["backward"] = (*head["backward"][:-1], Formula(both, "Table 3, R9"))
        head |= {
            "errata": (*head["errata"], "R9"),
            "sources": (*head["sources"], ("backward", "model/layers.py Head.accumulate_weight")),
        }
        head_parameters = tuple(
            p._replace(symbol="w_11 = w_tokᵗ") if p.symbol == "w_11" else p for p in head_parameters
        )
    add(
        "a_12",
        12,
        None,
        head,
        title="Logits",
        a="a_12",
        incoming="delta_12",
        outgoing=("delta_11",),
        parameters=head_parameters,
    )
    add("loss", 13, None, formulas.loss(), a="y_pred", incoming=None, outgoing=("delta_12",))
    return found


Names = dict[nn.Parameter, str]  # the name of each parameter in the model


def _parameters(layer: Affine | LayerNorm, i: int, names: Names) -> tuple[Parameter, ...]:
    """Return the parameters of layer i, those of its adapter first."""
    symbols = layer.named_symbols().items()
    return tuple(Parameter(f"{symbol}_{i}", (names[p],)) for symbol, p in symbols if p is not None)


def _attention_parameters(block: Block, key_bias: bool, names: Names) -> tuple[Parameter, ...]:
    """Return w_q, w_k, w_v and their biases, which are column ranges of one matrix."""
    attn = block.attn
    found = []
    for symbol, p in attn.c_attn.named_symbols().items():
        if p is None or symbol not in "wb":
            found += [] if p is None else [Parameter(f"{symbol}_2", (names[p],))]
            continue
        start = 0
        for letter, width in (("q", attn.queries), ("k", attn.queries), ("v", attn.values)):
            if symbol == "b" and letter == "k" and not key_bias:
                continue
            found.append(Parameter(f"{symbol}_{letter}", (names[p],), (start, start + width)))
            start += width
    return tuple(found)

"""The stations of a GPT in the order in which the forward pass comes through: Table 2 as something to walk along.

A station is a layer. Down, it makes a_i of what came before; up, Δ_i arrives and what it sends further up leaves, and the
gradients of its parameters fall off. Formulas are LaTeX here and MathML on the page.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from latex2mathml.converter import convert
from torch import nn

from ..model.block import Block
from ..model.gpt import GPT
from ..model.layers import Affine, Head, LayerNorm, QueryKeyValue
from ..ops import activation, attention, embedding, layernorm, linear, lora, loss


class Formula(NamedTuple):
    latex: str
    equation: str  # its number in the paper, or where it stands


class Parameter(NamedTuple):
    symbol: str  # w_6
    names: tuple[str, ...]  # of the model's parameters it is in
    columns: tuple[int, int] | None = None  # the part of the last axis it is


@dataclass(frozen=True)
class Station:
    id: str  # a_1, blocks.0.a_6, loss
    index: int  # i of a_i; 13 is the loss
    block: int | None
    title: str
    words: str
    forward: tuple[Formula, ...]
    backward: tuple[Formula, ...]
    errata: tuple[str, ...]
    a: str | None  # the trace's name of what it makes
    arrives: str | None  # of the error signal at its output
    leaves: tuple[str, ...]  # of those it sends on
    parameters: tuple[Parameter, ...]
    sources: tuple[tuple[str, str], ...]  # forward or backward, and the name of a function of SOURCES
    stream: bool = False  # a row of it can be read through the final norm and the head


ERRATA = {
    "R1": "The paper multiplies the scores by a mask of zeros and ones. A score of 0 still gets weight e⁰ = 1 in the"
    " softmax, so the future would stay visible; what is needed is −∞ above the diagonal.",
    "R3": "Beside a frozen layer the adapter's own term is printed alone. Frozen is not blocked: the frozen weight carries"
    " its part of Δ as ever.",
    "R5": "Printed for all rows. The last token has no target, so its row of Δ₁₂ is 0; and here the loss is the mean over"
    " the targets, so every Δ is divided by their number.",
    "R8": "Printed without ε, which leaves 0/0 for a constant row. With σ = √(var + ε) in both places (40) is exact.",
    "R9": "The paper ties the two tables but gives no rule for it: a matrix that is used twice gets the sum of both"
    " gradients.",
    "R11": "The paper's factor is α, and would multiply the branch by r. Here s is α/r, or α/√r, as common tools have it.",
    "R32": "∂b_k is 0 in exact arithmetic only; what would be summed here is rounding, so a true zero is written.",
    "R39": "The paper leaves g open. GPT-2 uses the tanh form of GELU.",
}

SOURCES: dict[str, Callable[..., object]] = {
    "ops/embedding.py forward": embedding.forward,
    "ops/embedding.py grad_w": embedding.grad_w,
    "ops/layernorm.py forward": layernorm.forward,
    "ops/layernorm.py backward": layernorm.backward,
    "ops/layernorm.py grad_w": layernorm.grad_w,
    "ops/layernorm.py grad_b": layernorm.grad_b,
    "ops/linear.py forward": linear.forward,
    "ops/linear.py backward": linear.backward,
    "ops/linear.py grad_w": linear.grad_w,
    "ops/linear.py grad_b": linear.grad_b,
    "ops/lora.py forward": lora.forward,
    "ops/lora.py upstream": lora.upstream,
    "ops/lora.py backward": lora.backward,
    "ops/lora.py grad_d": lora.grad_d,
    "ops/lora.py grad_u": lora.grad_u,
    "ops/lora.py column_norms": lora.column_norms,
    "ops/lora.py grad_m": lora.grad_m,
    "ops/activation.py forward": activation.forward,
    "ops/activation.py backward": activation.backward,
    "ops/activation.py _gelu_tanh": activation._gelu_tanh,
    "ops/activation.py _gelu": activation._gelu,
    "ops/activation.py _relu2": activation._relu2,
    "ops/attention.py forward": attention.forward,
    "ops/attention.py rho_tile": attention.rho_tile,
    "ops/attention.py causal_signal_tile": attention.causal_signal_tile,
    "ops/attention.py _backward_in_tiles": attention._backward_in_tiles,
    "model/layers.py QueryKeyValue.accumulate_bias": QueryKeyValue.accumulate_bias,
    "model/layers.py Head.accumulate_weight": Head.accumulate_weight,
    "model/block.py Block.forward": Block.forward,
    "model/block.py Block.backward": Block.backward,
    "ops/loss.py forward_and_delta": loss.forward_and_delta,
}


@cache
def source(name: str) -> str:
    """The code itself, from the package that is running."""
    return inspect.getsource(SOURCES[name])


@cache
def mathml(latex: str) -> str:
    """A formula as MathML. A word set upright is one identifier, not a row of letters."""
    made = convert(latex, display="block")
    letters = r'<mrow>((?:<mi mathvariant="normal">[^<]*</mi>)+)</mrow>'
    made = re.sub(letters, lambda m: f"<mi>{re.sub('<[^>]*>', '', m[1])}</mi>", made)
    return made.replace("<mo>&#x0007E;</mo>", '<mo stretchy="true">&#x002DC;</mo>')


# ── the layers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _norm_back(i: int) -> str:
    """Λ: what a norm sends up, (40) in rows, as ops/layernorm.py computes it."""
    return (
        rf"\frac{{1}}{{\sigma_{{{i}}}}} \left[ G - \mathrm{{mean}}(G) - \bar a_{{{i}}} \circ"
        rf" \mathrm{{mean}}(G \circ \bar a_{{{i}}}) \right]"
    )


def _norm(i: int, back: str) -> dict[str, Any]:
    """The norm whose statistics have number i and whose output is a_{i+1}; `back` is what Δ_i is besides Λ."""
    o = i + 1
    return {
        "words": "Every token on its own is brought to mean 0 and spread 1, then each feature is stretched by w and shifted"
        " by b. On the way back the error loses the two directions the norm ignores: adding a constant to a token, and"
        " scaling it.",
        "forward": (
            Formula(rf"\bar a_{{{i}}} = \frac{{a_{{{i}}} - \mu_{{{i}}}}}{{\sigma_{{{i}}}}}", "36"),
            Formula(rf"a_{{{o}}} = \bar a_{{{i}}} \, \mathrm{{diag}}(w_{{{i}}}) + \tilde b_{{{i}}}", "38"),
        ),
        "backward": (
            Formula(rf"G = \Delta_{{{o}}} \, \mathrm{{diag}}(w_{{{i}}})", "40"),
            Formula(rf"\Delta_{{{i}}} = {back}{_norm_back(i)}", "40"),
            Formula(
                rf"\partial w_{{{i}}} = \sum_{{\mathrm{{tok}}}} \bar a_{{{i}}} \circ \Delta_{{{o}}} \qquad"
                rf" \partial b_{{{i}}} = \sum_{{\mathrm{{tok}}}} \Delta_{{{o}}}",
                "41, 42",
            ),
        ),
        "errata": ("R8",),
        "sources": (
            ("forward", "ops/layernorm.py forward"),
            ("backward", "ops/layernorm.py backward"),
            ("backward", "ops/layernorm.py grad_w"),
            ("backward", "ops/layernorm.py grad_b"),
        ),
    }


def _linear(i: int, o: int, words: str, layer: Affine, bias: bool = True) -> dict[str, Any]:
    """a_o = a_i w_i + b_i, with a branch beside it if there is one, and a magnitude for each output if it has that."""
    adapted, dora = layer.adapted, layer.named_symbols().get("m") is not None
    product = rf"a_{{{i}}} w_{{{i}}}" + (rf" + s \, a_{{{i}}} d_{{{i}}} u_{{{i}}}" if adapted else "")
    signal = r"\Delta_z" if dora else rf"\Delta_{{{o}}}"
    added = rf" + \tilde b_{{{i}}}" if bias else ""
    forward = rf"a_{{{o}}} = {product}{added}"
    extra: tuple[Formula, ...] = ()
    if dora:
        forward = rf"z = {product} \qquad a_{{{o}}} = z \, \mathrm{{diag}}(m_{{{i}}} / c){added}"
        extra = (
            Formula(
                rf"\Delta_z = \Delta_{{{o}}} \, \mathrm{{diag}}(m_{{{i}}} / c) \qquad \partial m_{{{i}}} ="
                rf" \frac{{1}}{{c}} \sum_{{\mathrm{{tok}}}} \Delta_{{{o}}} \circ z",
                "DoRA",
            ),
        )
    back = rf" + s \, {signal} (d_{{{i}}} u_{{{i}}})^t" if adapted else ""
    grads = (
        rf"\partial d_{{{i}}} = s \, a_{{{i}}}^t {signal} u_{{{i}}}^t \qquad \partial u_{{{i}}} = s \,"
        rf" (a_{{{i}}} d_{{{i}}})^t {signal}"
        if adapted
        else rf"\partial w_{{{i}}} = a_{{{i}}}^t \Delta_{{{o}}}"
        + (rf" \qquad \partial b_{{{i}}} = \sum_{{\mathrm{{tok}}}} \Delta_{{{o}}}" if bias else "")
    )
    lora_names = ("upstream", "backward", "grad_d", "grad_u", *(("column_norms", "grad_m") if dora else ()))
    return {
        "words": words,
        "forward": (Formula(forward, "DoRA" if dora else "Table 2"),),
        "backward": (
            *extra,
            Formula(rf"\Delta_{{{i}}} = {signal} w_{{{i}}}^t{back}", "44, R3" if adapted else "Table 2"),
            Formula(grads, "45, 46" if adapted else "Table 3"),
        ),
        "errata": ("R3", "R11") if adapted else (),
        "sources": (
            ("forward", "ops/linear.py forward"),
            *([("forward", "ops/lora.py forward")] if adapted else []),
            ("backward", "ops/linear.py backward"),
            *([("backward", f"ops/lora.py {name}") for name in lora_names] if adapted else []),
            ("backward", "ops/linear.py grad_w"),
            *([("backward", "ops/linear.py grad_b")] if bias else []),
        ),
    }


def _embedding(tied: bool) -> dict[str, Any]:
    head = r" + \Delta_{12}^t a_{11}" if tied else ""
    return {
        "title": "Embedding",
        "words": "Each token picks its row of the table of words, and its place picks a row of the table of positions; the"
        " two are added. Back comes the error of each token, and is added into the very rows that were picked.",
        "forward": (
            Formula(
                r"a_1 = \mathrm{ohe}(a_0) \, w_{\mathrm{tok}} + \mathrm{ohe}(0, \dots, n_T - 1) \, w_{\mathrm{pos}}",
                "2",
            ),
        ),
        "backward": (
            Formula(rf"\partial w_{{\mathrm{{tok}}}} = \mathrm{{ohe}}(a_0)^t \Delta_1{head}", "3, R9" if tied else "3"),
            Formula(r"\partial w_{\mathrm{pos}} = \mathrm{ohe}(0, \dots, n_T - 1)^t \Delta_1", "3"),
        ),
        "errata": ("R9",) if tied else (),
        "sources": (("forward", "ops/embedding.py forward"), ("backward", "ops/embedding.py grad_w")),
    }


def _attention(causal: bool, layer: Affine, key_bias: bool) -> dict[str, Any]:
    mask = r"\mathrm{mask}" if causal else ""
    tiles = ("rho_tile", "causal_signal_tile", "_backward_in_tiles")
    adapted = layer.adapted
    b_k = r" + \tilde b_k" if key_bias else ""
    made = rf"q = a_2 w_q + \tilde b_q \qquad k = a_2 w_k{b_k} \qquad v = a_2 w_v + \tilde b_v"
    grads = (
        r"\partial w_v = (\rho a_2)^t \Delta_3^h \qquad \partial w_q = a_2^t \Delta_{\mathrm{raw}} k \qquad"
        r" \partial w_k = (\Delta_{\mathrm{raw}} a_2)^t q" + (r" \qquad \partial b_k = 0" if key_bias else "")
    )
    if adapted:  # w stands for all that multiplies a_2: what is frozen and the branch beside it
        turned = r" \, \mathrm{diag}(m_2 / c)" if layer.named_symbols().get("m") is not None else ""
        made += rf" \qquad [w_q \; w_k \; w_v] = (w_2 + s \, d_2 u_2){turned}"
        signal = rf"\Delta_{{qkv}}{turned}"
        grads = (
            r"\Delta_{qkv} = [\Delta_{\mathrm{raw}} k \;\; \Delta_{\mathrm{raw}}^t q \;\; \rho^t \Delta_3^h] \qquad"
            rf" \partial d_2 = s \, a_2^t {signal} u_2^t \qquad \partial u_2 = s \, (a_2 d_2)^t {signal}"
        )
    return {
        "title": "Attention",
        "words": "The only layer in which tokens look at each other. A token's query meets the keys of the tokens before it;"
        " the better they fit, the more of their values it takes. The error comes back on two branches: through the"
        " values that were taken, and through the weights ρ, to the queries and keys that made them.",
        "forward": (
            Formula(made, "9, 4, 43" if adapted else "9, 4"),
            Formula(
                rf"\rho = \mathrm{{softmax}}\left({mask}\left(\frac{{q k^t}}{{\sqrt{{d_\rho}}}}\right)\right) \qquad"
                r" a_3^h = \rho \, v",
                "18, 34",
            ),
        ),
        "backward": (
            Formula(
                r"\Delta_{\mathrm{causal}} = [\Delta_3^h v^t - ((\Delta_3^h v^t) \ominus \rho)^{\sim}] \circ \rho",
                "25",
            ),
            Formula(r"\Delta_{\mathrm{raw}} = \frac{\Delta_{\mathrm{causal}}}{\sqrt{d_\rho}}", "28"),
            Formula(
                r"\Delta_2 = \sum_h \left( \rho^t \Delta_3^h w_v^t + \Delta_{\mathrm{raw}} k \, w_q^t +"
                r" \Delta_{\mathrm{raw}}^t q \, w_k^t \right)",
                "33, 35",
            ),
            Formula(grads, "45, 46" if adapted else "23, 31, 32"),
        ),
        "errata": (*(["R1"] if causal else []), "R32", *(["R3", "R11"] if adapted else [])),
        "sources": (
            ("forward", "ops/linear.py forward"),
            ("forward", "ops/attention.py forward"),
            *[("backward", f"ops/attention.py {name}") for name in tiles],
            ("backward", "model/layers.py QueryKeyValue.accumulate_bias"),
        ),
    }


def _skip(left: int, branch: int, o: int) -> dict[str, Any]:
    return {
        "words": "What the branch has found is added to the stream, which itself passes unchanged. Going back, an addition"
        " copies: the same error goes up the branch and straight along the stream. That straight way is why deep"
        " networks can be trained.",
        "forward": (Formula(rf"a_{{{o}}} = a_{{{left}}} + a_{{{branch}}}", "Table 2"),),
        "backward": (
            Formula(rf"\Delta_{{{branch}}} = \Delta_{{{o}}}", "Table 2"),
            Formula(rf"\Delta_{{{left}}} = \Delta_{{{o}}} + (\text{{through the branch}})", "Table 2"),
        ),
        "errata": (),
        "sources": (("forward", "model/block.py Block.forward"), ("backward", "model/block.py Block.backward")),
        "stream": True,
    }


# g and g' of activations beyond the paper, with their checks
_BEYOND_G = {
    "relu2": (Formula(r"g(x) = \max(x, 0)^2", "L-relu2-fwd"), Formula(r"g'(x) = 2 \max(x, 0)", "L-relu2-bwd")),
}


def _activation(g: str) -> dict[str, Any]:
    inner = {"gelu_tanh": "_gelu_tanh", "gelu": "_gelu", "relu2": "_relu2"}.get(g)
    name = {
        "gelu_tanh": "GELU, in its tanh form",
        "gelu": "GELU",
        "relu": "ReLU",
        "relu2": "Squared ReLU (the positive part, squared)",
    }[g]
    return {
        "title": "Activation",
        "words": f"{name}: each hidden number is let through if it is positive and held back if it is not. The same gate,"
        " as a slope, decides which part of the error goes on.",
        "forward": (Formula(r"a_8 = g(a_7)", "Table 2"), *_BEYOND_G.get(g, ())[:1]),
        "backward": (Formula(r"\Delta_7 = \Delta_8 \circ g'(a_7)", "Table 2"), *_BEYOND_G.get(g, ())[1:]),
        "errata": ("R39",) if g == "gelu_tanh" else (),
        "sources": (
            ("forward", "ops/activation.py forward"),
            ("backward", "ops/activation.py backward"),
            *([("backward", f"ops/activation.py {inner}")] if inner else []),
        ),
    }


def _loss() -> dict[str, Any]:
    return {
        "title": "Loss",
        "words": "The logits become probabilities, and the surprise about the token that really came next is the loss. Here"
        " the way back begins: the error of a word is its probability, less 1 for the word that was right.",
        "forward": (
            Formula(
                r"y_{\mathrm{pred}} = \mathrm{softmax}(a_{12}) \qquad L = -\frac{1}{n} \sum_t \log"
                r" y_{\mathrm{pred}}(t)_{\mathrm{target}(t)}",
                "Section 1",
            ),
        ),
        "backward": (
            Formula(r"\Delta_{12} = \frac{1}{n} \left( y_{\mathrm{pred}} - y_{\mathrm{gt}} \right)", "Table 2"),
        ),
        "errata": ("R5",),
        "sources": (("forward", "ops/loss.py forward_and_delta"), ("backward", "ops/loss.py forward_and_delta")),
    }


def _tokens() -> dict[str, Any]:
    return {
        "title": "Tokens",
        "words": "The sentence, cut into tokens, each a number. Whole numbers have no gradient, so the way back ends at the"
        " embedding. If a token is thought of as a row of zeros with a single one, the same rule still gives a Δ₀: to"
        " first order, how the loss would change if another word stood here.",
        "forward": (Formula(r"a_0 \in \{0, \dots, n_{\mathrm{vocab}} - 1\}^{n_T}", "Section 1"),),
        "backward": (Formula(r"\Delta_0 = \Delta_1 w_{\mathrm{tok}}^t", "Section 2"),),
        "errata": (),
        "sources": (("forward", "ops/embedding.py forward"), ("backward", "ops/linear.py backward")),
    }


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────


def stations_of(model: GPT) -> list[Station]:
    """All of them, in the order of the forward pass."""
    config = model.config
    t = model.transformer
    names = {p: name for name, p in model.named_parameters()}
    found: list[Station] = []

    def add(id: str, index: int, block: int | None, kind: dict[str, Any], **rest: object) -> None:
        whole: dict[str, Any] = {"stream": False, "parameters": (), "leaves": (), **kind, **rest}
        found.append(Station(id=id, index=index, block=block, **whole))

    tables = (Parameter("w_tok", ("transformer.wte.weight",)), Parameter("w_pos", ("transformer.wpe.weight",)))
    add("a_0", 0, None, _tokens(), a=None, arrives=None)
    add(
        "a_1",
        1,
        None,
        _embedding(config.tied),
        a="blocks.0.a_1",
        arrives="blocks.0.delta_1",
        parameters=tables,
        stream=True,
    )
    for b, block in enumerate(model.blocks):
        here = f"blocks.{b}."

        def place(
            i: int, kind: dict[str, Any], leaves: tuple[str, ...], b: int = b, here: str = here, **rest: object
        ) -> None:
            names = tuple(here + name for name in leaves)
            add(f"{here}a_{i}", i, b, kind, a=f"{here}a_{i}", arrives=f"{here}delta_{i}", leaves=names, **rest)

        attn, mlp = block.attn, block.mlp
        norm_1, norm_5 = _norm(1, r"\Delta_5 + "), _norm(5, r"\Delta_{10} + ")
        place(2, norm_1, ("delta_1",), title="First norm", parameters=_of(block.ln_1, 1, names))
        place(3, _attention(config.causal, attn.c_attn, config.key_bias), ("delta_2", "delta_causal", "delta_raw"),
              parameters=_of_heads(block, config.key_bias, names))  # fmt: skip
        words = "What the heads have gathered, side by side, is mixed into one vector of the stream's width."
        place(4, _linear(3, 4, words, attn.c_proj), ("delta_3",), title="Projection",
              parameters=_of(attn.c_proj, 3, names))  # fmt: skip
        place(5, _skip(1, 4, 5), ("delta_4",), title="Skip connection")
        place(6, norm_5, ("delta_5",), title="Second norm", parameters=_of(block.ln_2, 5, names))
        words = "Each token on its own goes into a wider room, where every hidden number looks for one pattern."
        place(7, _linear(6, 7, words, mlp.c_fc), ("delta_6",), title="Expand",
              parameters=_of(mlp.c_fc, 6, names))  # fmt: skip
        place(8, _activation(config.activation), ("delta_7",))
        words = "The patterns that were found write what they stand for, back in the stream's width."
        place(9, _linear(8, 9, words, mlp.c_proj), ("delta_8",), title="Contract",
              parameters=_of(mlp.c_proj, 8, names))  # fmt: skip
        place(10, _skip(5, 9, 10), ("delta_9",), title="Skip connection")
    last = f"blocks.{len(model.blocks) - 1}.delta_10"
    add("a_11", 11, None, _norm(10, ""), title="Last norm", a="a_11", arrives="delta_11", leaves=(last,),
        parameters=_of(t.ln_f, 10, names))  # fmt: skip
    words = "Every word of the vocabulary is scored by how well it fits what the stream says."
    head = _linear(11, 12, words, model.lm_head, config.logits_bias)
    of_head = _of(model.lm_head, 11, names)
    if config.tied:
        if not model.lm_head.adapted:  # the embedding's gradient, of which this is the larger part
            both = r"\partial w_{\mathrm{tok}} = \Delta_{12}^t a_{11} + \mathrm{ohe}(a_0)^t \Delta_1"
            head["backward"] = (*head["backward"][:-1], Formula(both, "Table 3, R9"))
        head |= {
            "errata": (*head["errata"], "R9"),
            "sources": (*head["sources"], ("backward", "model/layers.py Head.accumulate_weight")),
        }
        of_head = tuple(p._replace(symbol="w_11 = w_tokᵗ") if p.symbol == "w_11" else p for p in of_head)
    add("a_12", 12, None, head, title="Logits", a="a_12", arrives="delta_12", leaves=("delta_11",), parameters=of_head)
    add("loss", 13, None, _loss(), a="y_pred", arrives=None, leaves=("delta_12",))
    return found


Names = dict[nn.Parameter, str]  # parameters' names in the model


def _of(layer: Affine | LayerNorm, i: int, names: Names) -> tuple[Parameter, ...]:
    """The parameters of the layer with number i, an adapter's first."""
    symbols = layer.named_symbols().items()
    return tuple(Parameter(f"{symbol}_{i}", (names[p],)) for symbol, p in symbols if p is not None)


def _of_heads(block: Block, key_bias: bool, names: Names) -> tuple[Parameter, ...]:
    """w_q, w_k and w_v of all heads are parts of one matrix."""
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

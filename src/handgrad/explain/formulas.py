"""The formulas of each layer, forward and backward, with a summary for the reader; written in LaTeX, shown as MathML.

Each function below returns what `stations.Station` needs to know about a kind of layer: its summary, its formulas with
their equation numbers, the errata that apply, and the functions that implement it (names of `sources.SOURCES`).
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from latex2mathml.converter import convert

from ..model.layers import Affine
from ..model.norms import LayerNorm, Norm, RMSNorm


class Formula(NamedTuple):
    latex: str
    equation: (
        str  # equation number in the paper, the table or section it is in, or for a layer beyond it the check's id
    )


class Branch(NamedTuple):
    """A linear layer: the number or letter of its parameters, and its output and error signal in LaTeX."""

    number: str
    output: str
    delta: str
    layer: Affine


ERRATA = {
    "R1": "The paper multiplies the scores by a mask of zeros and ones. A score of 0 still gets weight e⁰ = 1 in the"
    " softmax, so future tokens would stay visible. The mask has to put −∞ above the diagonal.",
    "R3": "For a frozen layer with an adapter, the paper prints the adapter's term of Δ only. A frozen weight gets no"
    " gradient, but it still passes the error on, so its term is needed too.",
    "R5": "Printed for all rows. The last token has no target, so its row of Δ₁₂ is 0. Where the mean loss is"
    " explained, every Δ is divided by the number of targets.",
    "R8": "Printed without ε, which gives 0/0 for a constant row. With σ = √(var + ε) in both places, (40) is exact.",
    "R9": "The paper ties the two tables but gives no gradient rule: a matrix that is used twice gets the sum of both"
    " gradients.",
    "R11": "The paper scales the branch by α, which is r times too much. Here s is α/r, or α/√r, as LoRA libraries use.",
    "R32": "∂b_k is 0 in exact arithmetic. Summing in floating point would give rounding errors, so an exact 0 is written.",
    "R39": "The paper leaves g open. GPT-2 uses the tanh form of GELU.",
}


@cache
def mathml(latex: str) -> str:
    """Convert LaTeX to MathML. An upright word becomes one identifier instead of single letters; a letter stays upright."""
    made = convert(latex, display="block")
    letters = r'<mrow>((?:<mi mathvariant="normal">[^<]*</mi>)+)</mrow>'
    made = re.sub(letters, lambda m: _upright(re.sub("<[^>]*>", "", m[1])), made)
    return made.replace("<mo>&#x0007E;</mo>", '<mo stretchy="true">&#x002DC;</mo>')


def _upright(word: str) -> str:
    return f"<mi>{word}</mi>" if len(word) > 1 else f'<mi mathvariant="normal">{word}</mi>'


# ── the layers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def subscripted(letter: str, number: str) -> str:
    """w, 6 → w_{6}; w, gate → w_{\\mathrm{gate}}"""
    upright = number.isalpha() and len(number) > 1
    return rf"{letter}_{{\mathrm{{{number}}}}}" if upright else rf"{letter}_{{{number}}}"


def _norm_back(i: int) -> str:
    """Λ: the error signal that a norm sends back, (40) row by row, as ops/layernorm.py computes it."""
    return (
        rf"\frac{{1}}{{\sigma_{{{i}}}}} \left[ G - \mathrm{{mean}}(G) - \bar a_{{{i}}} \circ"
        rf" \mathrm{{mean}}(G \circ \bar a_{{{i}}}) \right]"
    )


def norm(layer: Norm, i: int, back: str) -> dict[str, Any]:
    """The norm of a_i, with output a_{i+1}. `back` is the part of Δ_i that does not come through the norm."""
    return _NORMS[type(layer)](i, back)


def _layer_norm(i: int, back: str) -> dict[str, Any]:
    o = i + 1
    return {
        "summary": "Normalises each token separately to mean 0 and standard deviation 1, then scales each feature by w and"
        " shifts it by b. In the backward pass, the error loses its part along the two changes of a token that the norm"
        " ignores: adding a constant to all its features, and scaling them.",
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


def _rms_norm(i: int, back: str) -> dict[str, Any]:
    o = i + 1
    return {
        "summary": "Divides each token by the root mean square of its features, then scales each feature by w. Unlike the"
        " paper's norm, it neither subtracts a mean nor adds an offset. In the backward pass, the error loses its part along"
        " the one change of a token that the norm ignores: scaling it.",
        "forward": (
            Formula(
                rf"\mathrm{{rms}}_{{{i}}} = \sqrt{{\mathrm{{mean}}(a_{{{i}}} \circ a_{{{i}}}) + \varepsilon}} \qquad"
                rf" \bar a_{{{i}}} = \frac{{a_{{{i}}}}}{{\mathrm{{rms}}_{{{i}}}}}",
                "L-rms-fwd",
            ),
            Formula(rf"a_{{{o}}} = \bar a_{{{i}}} \, \mathrm{{diag}}(w_{{{i}}})", "L-rms-fwd"),
        ),
        "backward": (
            Formula(rf"G = \Delta_{{{o}}} \, \mathrm{{diag}}(w_{{{i}}})", "L-rms-bwd"),
            Formula(
                rf"\Delta_{{{i}}} = {back}\frac{{1}}{{\mathrm{{rms}}_{{{i}}}}} \left[ G - \bar a_{{{i}}} \circ"
                rf" \mathrm{{mean}}(G \circ \bar a_{{{i}}}) \right]",
                "L-rms-bwd",
            ),
            Formula(rf"\partial w_{{{i}}} = \sum_{{\mathrm{{tok}}}} \bar a_{{{i}}} \circ \Delta_{{{o}}}", "L-rms-grad"),
        ),
        "errata": (),
        "sources": (
            ("forward", "paper/rmsnorm.py forward"),
            ("forward", "ops/rmsnorm.py forward"),
            ("backward", "paper/rmsnorm.py delta_prev"),
            ("backward", "ops/rmsnorm.py backward"),
            ("backward", "ops/rmsnorm.py grad_w"),
        ),
        "derived_in": ("rmsnorm",),
    }


_NORMS: dict[type[Norm], Callable[[int, str], dict[str, Any]]] = {LayerNorm: _layer_norm, RMSNorm: _rms_norm}


def linear(i: int, branches: Sequence[Branch], summary: str, beyond: str = "") -> dict[str, Any]:
    """Linear layers that read a_i: output = a_i w + b, plus the adapter's branch if it has one, with a magnitude m per
    output for DoRA. `beyond` is the check of several branches, which the paper does not have."""
    forward, extra, terms, grads = [], [], [], []
    adapted = any(branch.layer.adapted for branch in branches)
    for branch in branches:
        w, b, d, u, m = (subscripted(letter, branch.number) for letter in "wbdum")
        z = subscripted("z", branch.number) if len(branches) > 1 else "z"
        output, delta = branch.output, branch.delta
        lora, dora = branch.layer.adapted, has_magnitude(branch.layer)
        product = rf"a_{{{i}}} {w}" + (rf" + s \, a_{{{i}}} {d} {u}" if lora else "")
        signal = delta if not dora else rf"\Delta_{z}" if z == "z" else rf"\Delta_{{{z}}}"
        bias = branch.layer.plain().bias is not None
        added = rf" + \tilde {b}" if bias else ""
        if dora:
            forward.append(
                Formula(rf"{z} = {product} \qquad {output} = {z} \, \mathrm{{diag}}({m} / c){added}", "DoRA")
            )
            extra.append(
                Formula(
                    rf"{signal} = {delta} \, \mathrm{{diag}}({m} / c) \qquad \partial {m} ="
                    rf" \frac{{1}}{{c}} \sum_{{\mathrm{{tok}}}} {delta} \circ {z}",
                    "DoRA",
                )
            )
        else:
            equation = "43" if beyond and lora else beyond or "Table 2"
            forward.append(Formula(rf"{output} = {product}{added}", equation))
        terms.append(rf"{signal} {w}^t" + (rf" + s \, {signal} ({d} {u})^t" if lora else ""))
        if lora:
            grad = (
                rf"\partial {d} = s \, a_{{{i}}}^t {signal} {u}^t \qquad \partial {u} = s \, (a_{{{i}}} {d})^t {signal}"
            )
        else:
            grad = rf"\partial {w} = a_{{{i}}}^t {delta}"
            grad += rf" \qquad \partial {b} = \sum_{{\mathrm{{tok}}}} {delta}" if bias else ""
        grads.append(Formula(grad, "45, 46" if lora else beyond or "Table 3"))
    joined = r" \qquad + ".join(terms) if adapted else " + ".join(terms)  # a narrow page can break at \qquad
    back = rf"\Delta_{{{i}}} = {joined}"
    return {
        "summary": summary,
        "forward": tuple(forward),
        "backward": (*extra, Formula(back, "44, R3" if adapted else beyond or "Table 2"), *grads),
        "errata": ("R3", "R11") if adapted else (),
        "sources": _linear_sources([branch.layer for branch in branches]),
    }


def has_magnitude(layer: Affine) -> bool:
    """Whether the layer has a DoRA adapter."""
    return layer.named_symbols().get("m") is not None


def _linear_sources(layers: Sequence[Affine]) -> tuple[tuple[str, str], ...]:
    adapted, dora = any(layer.adapted for layer in layers), any(has_magnitude(layer) for layer in layers)
    lora_names = ("upstream", "backward", "grad_d", "grad_u", *(("column_norms", "grad_m") if dora else ()))
    return (
        ("forward", "ops/linear.py forward"),
        *([("forward", "ops/lora.py forward")] if adapted else []),
        ("backward", "ops/linear.py backward"),
        *([("backward", f"ops/lora.py {name}") for name in lora_names] if adapted else []),
        ("backward", "ops/linear.py grad_w"),
        *([("backward", "ops/linear.py grad_b")] if any(layer.plain().bias is not None for layer in layers) else []),
    )


def embedding(tied: bool, positions: bool) -> dict[str, Any]:
    """With a table of positions, or without: then they enter in attention."""
    head = r" + \Delta_{12}^t a_{11}" if tied else ""
    position = r"\mathrm{ohe}(0, \dots, n_T - 1)"
    added = rf" + {position} \, w_{{\mathrm{{pos}}}}" if positions else ""
    tables = (
        "Each token selects its row of the token table, its position selects a row of the position table, and the two rows"
        " are added. In the backward pass, the error of each token is added to the gradient of exactly these rows."
        if positions
        else "Each token selects its row of the token table. There is no table of positions: they enter in attention, as"
        " rotations of queries and keys. In the backward pass, the error of each token is added to the gradient of its row."
    )
    if tied:
        tables += " The logits have the same token table, so their gradient is added to this one."
    by_token = Formula(
        rf"\partial w_{{\mathrm{{tok}}}} = \mathrm{{ohe}}(a_0)^t \Delta_1{head}", "3, R9" if tied else "3"
    )
    by_position = Formula(rf"\partial w_{{\mathrm{{pos}}}} = {position}^t \Delta_1", "3")
    return {
        "title": "Embedding",
        "summary": tables,
        "forward": (Formula(rf"a_1 = \mathrm{{ohe}}(a_0) \, w_{{\mathrm{{tok}}}}{added}", "2"),),
        "backward": (by_token, by_position) if positions else (by_token,),
        "errata": ("R9",) if tied else (),
        "sources": (("forward", "ops/embedding.py forward"), ("backward", "ops/embedding.py grad_w")),
    }


def skip(left: int, branch: int, o: int) -> dict[str, Any]:
    return {
        "summary": "Adds the output of the branch to the residual stream, which itself passes unchanged. In the backward"
        " pass, an addition copies the error: one copy goes into the branch, one goes straight along the stream. This"
        " direct path is what makes deep networks trainable.",
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
    "silu": (
        Formula(r"g(x) = x \, \sigma(x) \qquad \sigma(x) = \frac{1}{1 + e^{-x}}", "L-silu-fwd"),
        Formula(r"g'(x) = \sigma(x) \left[ 1 + x \, (1 - \sigma(x)) \right]", "L-silu-bwd"),
    ),
}
_NAMES_OF_G = {
    "gelu_tanh": "GELU, in its tanh form",
    "gelu": "GELU",
    "relu": "ReLU",
    "relu2": "Squared ReLU (the positive part, squared)",
    "silu": "SiLU (x times its sigmoid)",
}
_INNER_G = {
    "gelu_tanh": "ops/activation.py _gelu_tanh",
    "gelu": "ops/activation.py _gelu",
    "relu2": "ops/activation.py _relu2",
    "silu": "paper/gated.py g_prime",
}


def activation(g: str) -> dict[str, Any]:
    return {
        "title": "Activation",
        "summary": f"{_NAMES_OF_G[g]}: lets positive hidden values pass and suppresses negative ones. In the backward pass,"
        " the slope of the function at each value decides how much of the error passes.",
        "forward": (Formula(r"a_8 = g(a_7)", "Table 2"), *_BEYOND_G.get(g, ())[:1]),
        "backward": (Formula(r"\Delta_7 = \Delta_8 \circ g'(a_7)", "Table 2"), *_BEYOND_G.get(g, ())[1:]),
        "errata": ("R39",) if g == "gelu_tanh" else (),
        "sources": (
            ("forward", "ops/activation.py forward"),
            ("backward", "ops/activation.py backward"),
            *([("backward", _INNER_G[g])] if g in _INNER_G else []),
        ),
    }


def gated_activation(g: str) -> dict[str, Any]:
    gate, up = r"\mathrm{gate}", r"\mathrm{up}"
    back = (
        rf"\Delta_{{{gate}}} = \Delta_8 \circ {up} \circ g'({gate}) \qquad \Delta_{{{up}}} = \Delta_8 \circ g({gate})"
    )
    return {
        "title": "Activation",
        "summary": f"Each hidden value of up is multiplied by a function of its gate. The function: {_NAMES_OF_G[g]}. In the"
        " backward pass, the product rule gives two errors: that of up is multiplied by the function, that of the gate by up"
        " and by the slope of the function.",
        "forward": (Formula(rf"a_8 = g({gate}) \circ {up}", "L-gate-fwd"), *_BEYOND_G.get(g, ())[:1]),
        "backward": (Formula(back, "L-gate-bwd"), *_BEYOND_G.get(g, ())[1:]),
        "errata": (),
        "sources": (
            ("forward", "paper/gated.py forward"),
            ("forward", "ops/gated.py forward"),
            ("backward", "paper/gated.py delta_gate"),
            ("backward", "paper/gated.py delta_up"),
            ("backward", "ops/gated.py backward"),
            ("backward", _INNER_G[g]),
        ),
        "derived_in": ("gated",),
    }


def loss() -> dict[str, Any]:
    return {
        "title": "Loss",
        **LOSSES["sentence"],
        "errata": ("R5",),
        "sources": (("forward", "ops/loss.py forward_and_delta"), ("backward", "ops/loss.py forward_and_delta")),
    }


# The last station by what is explained: its definition is that of the numbers beside it
LOSSES: dict[str, dict[str, Any]] = {
    "sentence": {
        "summary": "Softmax turns the logits into probabilities. The loss is the mean surprise, −log of the probability that"
        " each true next token was given. The backward pass starts here: the error of each vocabulary token is its"
        " probability, minus 1 for the correct one, divided by the number of targets n.",
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
    },
    "position": {
        "summary": "Softmax turns the logits into probabilities. The loss of one token alone is explained: its surprise,"
        " −log of the probability that it was given at its row t. The backward pass starts here: the error of each"
        " vocabulary token in row t is its probability, minus 1 for the correct one. All other rows"
        " are 0, and nothing is divided.",
        "forward": (
            Formula(
                r"y_{\mathrm{pred}} = \mathrm{softmax}(a_{12}) \qquad L = -\log y_{\mathrm{pred}}(t)_{\mathrm{target}(t)}",
                "Section 1",
            ),
        ),
        "backward": (
            Formula(
                r"\Delta_{12}(t) = y_{\mathrm{pred}}(t) - y_{\mathrm{gt}}(t) \qquad \Delta_{12}(s) = 0, \; s \neq t",
                "Table 2",
            ),
        ),
    },
    "difference": {
        "summary": "A difference of two logits is explained: that of token u minus that of token v, at row t. The softmax is"
        " shown, and does not take part. The backward pass starts here: the error is 1 for u, −1 for v, and 0 everywhere"
        " else.",
        "forward": (
            Formula(
                r"y_{\mathrm{pred}} = \mathrm{softmax}(a_{12}) \qquad L = a_{12}(t)_u - a_{12}(t)_v",
                "a difference of logits",
            ),
        ),
        "backward": (
            Formula(
                r"\Delta_{12}(t)_u = 1 \qquad \Delta_{12}(t)_v = -1 \qquad \Delta_{12} = 0 \; \mathrm{elsewhere}",
                "a difference of logits",
            ),
        ),
    },
}


def tokens() -> dict[str, Any]:
    return {
        "title": "Tokens",
        "summary": "The sentence, split into tokens, each represented by its id. Integers have no gradient, so the backward"
        " pass ends at the embedding. But if each token is written as a one-hot row, the same rule gives a Δ₀: to first"
        " order, how the explained number would change if another token stood at this position.",
        "forward": (Formula(r"a_0 \in \{0, \dots, n_{\mathrm{vocab}} - 1\}^{n_T}", "Section 1"),),
        "backward": (Formula(r"\Delta_0 = \Delta_1 w_{\mathrm{tok}}^t", "Section 2"),),
        "errata": (),
        "sources": (("forward", "ops/embedding.py forward"), ("backward", "ops/linear.py backward")),
    }

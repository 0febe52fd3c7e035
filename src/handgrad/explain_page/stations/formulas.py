"""The formulas of each kind of layer, forward and backward, with a summary for the reader: in LaTeX, shown as MathML.

Each function below returns what a station tells about a kind of layer, under the names of its inputs and outputs: its
summary, its formulas with their equation numbers, the errata that apply, and the functions that implement it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from latex2mathml.converter import convert

from ...model.layers.linear import Affine
from ...model.layers.norms import LayerNorm, Norm, RMSNorm
from ...model.steps import signal


class Formula(NamedTuple):
    latex: str
    equation: str  # its number in the paper, or the table or section it is in; for a layer beyond it the check's id


@dataclass(frozen=True)
class About:
    """What a reader is told about a station."""

    title: str
    summary: str
    forward: tuple[Formula, ...]
    backward: tuple[Formula, ...]
    errata: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()  # "forward" or "backward", and the name of a function
    derived_in: tuple[str, ...] = ()  # pages of docs/layers that derive what is not in the paper


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


def written(name: str) -> str:
    """The LaTeX of a tensor of the trace: blocks.0.a_5 → a_{5}; an output with a word for a name is that word"""
    kind, _, index = name.rpartition(".")[2].partition("_")
    number, _, word = index.partition("_")
    if kind == "a" and not number.isdigit():
        return rf"\mathrm{{{index}}}"
    beside = rf", \, \mathrm{{{word}}}" if word else ""
    return subscripted("a" if kind == "a" else r"\Delta", number + beside)


def norm(layer: Norm, i: str, names: tuple[str, str], back: str = "") -> About:
    """The norm with the parameters w_i, from one activation to another. `back` is what reaches its input by other ways."""
    a, o = names
    gain = rf"\mathrm{{diag}}(w_{{{i}}})" if not layer.offset else rf"\mathrm{{diag}}({layer.offset:g} + w_{{{i}}})"
    symbols = Symbols(i, written(a), written(o), written(signal(a)), written(signal(o)), gain, back)
    return _NORMS[type(layer)](symbols, getattr(layer, "bias", None) is not None)


class Symbols(NamedTuple):
    """What a norm's formulas are written with."""

    i: str  # the number of the parameters
    a: str
    o: str
    delta_a: str
    delta_o: str
    gain: str  # the matrix
    back: str  # the part of delta_a that does not come through the norm


def _layer_norm(symbols: Symbols, has_bias: bool) -> About:
    i, a, o, delta_a, delta_o, gain, back = symbols
    of_bias = rf" \qquad \partial b_{{{i}}} = \sum_{{\mathrm{{tok}}}} {delta_o}" if has_bias else ""
    return About(
        title="Norm",
        summary="Normalizes each token separately to mean 0 and standard deviation 1, then scales each feature by w"
        + (" and shifts it by b." if has_bias else ".")
        + " In the backward pass, the error loses its part along the two changes of a token that the norm"
        " ignores: adding a constant to all its features, and scaling them.",
        forward=(
            Formula(rf"\bar a_{{{i}}} = \frac{{{a} - \mu_{{{i}}}}}{{\sigma_{{{i}}}}}", "36"),
            Formula(rf"{o} = \bar a_{{{i}}} \, {gain}" + (rf" + \tilde b_{{{i}}}" if has_bias else ""), "38"),
        ),
        backward=(
            Formula(rf"G = {delta_o} \, {gain}", "40"),
            Formula(
                rf"{delta_a} = {back}\frac{{1}}{{\sigma_{{{i}}}}} \left[ G - \mathrm{{mean}}(G) - \bar a_{{{i}}} \circ"
                rf" \mathrm{{mean}}(G \circ \bar a_{{{i}}}) \right]",
                "40",
            ),
            Formula(
                rf"\partial w_{{{i}}} = \sum_{{\mathrm{{tok}}}} \bar a_{{{i}}} \circ {delta_o}{of_bias}",
                "41, 42" if has_bias else "41",
            ),
        ),
        errata=("R8",),
        sources=(
            ("forward", "ops/layernorm.py forward"),
            ("backward", "ops/layernorm.py backward"),
            ("backward", "ops/layernorm.py grad_w"),
            *([("backward", "ops/layernorm.py grad_b")] if has_bias else []),
        ),
    )


def _rms_norm(symbols: Symbols, has_bias: bool) -> About:
    i, a, o, delta_a, delta_o, gain, back = symbols
    return About(
        title="Norm",
        summary="Divides each token by the root mean square of its features, then scales each feature by"
        f" {'1 + w' if '+' in gain else 'w'}. Unlike the"
        " paper's norm, it neither subtracts a mean nor adds an offset. In the backward pass, the error loses its part along"
        " the one change of a token that the norm ignores: scaling it.",
        forward=(
            Formula(
                rf"\mathrm{{rms}}_{{{i}}} = \sqrt{{\mathrm{{mean}}({a} \circ {a}) + \varepsilon}} \qquad"
                rf" \bar a_{{{i}}} = \frac{{{a}}}{{\mathrm{{rms}}_{{{i}}}}}",
                "L-rms-fwd",
            ),
            Formula(rf"{o} = \bar a_{{{i}}} \, {gain}", "L-rms-fwd"),
        ),
        backward=(
            Formula(rf"G = {delta_o} \, {gain}", "L-rms-bwd"),
            Formula(
                rf"{delta_a} = {back}\frac{{1}}{{\mathrm{{rms}}_{{{i}}}}} \left[ G - \bar a_{{{i}}} \circ"
                rf" \mathrm{{mean}}(G \circ \bar a_{{{i}}}) \right]",
                "L-rms-bwd",
            ),
            Formula(rf"\partial w_{{{i}}} = \sum_{{\mathrm{{tok}}}} \bar a_{{{i}}} \circ {delta_o}", "L-rms-grad"),
        ),
        sources=(
            ("forward", "paper/rmsnorm.py forward"),
            ("forward", "ops/rmsnorm.py forward"),
            ("backward", "paper/rmsnorm.py delta_prev"),
            ("backward", "ops/rmsnorm.py backward"),
            ("backward", "ops/rmsnorm.py grad_w"),
        ),
        derived_in=("rmsnorm",),
    )


_NORMS: dict[type[Norm], Callable[..., About]] = {LayerNorm: _layer_norm, RMSNorm: _rms_norm}


def linear(name: str, branches: Sequence[Branch], about: tuple[str, str], beyond: str = "", beside: str = "") -> About:
    """Linear layers that read the activation a of that name: output = a w + b, plus the adapter's branch if it has one, with
    a magnitude m per output for DoRA. `about` is the title and the summary, `beyond` the check of several branches, which
    the paper does not have, `beside` what reaches the error signal of a by other ways."""
    title, summary = about
    a, forward, extra, terms, grads = written(name), [], [], [], []
    adapted = any(branch.layer.adapted for branch in branches)
    for branch in branches:
        w, b, d, u, m = (subscripted(letter, branch.number) for letter in "wbdum")
        z = subscripted("z", branch.number) if len(branches) > 1 else "z"
        output, delta = branch.output, branch.delta
        lora, dora = branch.layer.adapted, has_magnitude(branch.layer)
        product = rf"{a} {w}" + (rf" + s \, {a} {d} {u}" if lora else "")
        passed = delta if not dora else rf"\Delta_{z}" if z == "z" else rf"\Delta_{{{z}}}"
        bias = branch.layer.plain().bias is not None
        added = rf" + \tilde {b}" if bias else ""
        if dora:
            forward.append(
                Formula(rf"{z} = {product} \qquad {output} = {z} \, \mathrm{{diag}}({m} / c){added}", "DoRA")
            )
            extra.append(
                Formula(
                    rf"{passed} = {delta} \, \mathrm{{diag}}({m} / c) \qquad \partial {m} ="
                    rf" \frac{{1}}{{c}} \sum_{{\mathrm{{tok}}}} {delta} \circ {z}",
                    "DoRA",
                )
            )
        else:
            equation = "43" if beyond and lora else beyond or "Table 2"
            forward.append(Formula(rf"{output} = {product}{added}", equation))
        terms.append(rf"{passed} {w}^t" + (rf" + s \, {passed} ({d} {u})^t" if lora else ""))
        if lora:
            grad = rf"\partial {d} = s \, {a}^t {passed} {u}^t \qquad \partial {u} = s \, ({a} {d})^t {passed}"
        else:
            grad = rf"\partial {w} = {a}^t {delta}"
            grad += rf" \qquad \partial {b} = \sum_{{\mathrm{{tok}}}} {delta}" if bias else ""
        grads.append(Formula(grad, "45, 46" if lora else beyond or "Table 3"))
    joined = r" \qquad + ".join(terms) if adapted else " + ".join(terms)  # a narrow page can break at \qquad
    back = rf"{written(signal(name))} = {beside}{joined}"
    return About(
        title=title,
        summary=summary,
        forward=tuple(forward),
        backward=(*extra, Formula(back, "44, R3" if adapted else beyond or "Table 2"), *grads),
        errata=("R3", "R11") if adapted else (),
        sources=_linear_sources([branch.layer for branch in branches]),
    )


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


def skip(inputs: tuple[str, ...], output: str, scale: float = 1.0) -> About:
    """output = stream + scale · Σ branch; the stream is the first input."""
    stream, *branches = inputs
    passed, by = written(signal(output)), "" if scale == 1 else rf"{scale:.4g} \, "
    summed = " + ".join(map(written, branches))
    added = rf"{by}({summed})" if by and len(branches) > 1 else f"{by}{summed}"
    what, into = (
        ("output of the branch", "the branch") if len(branches) == 1 else ("outputs of both branches", "each branch")
    )
    scaled = f", times {scale:.4g}," if by else ""
    back = r"(\text{through the branch})" if len(branches) == 1 else r"(\text{through the branches})"
    return About(
        title="Skip connection",
        summary=f"Adds the {what}{scaled} to the residual stream, which itself passes unchanged. In the backward"
        f" pass, an addition copies the error: one copy{scaled} goes into {into}, one goes straight along the stream. This"
        " direct path is what makes deep networks trainable.",
        forward=(Formula(f"{written(output)} = {written(stream)} + {added}", "Table 2"),),
        backward=(
            Formula(" = ".join([*(written(signal(x)) for x in branches), f"{by}{passed}"]), "Table 2"),
            Formula(rf"{written(signal(stream))} = {passed} + {back}", "Table 2"),
        ),
        sources=(("forward", "model/block.py Residual.forward"), ("backward", "model/block.py Residual.backward")),
    )


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


def activation(g: str, name: str, output: str) -> About:
    a, o, delta, incoming = (written(x) for x in (name, output, signal(name), signal(output)))
    return About(
        title="Activation",
        summary=f"{_NAMES_OF_G[g]}: lets positive hidden values pass and suppresses negative ones. In the backward pass,"
        " the slope of the function at each value decides how much of the error passes.",
        forward=(Formula(rf"{o} = g({a})", "Table 2"), *_BEYOND_G.get(g, ())[:1]),
        backward=(Formula(rf"{delta} = {incoming} \circ g'({a})", "Table 2"), *_BEYOND_G.get(g, ())[1:]),
        errata=("R39",) if g == "gelu_tanh" else (),
        sources=(
            ("forward", "ops/activation.py forward"),
            ("backward", "ops/activation.py backward"),
            *([("backward", _INNER_G[g])] if g in _INNER_G else []),
        ),
    )


def gated_activation(g: str, inputs: tuple[str, str], output: str) -> About:
    gate, up, o = (written(x) for x in (*inputs, output))
    delta_gate, delta_up, incoming = (written(signal(x)) for x in (*inputs, output))
    back = rf"{delta_gate} = {incoming} \circ {up} \circ g'({gate}) \qquad {delta_up} = {incoming} \circ g({gate})"
    return About(
        title="Activation",
        summary=f"Each hidden value of up is multiplied by a function of its gate. The function: {_NAMES_OF_G[g]}. In the"
        " backward pass, the product rule gives two errors: that of up is multiplied by the function, that of the gate by up"
        " and by the slope of the function.",
        forward=(Formula(rf"{o} = g({gate}) \circ {up}", "L-gate-fwd"), *_BEYOND_G.get(g, ())[:1]),
        backward=(Formula(back, "L-gate-bwd"), *_BEYOND_G.get(g, ())[1:]),
        sources=(
            ("forward", "paper/gated.py forward"),
            ("forward", "ops/gated.py forward"),
            ("backward", "paper/gated.py delta_gate"),
            ("backward", "paper/gated.py delta_up"),
            ("backward", "ops/gated.py backward"),
            ("backward", _INNER_G[g]),
        ),
        derived_in=("gated",),
    )

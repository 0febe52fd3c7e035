"""The formulas of each layer, forward and backward, with a summary for the reader; written in LaTeX, shown as MathML.

Each function below returns what `stations.Station` needs to know about a kind of layer: its summary, its formulas with
their equation numbers, the errata that apply, and the functions that implement it (names of `sources.SOURCES`).
"""

import re
from functools import cache
from typing import Any, NamedTuple

from latex2mathml.converter import convert

from ..model.layers import Affine


class Formula(NamedTuple):
    latex: str
    equation: str  # equation number in the paper, or the table or section it is in


ERRATA = {
    "R1": "The paper multiplies the scores by a mask of zeros and ones. A score of 0 still gets weight e⁰ = 1 in the"
    " softmax, so future tokens would stay visible. The mask has to put −∞ above the diagonal.",
    "R3": "For a frozen layer with an adapter, the paper prints the adapter's term of Δ only. A frozen weight gets no"
    " gradient, but it still passes the error on, so its term is needed too.",
    "R5": "Printed for all rows. The last token has no target, so its row of Δ₁₂ is 0. The loss here is the mean over"
    " the targets, so every Δ is divided by their number.",
    "R8": "Printed without ε, which gives 0/0 for a constant row. With σ = √(var + ε) in both places, (40) is exact.",
    "R9": "The paper ties the two tables but gives no gradient rule: a matrix that is used twice gets the sum of both"
    " gradients.",
    "R11": "The paper scales the branch by α, which is r times too much. Here s is α/r, or α/√r, as LoRA libraries use.",
    "R32": "∂b_k is 0 in exact arithmetic. Summing in floating point would give rounding errors, so an exact 0 is written.",
    "R39": "The paper leaves g open. GPT-2 uses the tanh form of GELU.",
}


@cache
def mathml(latex: str) -> str:
    """Convert LaTeX to MathML. An upright word becomes one identifier instead of single letters."""
    made = convert(latex, display="block")
    letters = r'<mrow>((?:<mi mathvariant="normal">[^<]*</mi>)+)</mrow>'
    made = re.sub(letters, lambda m: f"<mi>{re.sub('<[^>]*>', '', m[1])}</mi>", made)
    return made.replace("<mo>&#x0007E;</mo>", '<mo stretchy="true">&#x002DC;</mo>')


# ── the layers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _norm_back(i: int) -> str:
    """Λ: the error signal that a norm sends back, (40) row by row, as ops/layernorm.py computes it."""
    return (
        rf"\frac{{1}}{{\sigma_{{{i}}}}} \left[ G - \mathrm{{mean}}(G) - \bar a_{{{i}}} \circ"
        rf" \mathrm{{mean}}(G \circ \bar a_{{{i}}}) \right]"
    )


def norm(i: int, back: str) -> dict[str, Any]:
    """The norm of a_i, with output a_{i+1}. `back` is the part of Δ_i that does not come through the norm."""
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


def linear(i: int, o: int, summary: str, layer: Affine, bias: bool = True) -> dict[str, Any]:
    """a_o = a_i w_i + b_i, plus the adapter's branch if it has one, with a magnitude m per output for DoRA."""
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
        "summary": summary,
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


def embedding(tied: bool) -> dict[str, Any]:
    head = r" + \Delta_{12}^t a_{11}" if tied else ""
    return {
        "title": "Embedding",
        "summary": "Each token selects its row of the token table, its position selects a row of the position table, and the"
        " two rows are added. In the backward pass, the error of each token is added to the gradient of exactly these"
        " rows.",
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


def attention(causal: bool, layer: Affine, key_bias: bool) -> dict[str, Any]:
    mask = r"\mathrm{mask}" if causal else ""
    tiles = ("rho_tile", "causal_signal_tile", "_backward_in_tiles")
    adapted = layer.adapted
    b_k = r" + \tilde b_k" if key_bias else ""
    made = rf"q = a_2 w_q + \tilde b_q \qquad k = a_2 w_k{b_k} \qquad v = a_2 w_v + \tilde b_v"
    grads = (
        r"\partial w_v = (\rho a_2)^t \Delta_3^h \qquad \partial w_q = a_2^t \Delta_{\mathrm{raw}} k \qquad"
        r" \partial w_k = (\Delta_{\mathrm{raw}} a_2)^t q" + (r" \qquad \partial b_k = 0" if key_bias else "")
    )
    if adapted:  # w is everything that multiplies a_2: the frozen weight and the adapter
        turned = r" \, \mathrm{diag}(m_2 / c)" if layer.named_symbols().get("m") is not None else ""
        made += rf" \qquad [w_q \; w_k \; w_v] = (w_2 + s \, d_2 u_2){turned}"
        signal = rf"\Delta_{{qkv}}{turned}"
        grads = (
            r"\Delta_{qkv} = [\Delta_{\mathrm{raw}} k \;\; \Delta_{\mathrm{raw}}^t q \;\; \rho^t \Delta_3^h] \qquad"
            rf" \partial d_2 = s \, a_2^t {signal} u_2^t \qquad \partial u_2 = s \, (a_2 d_2)^t {signal}"
        )
    return {
        "title": "Attention",
        "summary": "The only layer in which tokens exchange information. The query of each token is compared with the keys"
        f" of {'that token and all earlier ones' if causal else 'all tokens'}; the better a key matches, the more of its"
        " token's value is taken. In the backward pass, the error splits into two branches: one through the values, one"
        " through the weights ρ to the queries and keys that produced them.",
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
}


def activation(g: str) -> dict[str, Any]:
    inner = {"gelu_tanh": "_gelu_tanh", "gelu": "_gelu", "relu2": "_relu2"}.get(g)
    name = {
        "gelu_tanh": "GELU, in its tanh form",
        "gelu": "GELU",
        "relu": "ReLU",
        "relu2": "Squared ReLU (the positive part, squared)",
    }[g]
    return {
        "title": "Activation",
        "summary": f"{name}: lets positive hidden values pass and suppresses negative ones. In the backward pass, the slope"
        " of the function at each value decides how much of the error passes.",
        "forward": (Formula(r"a_8 = g(a_7)", "Table 2"), *_BEYOND_G.get(g, ())[:1]),
        "backward": (Formula(r"\Delta_7 = \Delta_8 \circ g'(a_7)", "Table 2"), *_BEYOND_G.get(g, ())[1:]),
        "errata": ("R39",) if g == "gelu_tanh" else (),
        "sources": (
            ("forward", "ops/activation.py forward"),
            ("backward", "ops/activation.py backward"),
            *([("backward", f"ops/activation.py {inner}")] if inner else []),
        ),
    }


def loss() -> dict[str, Any]:
    return {
        "title": "Loss",
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
        "errata": ("R5",),
        "sources": (("forward", "ops/loss.py forward_and_delta"), ("backward", "ops/loss.py forward_and_delta")),
    }


def tokens() -> dict[str, Any]:
    return {
        "title": "Tokens",
        "summary": "The sentence, split into tokens, each represented by its id. Integers have no gradient, so the backward"
        " pass ends at the embedding. But if each token is written as a one-hot row, the same rule gives a Δ₀: to first"
        " order, how the loss would change if another token stood at this position.",
        "forward": (Formula(r"a_0 \in \{0, \dots, n_{\mathrm{vocab}} - 1\}^{n_T}", "Section 1"),),
        "backward": (Formula(r"\Delta_0 = \Delta_1 w_{\mathrm{tok}}^t", "Section 2"),),
        "errata": (),
        "sources": (("forward", "ops/embedding.py forward"), ("backward", "ops/linear.py backward")),
    }

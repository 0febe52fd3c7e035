"""The formulas of attention: those of the paper, and what a model adds to them.

    a_2 → x_q, x_k, v → norms of queries and keys → rotation → q, k → heads

Without norms and rotation x_q is q and x_k is k; if besides every head has its own keys, the formulas are the paper's. They
are written with the paper's names of the input and the output, a_2 and a_3, for which `attention` puts the step's own.
"""

import re
from collections.abc import Iterator

from ...model.config import ModelConfig
from ...model.layers.attention import Attention
from ...model.layers.linear import Affine
from ...model.steps import signal
from ...ops import rotary
from .formulas import About, Formula, has_magnitude, written

RAW, CAUSAL = r"\Delta_{\mathrm{raw}}", r"\Delta_{\mathrm{causal}}"
Sources = tuple[tuple[str, str], ...]


def attention(attn: Attention, config: ModelConfig, names: tuple[str, str], block: int, back: str = "") -> About:
    """The attention of one block, which reads one activation and computes another. `back` is what reaches the error signal
    of what it reads by other ways."""
    name, output = names
    adapted = any(layer.adapted for layer in attn.projections())
    grouped, fused = attn.n_kv_heads < attn.n_heads, attn.has("qkv")
    changed = attn.normed or attn.rotated
    plain_scores = attn.scores.scale is None and attn.scores.cap is None and attn.sinks is None
    as_in_paper = not changed and not grouped and plain_scores and (fused or not adapted)
    no_effect = (
        "k" in _biases(attn) and not changed and attn.scores.cap is None and attn.sinks is None
    )  # b_k adds the same to all scores of a row
    forward = (_projections(attn, adapted), *_norms(attn), *_rotation(attn, config, block), *_heads(attn, grouped))
    backward = _errors_as_in_paper(attn, adapted) if as_in_paper else _errors(attn, config, adapted, grouped)
    start = r"\Delta_2 = "
    backward = tuple(x._replace(latex=x.latex.replace(start, start + back)) for x in backward)
    return About(
        title="Attention",
        summary=_summary(attn, config, block),
        forward=tuple(_renamed(formula, name, output) for formula in forward),
        backward=tuple(_renamed(formula, name, output) for formula in backward),
        errata=(
            *(["R1"] if attn.scores.causal else []),
            *(["R32"] if fused and (no_effect or not config.key_bias) else []),
            *(["R3", "R11"] if adapted else []),
        ),
        sources=_sources(attn, as_in_paper),
        derived_in=(
            *(["grouped_query"] if grouped or attn.scores.window is not None else []),
            *([] if plain_scores else ["scores"]),
            *(["rotary"] if attn.rotated else []),
            *(["rmsnorm"] if attn.normed else []),
        ),
    )


def _renamed(formula: Formula, name: str, output: str) -> Formula:
    names = {"a_2": name, r"\Delta_2": signal(name), "a_3": output, r"\Delta_3": signal(output)}
    return formula._replace(latex=re.sub(r"(a|\\Delta)_[23](?!\w)", lambda m: written(names[m[0]]), formula.latex))


def _summary(attn: Attention, config: ModelConfig, block: int) -> str:
    seen = "all tokens"
    if attn.scores.causal:
        before = "all earlier ones" if attn.scores.window is None else f"the {attn.scores.window - 1} before it"
        seen = f"that token and {before}"
    scaling = config.rotary_tables()[attn.rotary_table].scaling.rope_type if attn.rotated else "default"
    joint = attn.normed and len(attn.q_norm.weight) > attn.q_width
    extra = {
        "Each head's queries and keys are first normalized to root mean square 1.": attn.normed and not joint,
        "The queries of all heads together, and the keys, are first normalized to root mean square 1.": joint,
        "Queries and keys are rotated by angles proportional to their positions, so a score depends on the distance of"
        " two tokens; errors are rotated back.": attn.rotated,
        f"Only the first {config.rotary_width_of_head} features of a head are rotated.": attn.partly_rotated,
        "Neighboring features of a head are rotated together.": attn.rotated and attn.neighbors,
        "Blocks with a window rotate by frequencies of their own, as here.": attn.rotated and attn.rotary_table > 0,
        f"The angles are scaled for a longer context ({scaling}).": attn.rotated and scaling != "default",
        "This block does not rotate queries and keys.": config.positions == "rotary" and not attn.rotated,
        f"Scores are capped: none exceeds {attn.scores.cap or 0:g}.": attn.scores.cap is not None,
        "Every head has a sink, a learned score without a value: what it takes of ρ is attention to nothing.": (
            attn.sinks is not None
        ),
        f"{attn.n_heads} heads of queries share {attn.n_kv_heads} of keys and values, in groups of"
        f" {attn.n_heads // attn.n_kv_heads}; the errors of a shared head add up.": attn.n_kv_heads < attn.n_heads,
    }
    return " ".join(
        [
            "The only layer in which tokens exchange information. The query of each token is compared with the keys"
            f" of {seen}; the better a key matches, the more of its token's value is taken. In the backward pass, the error"
            " splits into two branches: one through the values, one through the weights ρ to the queries and keys that"
            " produced them.",
            *(sentence for sentence, applies in extra.items() if applies),
        ]
    )


# ── forward ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _projections(attn: Attention, adapted: bool) -> Formula:
    biases = _biases(attn)
    made = r" \qquad ".join(
        rf"{_projected(attn, letter)} = a_2 {_weight(attn, letter)}"
        + (rf" + \tilde b_{letter}" if letter in biases else "")
        for letter in "qkv"
    )
    if attn.has("qkv") and adapted:  # w is everything that multiplies a_2: the frozen weight and the adapter
        made += rf" \qquad [w_q \; w_k \; w_v] = (w_2 + s \, d_2 u_2){_magnitudes(attn.qkv, '2')}"
    return Formula(made, "9, 4, 43" if adapted else "9, 4")


def _norms(attn: Attention) -> Iterator[Formula]:
    for letter in "qk" if attn.normed else "":
        x, y = _projected(attn, letter), rf"\hat {letter}" if attn.rotated else letter
        yield Formula(
            rf"\bar {x} = \frac{{{x}}}{{\mathrm{{rms}}({x})}} \qquad {y} = \bar {x} \, {_gains(attn, letter)}",
            "L-qknorm-fwd",
        )


def _rotation(attn: Attention, config: ModelConfig, block: int) -> Iterator[Formula]:
    if not attn.rotated:
        return
    table = config.rotary_tables()[attn.rotary_table]
    m, kind = _attention_factor(attn, config), table.scaling.rope_type
    rotated = [rf"{letter}_t = {m}R(t) \, {_rotation_input(attn, letter, 't')}" for letter in "qk"]
    yield Formula(r" \qquad ".join(rotated), "L-rope-fwd")
    base = rf"{table.base:.0f}" if table.base == int(table.base) else rf"{table.base:g}"
    shares = {
        "default": "", "dynamic": "", "longrope": r"\frac{1}{f_i} ", "linear": rf"\frac{{1}}{{{table.scaling.factor:g}}} ",
    }  # fmt: skip
    share = shares.get(kind, rf"\left( \frac{{1 - s_i}}{{{table.scaling.factor:g}}} + s_i \right) ")
    width = r"d_\rho" if not attn.partly_rotated else str(config.rotary_width_of_head)
    theta = rf"\theta_i = {share}{base}^{{-2i / {width}}}"
    plane = "2i, 2i + 1" if attn.neighbors else rf"i, i + {config.rotary_width_of_head // 2}"
    rotates = rf"R(t) \text{{ rotates the features }} {plane} \text{{ by }} \theta_i t"
    yield Formula(rf"{rotates} \qquad {theta}", "L-rope-scaling" if share else "L-rope-fwd")


def _heads(attn: Attention, grouped: bool) -> Iterator[Formula]:
    mask, scale, cap = r"\mathrm{mask}" if attn.scores.causal else "", attn.scores.scale, attn.scores.cap
    q, k, v, rho = ("q^h", "(k^g)", "v^g", r"\rho^h") if grouped else ("q", "k", "v", r"\rho")
    score = rf"\frac{{{q} {k}^t}}{{\sqrt{{d_\rho}}}}" if scale is None else rf"{scale:.4g} \, {q} {k}^t"
    if cap is not None:
        yield Formula(rf"s = {score} \qquad s' = {cap:g} \tanh(s / {cap:g})", "L-cap-fwd")
        score = "s'"
    of_keys, of_all = rho, rf"{mask}\left({score}\right)"
    if attn.sinks is not None:
        of_keys, of_all = rf"[{rho} \;\; \rho_{{\mathrm{{sink}}}}]", rf"[{of_all} \;\; \tilde b_{{\mathrm{{sink}}}}]"
    checks = ["L-gqa-fwd" if grouped else "18, 34"]
    checks += ["L-scale-fwd"] if scale is not None and cap is None else []
    checks += ["L-sink-fwd"] if attn.sinks is not None else []
    yield Formula(
        rf"{of_keys} = \mathrm{{softmax}}\left({of_all}\right) \qquad a_3^h = {rho} \, {v}", ", ".join(checks)
    )
    if grouped:
        yield Formula(
            rf"g = \lfloor h / r \rfloor \text{{, from }} 0 \qquad r = \frac{{n_h}}{{n_{{kv}}}} ="
            rf" \frac{{{attn.n_heads}}}{{{attn.n_kv_heads}}}",
            "L-gqa-fwd",
        )
    if attn.scores.window is not None:
        yield Formula(
            rf"\rho_{{t\beta}} = 0 \; \text{{ unless }} \; t - {attn.scores.window} \lt \beta \le t", "L-window-fwd"
        )


# ── backward ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _errors_of_scores(attn: Attention, grouped: bool) -> Iterator[Formula]:
    h, v, rho = ("^h", "(v^g)", r"\rho^h") if grouped else ("", "v", r"\rho")
    causal, raw = f"{CAUSAL}{h}", f"{RAW}{h}"
    yield Formula(rf"{causal} = [\Delta_3^h {v}^t - ((\Delta_3^h {v}^t) \ominus {rho})^{{\sim}}] \circ {rho}", "25")
    if (cap := attn.scores.cap) is not None:
        yield Formula(rf"\Delta_s{h} = {causal} \circ \left(1 - \tanh^2(s / {cap:g})\right)", "L-cap-bwd")
        causal = rf"\Delta_s{h}"
    if (scale := attn.scores.scale) is None:
        yield Formula(rf"{raw} = \frac{{{causal}}}{{\sqrt{{d_\rho}}}}", "28")
    else:
        yield Formula(rf"{raw} = {scale:.4g} \, {causal}", "L-scale-bwd")
    if attn.sinks is not None:
        sink = r"\mathrm{sink}"
        yield Formula(
            rf"\partial b_{{{sink}}} = -\sum_{{\mathrm{{tok}}}} \rho_{{{sink}}} \circ (\Delta_3^h \ominus a_3^h)",
            "L-sink-grad",
        )


def _errors_as_in_paper(attn: Attention, adapted: bool) -> tuple[Formula, ...]:
    grads = (
        rf"\partial w_v = (\rho a_2)^t \Delta_3^h \qquad \partial w_q = a_2^t {RAW} k \qquad"
        rf" \partial w_k = ({RAW} a_2)^t q" + (r" \qquad \partial b_k = 0" if "k" in _biases(attn) else "")
    )
    if adapted:
        signals = rf"\Delta_{{qkv}} = [{RAW} k \;\; {RAW}^t q \;\; \rho^t \Delta_3^h]"
        gradients = _adapter_gradients(attn.qkv, "2", r"\Delta_{qkv}")
        grads = rf"{signals} \qquad {gradients}"
    return (
        *_errors_of_scores(attn, False),
        Formula(
            rf"\Delta_2 = \sum_h \left( \rho^t \Delta_3^h w_v^t + {RAW} k \, w_q^t + {RAW}^t q \, w_k^t \right)",
            "33, 35",
        ),
        Formula(grads, "45, 46" if adapted else "23, 31, 32"),
    )


def _errors(attn: Attention, config: ModelConfig, adapted: bool, grouped: bool) -> tuple[Formula, ...]:
    """δ is the error signal of q, k or v, as in docs/layers/attention.md; all heads stand side by side in Δ_2."""
    signals = {"q": rf"{RAW} k", "k": rf"{RAW}^t q", "v": r"\rho^t \Delta_3^h"}
    if grouped:
        over = r"\sum_{\lfloor h / r \rfloor = g}"
        signals = {"q": rf"{RAW}^h k^g", "k": rf"{over} ({RAW}^h)^t q^h", "v": rf"{over} (\rho^h)^t \Delta_3^h"}
    up = {"q": "^h", "k": "^g", "v": "^g"} if grouped else dict.fromkeys("qkv", "")
    made = [rf"\delta_{letter}{up[letter]} = {signals[letter]}" for letter in "qkv"]
    terms = [rf"\delta_{{{_projected(attn, x)}}} \, {_weight(attn, x)}^t" for x in "qkv"]
    plus = r" \qquad + " if adapted else " + "  # a narrow page can break at \qquad
    return (
        *_errors_of_scores(attn, grouped),
        Formula(r" \qquad ".join(made), "L-gqa-sum" if grouped else "22, 30"),
        *_errors_of_rotation(attn, config),
        *_errors_of_norms(attn),
        Formula(rf"\Delta_2 = {plus.join(terms)}", "33, 35"),
        *_projection_gradients(attn),
    )


def _errors_of_rotation(attn: Attention, config: ModelConfig) -> Iterator[Formula]:
    if attn.rotated:
        m = _attention_factor(attn, config)
        back = [
            rf"\delta_{{{_rotation_input(attn, letter, '')},t}} = {m}R(-t) \, \delta_{{{letter},t}}" for letter in "qk"
        ]
        yield Formula(r" \qquad ".join(back), "L-rope-bwd")


def _errors_of_norms(attn: Attention) -> Iterator[Formula]:
    for letter in "qk" if attn.normed else "":
        x, y = _projected(attn, letter), rf"\hat {letter}" if attn.rotated else letter
        g, over = f"G_{letter}", "" if len(attn.q_norm.weight) > attn.q_width else r"\sum_h "
        yield Formula(
            rf"{g} = \delta_{{{y}}} \, {_gains(attn, letter)} \qquad \delta_{{{x}}} ="
            rf" \frac{{1}}{{\mathrm{{rms}}({x})}} \left[ {g} - \bar {x} \circ \mathrm{{mean}}({g} \circ \bar {x}) \right]",
            "L-qknorm-bwd",
        )
        yield Formula(
            rf"\partial {_gain(letter)} = {over}\sum_{{\mathrm{{tok}}}} \bar {x} \circ \delta_{{{y}}}", "L-qknorm-grad"
        )


def _projection_gradients(attn: Attention) -> Iterator[Formula]:
    if attn.has("qkv") and attn.qkv.adapted:
        signals = r" \;\; ".join(rf"\delta_{{{_projected(attn, x)}}}" for x in "qkv")
        grads = _adapter_gradients(attn.qkv, "2", r"\Delta_{qkv}")
        yield Formula(rf"\Delta_{{qkv}} = [{signals}] \qquad {grads}", "45, 46")
        return
    biases = _biases(attn)
    for letter in "qkv":
        signal = rf"\delta_{{{_projected(attn, letter)}}}"
        layer = attn.qkv if attn.has("qkv") else getattr(attn, letter)
        if layer.adapted:
            yield Formula(_adapter_gradients(layer, letter, signal), "45, 46")
            continue
        grad = rf"\partial w_{letter} = a_2^t {signal}"
        if letter in biases:
            grad += rf" \qquad \partial b_{letter} = \sum_{{\mathrm{{tok}}}} {signal}"
        yield Formula(grad, "Table 3")


def _adapter_gradients(layer: Affine, number: str, delta: str) -> str:
    signal, d, u = f"{delta}{_magnitudes(layer, number)}", f"d_{number}", f"u_{number}"
    return rf"\partial {d} = s \, a_2^t {signal} {u}^t \qquad \partial {u} = s \, (a_2 {d})^t {signal}"


# ── symbols ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _projected(attn: Attention, letter: str) -> str:
    """The output of a projection: x_q if something follows before it is a query."""
    return f"x_{letter}" if letter in "qk" and (attn.normed or attn.rotated) else letter


def _rotation_input(attn: Attention, letter: str, row: str) -> str:
    if attn.normed:
        return rf"\hat {letter}_{row}" if row else rf"\hat {letter}"
    return f"x_{{{letter},{row}}}" if row else f"x_{letter}"


def _weight(attn: Attention, letter: str) -> str:
    """Everything that multiplies a_2."""
    if attn.has("qkv") or not getattr(attn, letter).adapted:
        return f"w_{letter}"
    return rf"(w_{letter} + s \, d_{letter} u_{letter}){_magnitudes(getattr(attn, letter), letter)}"


def _magnitudes(layer: Affine, number: str) -> str:
    return rf" \, \mathrm{{diag}}(m_{number} / c)" if has_magnitude(layer) else ""


def _gain(letter: str) -> str:
    return rf"w_{{{letter} \, \mathrm{{norm}}}}"


def _gains(attn: Attention, letter: str) -> str:
    """The matrix of the gains of queries or keys."""
    norm = attn.q_norm if letter == "q" else attn.k_norm
    return rf"\mathrm{{diag}}({f'{norm.offset:g} + ' if norm.offset else ''}{_gain(letter)})"


def _attention_factor(attn: Attention, config: ModelConfig) -> str:
    table = config.rotary_tables()[attn.rotary_table]
    m = rotary.frequencies(config.rotary_width_of_head, table.base, table.scaling)[1]
    return "" if m == 1 else rf"{m:.4g} \, "


def _biases(attn: Attention) -> set[str]:
    """The letters of the projections that have a bias."""
    found: set[str] = set()
    for name, layer in zip(attn.inputs, attn.projections(), strict=True):
        plain = layer.plain()
        if plain.bias is not None:
            found |= set(plain.parts_of("b", plain.bias)) if plain.parts else {name}
    return found


def _sources(attn: Attention, as_in_paper: bool) -> Sources:
    tiles = ("rho_tile", "causal_signal_tile", "_backward_in_tiles")
    forward = ["ops/linear.py forward"]
    backward = [f"ops/attention.py {name}" for name in tiles]
    if attn.normed:
        forward += ["paper/rmsnorm.py forward_heads", "ops/rmsnorm.py forward"]
        backward += ["paper/rmsnorm.py delta_prev_heads", "ops/rmsnorm.py backward", "ops/rmsnorm.py grad_w"]
    if attn.rotated:
        forward += ["paper/rotary.py forward", "ops/rotary.py forward"]
        backward += ["paper/rotary.py delta_prev", "ops/rotary.py backward"]
    forward.append("ops/attention.py forward")
    if attn.n_kv_heads < attn.n_heads or attn.scores.window is not None:
        forward.append("paper/grouped_query.py forward")
        backward.append("paper/grouped_query.py sum_over_group")
    if attn.scores.scale is not None or attn.scores.cap is not None or attn.sinks is not None:
        forward.append("paper/scores.py forward")
        backward.append("paper/scores.py backward")
    if attn.sinks is not None:
        backward.append("ops/attention.py sink_signals")
    if not as_in_paper:
        forward.append("model/layers/attention.py Attention.project")
        backward.append("model/layers/attention.py Attention.backward_projections")
    if attn.has("qkv"):
        backward.append("model/layers/linear.py QueryKeyValue.accumulate_bias")
    return (*(("forward", name) for name in forward), *(("backward", name) for name in backward))

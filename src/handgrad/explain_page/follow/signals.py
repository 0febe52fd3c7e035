"""How a cell of an error signal or of a gradient was computed: the sums that `follow.py` shows. The error signal of an
activation is the sum of what the steps that read it send back: a rule per kind of step."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...model.layers.norms import Norm
from ...model.layers.sinks import Sinks
from ...model.layers.taps import Taps
from ...model.passes.objective import LogitDifference
from ...model.steps import signal
from ..presentation.notation import symbol
from ..session.session import TracedSentence
from ..stations.network import NetworkStep
from . import mixture, norms
from .forward import Answer, masked
from .tensors import Cell, Tensors, delta_of, split, wide
from .terms import Factor, Sum, column, number, one, row, taps

PASSED = "Δ of the skip connection"  # beside what comes through the branch


def rule(t: Tensors, sentence: TracedSentence, cell: Cell) -> Answer:
    """The sums that make a cell of an error signal or of a gradient."""
    here, last = split(cell.name)
    if last.startswith("grad_"):
        return _gradient(t, sentence, cell, here, last.removeprefix("grad_"))
    if last.startswith("g_"):
        return _adapter_signal(t, here, last.removeprefix("g_"), cell.row, cell.column)
    if last.startswith(("G_", "mean_G")):
        return norms.inside(t, here, last, cell.row, cell.column)
    readers = t.network.readers(f"{here}a_{last.removeprefix('delta_')}")
    if last in ("delta_z", "delta_conv"):
        return _inside_convolution(t, here, last, cell.row, cell.column)
    if not readers:
        return _scores(t, cell, here) if last in ("delta_causal", "delta_raw") else _queries(t, cell, here)
    sent = [RULES[step.kind](t, sentence, step, cell) for step in readers]
    if len(sent) == 1:
        return sent[0]
    texts = [PASSED if step.kind == "add" else text for step, (text, _) in zip(readers, sent, strict=True)]
    return ", plus ".join(texts), [one for _, sums in sent for one in sums]


# ── the kinds of steps ──────────────────────────────────────────────────────────────────────────────────────────────


def _embedding(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    """Δ_0, of tokens relaxed to vectors"""
    sum = Sum((row(t, step.signals[0], cell.row), row(t, "w_tok", cell.column)), t.model.embed.scale)
    return "Δ₁ · row of the token table", [sum]


def _next(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    return "Δ of the next block's input", [Sum((one(t, step.signals[0], cell.row, cell.column),))]


def _attention(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    """Of q, k and v, all heads"""
    here, i, j, sums = step.here, cell.row, cell.column, []
    for letter in "qkv":
        name = delta_of(t.projected(here, letter))
        x, w = t[name], t[f"{here}w_{letter}"][j].double()
        for h in range(len(x)):
            sums.append(Sum((row(t, name, i, h), _of_head(f"{here}w_{letter}", w, j, h, x.shape[2]))))
    return "Δ of queries, keys and values · rows of their weights", sums


def _convolution(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    """Of B, C or x: the error signal of their product times the other factor"""
    here, b, c, x = step.here, *step.inputs
    sent, other = {
        signal(b): (here + "delta_z", x), signal(c): (step.signals[0], here + "a_conv"), signal(x): (here + "delta_z", b),
    }[cell.name]  # fmt: skip
    i, j = cell.row, cell.column
    return f"{symbol(sent)} · {symbol(other)}", [Sum((one(t, sent, i, j), one(t, other, i, j)))]


def _inside_convolution(t: Tensors, here: str, last: str, i: int, j: int) -> Answer:
    if last == "delta_z":
        return "the taps · Δ_conv of the token and those after it", [
            taps(t, here, here + "delta_conv", i, j, ahead=True)
        ]
    return "Δ₃ · C", [Sum((one(t, here + "delta_3", i, j), one(t, here + "a_C", i, j)))]


def _linear(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    letters = [letter for _, _, held in step.products() for letter in held]
    parts = [
        Sum((row(t, name, cell.row), row(t, f"{step.here}w_{letter}", cell.column)))
        for name, letter in zip(step.signals, letters, strict=True)
    ]
    return "Δ of the output · row of the weight" + (
        "" if len(parts) == 1 else f", of {' and of '.join(letters)}"
    ), parts


def _add(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    sent = one(t, step.signals[0], cell.row, cell.column)
    if step.scale == 1 or cell.name == signal(step.inputs[0]):
        return "the skip connection passes Δ on unchanged", [Sum((sent,))]
    return "Δ of the sum, times the branch's scale", [Sum((sent,), step.scale)]


def _activation(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    i, j = cell.row, cell.column
    inputs = [t[name][i : i + 1, j : j + 1].double() for name in step.inputs]
    slopes = t.block(step.here).mlp.backward_activation(torch.ones_like(inputs[0]), inputs)[0]
    which = [signal(name) for name in step.inputs].index(cell.name)
    gate = symbol(step.inputs[0])
    if step.kind == "activation":
        source, shown = step.inputs[0], f"g′({gate})"
    elif which == 0:
        source, shown = step.inputs[1], f"{symbol(step.inputs[1])} · g′({gate})"
    else:
        source, shown = step.inputs[0], f"g({gate})"
    slope = number(slopes[which], shown, lambda k: Cell(source, i, j))
    return f"{symbol(step.signals[0])} · {shown}", [Sum((one(t, step.signals[0], i, j), slope))]


def _loss(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    """Where the backward pass starts"""
    o, i, j = sentence.objective, cell.row, cell.column
    slope, of_map = _slope_of_logit(t, i, j)
    if isinstance(o, LogitDifference):
        sign = {o.token: 1.0, o.against: -1.0}.get(j, 0.0) if i == o.position else 0.0
        text = f"±1 for the two logits that are compared, else 0{of_map}"
        return text, [Sum((number(sign, "∂(difference)"), *slope))]
    targets = o.select(sentence.targets, t.model.config.n_vocab)[0]
    count, target = int((targets >= 0).sum()), int(targets[i])
    if target < 0:
        read = int(sentence.targets[0, i]) >= 0
        why = "what is explained does not depend on this row" if read else "this row has no target"
        return why, [Sum((number(0.0, "not read" if read else "no target"),))]
    expected = number(1.0 if j == target else 0.0, "y_gt")
    each = f", divided by the number of targets, {count}" if count > 1 else ""
    chance = Sum((one(t, "y_pred", i, j), *slope), 1 / count)
    return f"y_pred − y_gt{each}{of_map}", [chance, Sum((expected, *slope), -1 / count)]


def _slope_of_logit(t: Tensors, i: int, j: int) -> tuple[tuple[Factor, ...], str]:
    """The slope of what the model does with a logit before the softmax; nothing if it does nothing."""
    how = t.model.logit_map
    if how.identity:
        return (), ""
    y = how.forward(t["a_12"][i, j].double().clone())
    slope = how.backward(torch.ones_like(y), y)
    return (number(slope, "slope of the logit", lambda k: Cell("a_12", i, j)),), ", times the slope of the logit"


RULES: dict[str, Callable[[Tensors, TracedSentence, NetworkStep, Cell], Answer]] = {
    "embedding": _embedding, "next": _next, "norm": norms.sent, "attention": _attention, "convolution": _convolution,
    "linear": _linear, "add": _add,
    "activation": _activation, "gated": _activation, "loss": _loss,
    "router": mixture.sent_by_router, "experts": mixture.sent_by_experts, "mixture": mixture.sent_by_mixture,
}  # fmt: skip


# ── inside a step ───────────────────────────────────────────────────────────────────────────────────────────────────


def _of_head(name: str, w: Tensor, j: int, h: int, width: int) -> Factor:
    """The columns of head h in row j of a weight"""
    return Factor(w[h * width : (h + 1) * width], lambda k: Cell(name, j, h * width + k))


def _scores(t: Tensors, cell: Cell, here: str) -> Answer:
    h, i, j = cell.head or 0, cell.row, cell.column
    if cell.name.endswith("delta_raw"):
        scores, factors = t.block(here).attn.scores, [one(t, here + "delta_causal", i, j, h)]
        scale = scores.factor(t[here + "q"].shape[2])
        text = "Δ_causal / √d_ρ" if scores.scale is None else f"Δ_causal · {scores.scale:g}"
        if scores.cap is not None:
            capped = cell._replace(name=here + "score")
            factors.append(number(1 - (t.value(capped) / scores.cap) ** 2, "1 − tanh²", lambda k: capped))
            text += " · slope of the cap"
        return text, [Sum(tuple(factors), scale)]
    g, width = h // t.group(here), t[here + "v"].shape[2]
    (out,), (delta,) = t.attention(here).outputs, t.attention(here).signals
    sent = Factor(t.by_head(here, delta)[h, i], lambda k: Cell(delta, i, h * width + k))
    difference = t[here + "v"][g, j].double() - t.by_head(here, out)[h, i]
    beside = number(difference, f"v − {symbol(out)}", lambda k: Cell(here + "v", j, k, g))
    sums = [Sum((sent, beside, one(t, here + "rho", i, j, h)))]
    return f"{symbol(delta)} · (value − output of the head), times ρ", sums


def _queries(t: Tensors, cell: Cell, here: str) -> Answer:
    """The error signal of a query, key or value, or of what comes before its rotation or norm"""
    i, j, h = cell.row, cell.column, cell.head or 0
    letter = split(cell.name)[1].removeprefix("delta_")
    step = next((s for s in t.steps(here, letter[-1]) if s.before == here + letter), None)
    if step is not None:
        return _before(t, step.norm, step.before, delta_of(step.after), cell)
    r = t.group(here)
    if letter == "q":
        seen = t.seen(here, i)
        every = Sum((row(t, here + "delta_raw", i, h), column(t, here + "k", j, h // r)))
        return f"Δ_raw · keys{masked(t, seen)}", [every.only(seen)]
    seeing = t.seeing(here, i)
    shared = range(h * r, (h + 1) * r)
    also = (", of every head that shares it" if r > 1 else "") + masked(t, seeing)
    if letter == "k":
        sums = [Sum((column(t, here + "delta_raw", i, x), column(t, here + "q", j, x))).only(seeing) for x in shared]
        return f"Δ_rawᵗ · queries{also}", sums
    width, (delta,) = t[here + "v"].shape[2], t.attention(here).signals
    sums = [Sum((column(t, here + "rho", i, x), column(t, delta, x * width + j))).only(seeing) for x in shared]
    return f"ρᵗ · {symbol(delta)}{also}", sums


def _before(t: Tensors, norm: Norm | None, before: str, after: str, cell: Cell) -> Answer:
    i, j, h = cell.row, cell.column, cell.head or 0
    if norm is not None:
        heads, width = len(t[before]), t[before].shape[2]
        if len(norm.weight) == width:
            through = number(norms.derivative(norm, t[before][h, i].double())[:, j], "norm′")
            return "Δ through the norm", [Sum((row(t, after, i, h), through))]
        slopes = norms.derivative(norm, t[before][:, i].double().flatten())[:, h * width + j].view(heads, width)
        return "Δ of all heads through their norm", [
            Sum((row(t, after, i, x), number(slopes[x], "norm′"))) for x in range(heads)
        ]
    width = t[after].shape[2]
    turned = t.rotate(split(before)[0], torch.eye(width, dtype=torch.float64)[None], slice(i, i + 1), back=True)[
        0, :, j
    ]
    used = turned.nonzero().flatten()
    sent = number(t[after][h, i, used], "", lambda k: Cell(after, i, int(used[k]), h))
    return "Δ rotated back by the angle of its position", [Sum((sent, number(turned[used], "cos, sin")))]


# ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _gradient(t: Tensors, sentence: TracedSentence, cell: Cell, here: str, symbol: str) -> Answer:
    i, j = cell.row, cell.column
    letter, _, n = symbol.partition("_")
    if n in ("tok", "pos"):
        return _table(t, sentence, n, i, j)
    found = t.network.holder(here, n)
    assert found is not None  # the gradient is in the trace
    step, number_of_layer = found
    of = step.layers[number_of_layer]
    if isinstance(of, Norm):
        return _gain(t, step, letter, n, j)
    if isinstance(of, Taps):
        return _tap(t, here, letter, i, j)
    if isinstance(of, Sinks):
        return _sink(t, step, of, j)
    if step.kind == "experts":
        return mixture.gradient(t, step, symbol, cell)
    layer, source, signals = t.layer(here, n)
    delta = _output_column(t, signals, n, j)
    if letter == "b":
        return "Δ, summed over the tokens", [Sum((delta,))]
    if letter == "w":
        ratio = _magnitude_ratio(t, here, n, j)
        return "input · Δ, over the tokens", [Sum((column(t, source, i), delta), ratio)]
    if letter == "d":
        return "input · scale Δ uᵗ, over the tokens", [Sum((column(t, source, i), column(t, f"{here}g_{n}", j)))]
    if letter == "u":
        passed = layer.upstream(t.flat(signals.values()).to(t.model.dtype)).z[:, j]
        scale = getattr(layer, "scale", 1.0)
        parts = (column(t, f"{here}h_{n}", i), number(passed, "Δ", delta.cell))
        return "scale · input through d · Δ, over the tokens", [Sum(parts, scale)]
    b, m = layer.plain().added_bias(), layer.named_symbols()["m"]
    assert m is not None
    out = layer.forward(t[source].to(t.model.dtype))[:, j] - (0 if b is None else b[j])
    return "Δ · output / magnitude, over the tokens", [Sum((delta, number(out / m[j], "z/c")))]


def _tap(t: Tensors, here: str, letter: str, i: int, j: int) -> Answer:
    """The gradient of tap i, or of the bias, of the convolution"""
    delta = column(t, here + "delta_conv", j)
    if letter == "b":
        return "Δ, summed over the tokens", [Sum((delta,))]
    n, z = len(delta.values), column(t, here + "a_z", j)
    before = Factor(z.values[: max(0, n - i)], z.cell)
    return f"z, {i} tokens before, · Δ_conv, over the tokens", [Sum((before, delta.only(range(min(i, n), n))))]


def _gain(t: Tensors, step: NetworkStep, letter: str, n: str, j: int) -> Answer:
    """The gain or the bias of a norm; that of queries or keys is inside attention"""
    if step.kind == "attention":
        return _query_norm(t, step.here, n[0], j)
    delta = column(t, step.signals[0], j)
    if letter == "b":
        return "Δ, summed over the tokens", [Sum((delta,))]
    return "normalized input · Δ, over the tokens", [Sum((column(t, f"{step.here}a_bar_{n}", j), delta))]


def _sink(t: Tensors, step: NetworkStep, sinks: Sinks, h: int) -> Answer:
    """The sink of head h, over the tokens"""
    (out,), (delta,) = step.outputs, step.signals
    product = (t.by_head(step.here, delta)[h] * t.by_head(step.here, out)[h]).sum(1)
    share = number(t.rho_sink(step.here, sinks.weight)[h], "ρ of the sink")
    return "−ρ of the sink · (Δ ⊖ output of the head), over the tokens", [Sum((share, number(product, "Δ ⊖ a")), -1)]


def _output_column(t: Tensors, signals: dict[str, str], n: str, j: int) -> Factor:
    """Column j of the error signals of a layer's outputs, or of its part n"""
    first = _cell_of(t, [signals[n]] if n in signals else [*signals.values()], 0, j)
    return column(t, first.name, first.column, first.head)


def _cell_of(t: Tensors, names: list[str], i: int, j: int) -> Cell:
    """The cell in column j of signals that stand side by side, heads included"""
    for name in names:
        x = t[name]
        width = x.shape[-1] * (len(x) if x.ndim == 3 else 1)
        if j < width:
            return Cell(name, i, j % x.shape[-1], j // x.shape[-1] if x.ndim == 3 else None)
        j -= width
    raise AssertionError(f"{names} have no column {j}")


def _adapter_signal(t: Tensors, here: str, n: str, i: int, j: int) -> Answer:
    """g = scale · Δ uᵗ"""
    layer, _, signals = t.layer(here, n)
    u, names = layer.named_symbols()["u"], [*signals.values()]
    assert u is not None
    sent = layer.upstream(t.flat(names)[i : i + 1].to(t.model.dtype)).z[0]
    parts = (number(sent, "Δ", lambda k: _cell_of(t, names, i, k)), number(u[j].detach(), f"u_{n}"))
    return "scale · Δ · row of the adapter's u", [Sum(parts, getattr(layer, "scale", 1.0))]


def _magnitude_ratio(t: Tensors, here: str, n: str, j: int) -> float:
    """m/c of an adapter with a magnitude; 1 without one"""
    layer, _, signals = t.layer(here, n)
    if layer.named_symbols().get("m") is None:
        return 1.0
    ones = torch.ones_like(t.flat(signals.values())[:1], dtype=t.model.dtype)
    ratio: float = layer.upstream(ones).z[0, j].item()
    return ratio


def _table(t: Tensors, sentence: TracedSentence, which: str, i: int, j: int) -> Answer:
    first = signal(t.network.start)
    delta = t[first][:, j]
    if which == "pos":
        used = [i] if i < len(delta) else []
        text = "Δ₁ of the token at this position"
    else:
        used = [k for k, id in enumerate(sentence.ids) if id == i]
        text = "Δ₁ of the tokens with this id"
    scale = t.model.embed.scale if which == "tok" else 1.0
    sums = [Sum((number(delta[used], "Δ₁", lambda k: Cell(first, used[k], j)),), scale)] if used else []
    if which == "tok" and t.model.config.tied:
        sums.append(Sum((column(t, "delta_12", i), column(t, "a_11", j))))
        text += ", plus Δ₁₂ · a₁₁: the head has the same weight"
    return text, sums or [Sum((number(0.0, "not used"),))]


def _query_norm(t: Tensors, here: str, letter: str, j: int) -> Answer:
    """The gain of the norm of queries or keys: over tokens and heads"""
    step = next(s for s in t.steps(here, letter) if s.norm is not None)
    assert step.norm is not None
    norm, sums = wide(step.norm), []
    before = t.wide(step.before)
    if len(norm.weight) > before.shape[2]:  # one norm over all heads: this gain is of one of them
        h, own = divmod(j, before.shape[2])
        flat = before.transpose(0, 1).flatten(1)
        a_bar = norm.statistics(norm.forward(flat)[1])["a_bar"][:, j]
        beside = number(a_bar, "ā", column(t, step.before, own, h).cell)
        return "normalized input · Δ, over the tokens", [Sum((beside, column(t, delta_of(step.after), own, h)))]
    for h, x in enumerate(before):
        a_bar = norm.statistics(norm.forward(x.contiguous())[1])["a_bar"][:, j]
        beside = number(a_bar, "ā", column(t, step.before, j, h).cell)
        sums.append(Sum((beside, column(t, delta_of(step.after), j, h))))
    return "normalized input · Δ, over the tokens and the heads", sums

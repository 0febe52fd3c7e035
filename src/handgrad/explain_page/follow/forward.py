"""How a cell of an activation was computed: a rule per kind of step, whose sums `follow.py` shows."""

from collections.abc import Callable

import torch

from ..presentation.notation import symbol
from ..session.session import TracedSentence
from ..stations.network import NetworkStep
from . import mixture
from .tensors import Cell, Tensors, split
from .terms import Sum, column, number, one, row, taps

Answer = tuple[str, list[Sum]]  # the formula, and the sums; no sum: a number that is not computed from others


def rule(t: Tensors, sentence: TracedSentence, cell: Cell) -> Answer:
    """The sums that make a cell of an activation or of one of its parts."""
    step = t.network.maker(cell.name)
    if step is not None:
        return RULES[step.kind](t, sentence, step, cell)
    here, last = split(cell.name)
    i, j = cell.row, cell.column
    kind, _, rest = last.partition("_")
    if last.startswith("a_bar_"):
        return _normalized(t, here, rest.removeprefix("bar_"), i, j)
    if kind == "mu":
        name = _read_by_norm(t, here, rest)
        d = t[name].shape[1]
        return "the mean of the row", [Sum((row(t, name, i),), 1 / d)]
    if last == "rho":
        return _softmax(t, cell, here, here + "score")
    if last == "sum_e":
        return _sum_of_softmax(t, cell, here)
    scores = t.block(here).attn.scores if last in ("scaled", "score") else None
    if scores is not None and last == "score" and scores.cap is not None:
        value = number(t.value(cell), "c tanh(s/c)", lambda k: cell._replace(name=here + "scaled"))
        return f"the score, capped at c = {scores.cap:g}", [Sum((value,))]
    if scores is not None:
        q, k = row(t, here + "q", i, cell.head), row(t, here + "k", j, (cell.head or 0) // t.group(here))
        scaled = "/ √d_ρ" if scores.scale is None else f"· {scores.scale:g}"
        return f"query · key {scaled}", [Sum((q, k), scores.factor(len(q.values)))]
    if last in ("q", "k", "v", "x_q", "x_k", "n_q", "n_k"):
        return _queries(t, cell, here, last)
    if kind == "h":
        layer, source, _ = t.layer(here, rest)
        down = layer.named_symbols()["d"]
        assert down is not None
        return "the input times the adapter's d", [Sum((row(t, source, i), number(down[:, j].detach(), f"d_{rest}")))]
    if last == "a_z":
        return "B · x", [Sum((one(t, here + "a_B", i, j), one(t, here + "a_x", i, j)))]
    if last == "a_conv":
        bias = [Sum((one(t, f"{here}b_conv", 0, j),))] if t.block(here).conv.taps.bias is not None else []
        return f"the taps · z of the token and those before it{', plus the bias' if bias else ''}", [
            taps(t, here, here + "a_z", i, j), *bias,
        ]  # fmt: skip
    if kind in ("w", "b"):
        return "a parameter of the model", []
    return "a statistic of the row" if kind in ("sigma", "rms") else "a token", []


# ── the kinds of steps ──────────────────────────────────────────────────────────────────────────────────────────────


def _embedding(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    i, j = cell.row, cell.column
    sums = [Sum((one(t, "w_tok", sentence.ids[i], j),), t.model.embed.scale)]
    if "w_pos" in t.model.tables():
        sums.append(Sum((one(t, "w_pos", i, j),)))
    return "the row of the token" + (" plus the row of its position" if len(sums) > 1 else ""), sums


def _next(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    return "the output of the block before", [Sum((one(t, step.inputs[0], cell.row, cell.column),))]


def _norm(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    (n, layer), here, i, j = step.norm(), step.here, cell.row, cell.column
    bias = [Sum((one(t, f"{here}b_{n}", 0, j),))] if getattr(layer, "bias", None) is not None else []
    a_bar = one(t, f"{here}a_bar_{n}", i, j)
    gain = [Sum((a_bar, one(t, f"{here}w_{n}", 0, j)))]
    gain += [Sum((a_bar,), layer.offset)] if layer.offset else []
    what = f"{layer.offset:g} + w" if layer.offset else "the gain"
    return f"the normalized input times {what}{', plus the bias' if bias else ''}", [*gain, *bias]


def _attention(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    here, i = step.here, cell.row
    h, c = divmod(cell.column, t[here + "v"].shape[2])
    seen = t.seen(here, i)
    every = Sum((row(t, here + "rho", i, h), column(t, here + "v", c, h // t.group(here))))
    return f"attention weights · values{masked(t, seen)}", [every.only(seen)]


def _convolution(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    i, j = cell.row, cell.column
    return "C · output of the convolution", [Sum((one(t, step.inputs[1], i, j), one(t, step.here + "a_conv", i, j)))]


def _linear(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    letters = [letter for _, _, held in step.products() for letter in held]
    letter = letters[step.outputs.index(cell.name)]
    return _product(t, step.inputs[0], step.here, letter, cell.row, cell.column)


def _add(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    scales = (1.0, *[step.scale] * (len(step.inputs) - 1))
    sums = [Sum((one(t, x, cell.row, cell.column),), scale) for x, scale in zip(step.inputs, scales, strict=True)]
    by = "" if step.scale == 1 else f" times {step.scale:g}"
    return f"the skip connection plus the branch{'es' if len(sums) > 2 else ''}{by}", sums


def _activation(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    (name,), i, j = step.inputs, cell.row, cell.column
    x, out = t[name][i, j].double().item(), t[cell.name][i, j].item()
    passes = number(out / x if x else 0.0, f"g({symbol(name)})/{symbol(name)}")
    return f"g({symbol(name)}): {symbol(name)} times the share that passes", [Sum((one(t, name, i, j), passes))]


def _gated(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    (gate, up), i, j = step.inputs, cell.row, cell.column
    x = t[gate][i : i + 1, j : j + 1].double()
    value = t.block(step.here).mlp.activate([x, torch.ones_like(x)])
    g = number(value, f"g({symbol(gate)})", lambda k: cell._replace(name=gate))
    return f"g({symbol(gate)}) · {symbol(up)}", [Sum((g, one(t, up, i, j)))]


def _loss(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    how = "" if t.model.logit_map.identity else ", scaled or capped as the model does"
    text, sums = _softmax(t, cell, "", step.inputs[0])
    return text + how, sums


RULES: dict[str, Callable[[Tensors, TracedSentence, NetworkStep, Cell], Answer]] = {
    "embedding": _embedding, "next": _next, "norm": _norm, "attention": _attention, "convolution": _convolution,
    "linear": _linear, "add": _add,
    "activation": _activation, "gated": _gated, "loss": _loss,
    "router": mixture.router, "experts": mixture.experts, "mixture": mixture.mixture,
}  # fmt: skip


# ── inside a step ───────────────────────────────────────────────────────────────────────────────────────────────────


def _softmax(t: Tensors, cell: Cell, here: str, source: str) -> Answer:
    """e^x of one entry of a row, divided by the sum over the row"""
    e, shifted = t.exponentials(here)
    at = (cell.row, cell.column) if cell.head is None else (cell.head, cell.row, cell.column)
    of = cell._replace(name=source)
    value = number(e[at].item(), _exponential(here, shifted), lambda k: of)
    total = cell._replace(name=here + "sum_e", column=0)
    return "softmax: e to the power of the entry, divided by the sum over the row", [
        Sum((value, number(1 / t.value(total), "1/Σ", lambda k: total))),
    ]  # fmt: skip


def _exponential(here: str, shifted: bool) -> str:
    what = "score" if here else "logit"
    return f"e^({what} − max)" if shifted else f"e^{what}"


def _sum_of_softmax(t: Tensors, cell: Cell, here: str) -> Answer:
    """What a row of exponentials is divided by"""
    e, shifted = t.exponentials(here)
    row = e[cell.row] if cell.head is None else e[cell.head, cell.row]
    seen = t.seen(here, cell.row) if here else range(len(row))
    name = here + "score" if here else "a_12"
    every = number(row, _exponential(here, shifted), lambda k: Cell(name, cell.row, k, cell.head))
    sums = [Sum((every,)).only(seen)]
    if here and t.block(here).attn.sinks is not None:
        sums.append(Sum((number(t.value(cell) - row.sum().item(), "e^sink"),)))
    return f"the sum over the row{masked(t, seen) if here else ''}", sums


def _read_by_norm(t: Tensors, here: str, n: str) -> str:
    """The name of a norm's input."""
    found = t.network.holder(here, n)
    assert found is not None
    return found[0].inputs[0]


def _normalized(t: Tensors, here: str, n: str, i: int, j: int) -> Answer:
    a = one(t, _read_by_norm(t, here, n), i, j)
    spread = "sigma" if f"{here}sigma_{n}" in t.trace else "rms"
    name = f"{here}{spread}_{n}"
    inverse = number(1 / t[name][i, 0].item(), f"1/{'σ' if spread == 'sigma' else 'rms'}", lambda k: Cell(name, i, 0))
    sums = [Sum((a, inverse))]
    if spread == "sigma":
        sums.append(Sum((one(t, f"{here}mu_{n}", i, 0), inverse), -1))
        return "(input − mean) / σ", sums
    return "input / rms", sums


def _product(t: Tensors, source: str, here: str, letter: str, i: int, j: int) -> Answer:
    """A row of the input times a column of the weight, plus the bias"""
    pair = t.pair(here, letter)
    sums = [Sum((row(t, source, i), column(t, f"{here}w_{letter}", j)))]
    if pair is not None and pair[1] is not None:
        sums.append(Sum((one(t, f"{here}b_{letter}", 0, j),)))
        return "input · column of the weight, plus the bias", sums
    return "input · column of the weight", sums


def masked(t: Tensors, seen: range) -> str:
    """How many tokens are no terms of a sum in attention."""
    count = len(t.trace["a_0"]) - len(seen)
    return f"; {count:,} masked {'token is' if count == 1 else 'tokens are'} left out" if count else ""


def _queries(t: Tensors, cell: Cell, here: str, last: str) -> Answer:
    """A query, key or value: from its rotation, its norm or its projection"""
    letter, h, i, j = last[-1], cell.head or 0, cell.row, cell.column
    step = next((s for s in t.steps(here, letter) if s.after == here + last), None)
    if step is None:
        width = t[here + letter].shape[2]
        return _product(t, t.attention(here).inputs[0], here, letter, i, h * width + j)
    if step.norm is None:
        width = t[step.after].shape[2]
        turned = t.rotate(here, torch.eye(width, dtype=torch.float64)[None], slice(i, i + 1))[0, :, j]
        used = turned.nonzero().flatten()
        x = number(t[step.before][h, i, used], "", lambda k: Cell(step.before, i, int(used[k]), h))
        return "rotated by the angle of its position", [Sum((x, number(turned[used], "cos, sin")))]
    joint = len(step.norm.weight) > t[step.before].shape[2]  # one norm over all heads
    read = t[step.before][:, i].flatten()[None] if joint else t[step.before][h, i : i + 1]
    rms = step.norm.statistics(step.norm.forward(read.to(t.model.dtype))[1])["rms"]
    place = h * t[step.before].shape[2] + j if joint else j
    gain = number(step.norm.gain.detach()[place], f"w_{letter}_norm")
    return "input / rms times the gain", [Sum((one(t, step.before, i, j, h), number(1 / rms.item(), "1/rms"), gain))]

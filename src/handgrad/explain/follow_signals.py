"""How a cell of an error signal or of a gradient was computed, layer by layer: the sums that `follow.py` shows."""

import math
from functools import partial

import torch
from torch import Tensor

from ..model.norms import Norm
from ..model.objective import LogitDifference
from .follow_forward import Answer, masked
from .follow_tensors import Cell, Tensors, delta_of, wide
from .follow_terms import Factor, Sum, column, number, one, row
from .session import TracedSentence

PRODUCT = {"delta_11": ("delta_12", "11"), "delta_8": ("delta_9", "8"), "delta_3": ("delta_4", "3")}
EQUAL = {"delta_9": "delta_10", "delta_4": "delta_5"}
NORMED = {"delta_5": ("5", "delta_6", "delta_10"), "delta_1": ("1", "delta_2", "delta_5")}  # norm, its Δ, the skip's Δ


def rule(t: Tensors, sentence: TracedSentence, cell: Cell, here: str, last: str) -> Answer:
    """The sums that make a cell of an error signal or of a gradient."""
    i, j = cell.row, cell.column
    if last.startswith("grad_"):
        return _gradient(t, sentence, cell, here, last.removeprefix("grad_"))
    if last == "delta_12":
        return _start(t, sentence, i, j)
    if last in PRODUCT:
        name, letter = PRODUCT[last]
        return "Δ of the output · row of the weight", [Sum((row(t, here + name, i), row(t, f"{here}w_{letter}", j)))]
    if last in EQUAL:
        return "the skip connection passes Δ on unchanged", [Sum((one(t, here + EQUAL[last], i, j),))]
    if last in NORMED:
        n, source, skipped = NORMED[last]
        passed = _through_norm(t, here, n, here + source, i, j)
        return "Δ through the norm, plus Δ of the skip connection", [passed, Sum((one(t, here + skipped, i, j),))]
    if last == "delta_10":
        return _end_of_block(t, here, i, j)
    if last == "delta_0":
        return "Δ₁ · row of the token table", [Sum((row(t, "blocks.0.delta_1", i), row(t, "w_tok", j)))]
    if last in ("delta_7", "delta_gate", "delta_up"):
        return _activation(t, here, last, i, j)
    if last == "delta_6":
        weights = "6" if not t.block(here).mlp.gated else ""
        parts = [
            Sum((row(t, f"{here}delta_{x}", i), row(t, f"{here}w_{weights or x}", j)))
            for x in t.block(here).mlp.letters()
        ]
        return "Δ of the output · row of the weight" + (", of gate and of up" if len(parts) > 1 else ""), parts
    if last == "delta_2":
        return _branches(t, here, i, j)
    if last in ("delta_causal", "delta_raw"):
        return _scores(t, cell, here, last)
    if last.startswith("g_"):
        return _adapter_signal(t, here, last.removeprefix("g_"), i, j)
    return _queries(t, cell, here, last.removeprefix("delta_"))


def _start(t: Tensors, sentence: TracedSentence, i: int, j: int) -> Answer:
    """Δ_12, where the backward pass starts"""
    o = sentence.objective
    if isinstance(o, LogitDifference):
        sign = {o.token: 1.0, o.against: -1.0}.get(j, 0.0) if i == o.position else 0.0
        return "±1 for the two logits that are compared, else 0", [Sum((number(sign, "∂(difference)"),))]
    targets = o.select(sentence.targets, t.model.config.n_vocab)[0]
    count, target = int((targets >= 0).sum()), int(targets[i])
    if target < 0:
        read = int(sentence.targets[0, i]) >= 0
        why = "what is explained does not depend on this row" if read else "this row has no target"
        return why, [Sum((number(0.0, "not read" if read else "no target"),))]
    expected = number(1.0 if j == target else 0.0, "y_gt")
    each = f", divided by the number of targets, {count}" if count > 1 else ""
    return f"y_pred − y_gt{each}", [Sum((one(t, "y_pred", i, j),), 1 / count), Sum((expected,), -1 / count)]


def _through_norm(t: Tensors, here: str, n: str, source: str, i: int, j: int) -> Sum:
    """Δ of a norm's output · column j of its derivative at row i"""
    before = f"{here}a_{n}" if here else f"blocks.{len(t.model.blocks) - 1}.a_10"
    return Sum((row(t, source, i), number(_derivative(t.norm(here, n), t[before][i].double())[:, j], "norm′")))


def _derivative(norm: Norm, a: Tensor) -> Tensor:
    """(d, d): entry k, j is ∂ output_k / ∂ input_j of a norm at the row a: its backward pass of every unit vector"""
    d, layer = len(a), wide(norm)
    saved = layer.forward(a.expand(d, d).contiguous())[1]
    return layer.backward(torch.eye(d, dtype=torch.float64), layer.rebuild_output(saved)[0], saved)


def _end_of_block(t: Tensors, here: str, i: int, j: int) -> Answer:
    b = int(here.split(".")[1])
    if b + 1 < len(t.model.blocks):
        return "Δ of the next block's input", [Sum((one(t, f"blocks.{b + 1}.delta_1", i, j),))]
    return "Δ through the last norm", [_through_norm(t, "", "10", "delta_11", i, j)]


def _activation(t: Tensors, here: str, last: str, i: int, j: int) -> Answer:
    mlp = t.block(here).mlp
    a_7 = [t[f"{here}a_{letter}"][i : i + 1, j : j + 1].double() for letter in mlp.letters()]
    slopes = mlp.backward_activation(torch.ones_like(a_7[0]), a_7)[0].parts
    which = mlp.letters().index(last.removeprefix("delta_"))
    source = f"{here}a_{'up' if last == 'delta_gate' else mlp.letters()[0]}"
    symbol = {"delta_7": "g′(a₇)", "delta_gate": "up · g′(gate)", "delta_up": "g(gate)"}[last]
    slope = number(slopes[which], symbol, lambda k: Cell(source, i, j))
    return f"Δ₈ · {symbol}", [Sum((one(t, here + "delta_8", i, j), slope))]


def _branches(t: Tensors, here: str, i: int, j: int) -> Answer:
    """Δ_2: of q, k and v, all heads"""
    sums = []
    for letter in "qkv":
        name = delta_of(t.projected(here, letter))
        x, w = t[name], t[f"{here}w_{letter}"][j].double()
        for h in range(len(x)):
            sums.append(Sum((row(t, name, i, h), _of_head(f"{here}w_{letter}", w, j, h, x.shape[2]))))
    return "Δ of queries, keys and values · rows of their weights", sums


def _of_head(name: str, w: Tensor, j: int, h: int, width: int) -> Factor:
    """The columns of head h in row j of a weight"""
    return Factor(w[h * width : (h + 1) * width], lambda k: Cell(name, j, h * width + k))


def _scores(t: Tensors, cell: Cell, here: str, last: str) -> Answer:
    h, i, j = cell.head or 0, cell.row, cell.column
    if last == "delta_raw":
        scale = 1 / math.sqrt(t[here + "q"].shape[2])
        return "Δ_causal / √d_ρ", [Sum((one(t, here + "delta_causal", i, j, h),), scale)]
    g, width = h // t.group(here), t[here + "v"].shape[2]
    signal = Factor(t.by_head(here, "delta_3")[h, i], lambda k: Cell(here + "delta_3", i, h * width + k))
    difference = t[here + "v"][g, j].double() - t.by_head(here, "a_3")[h, i]
    beside = number(difference, "v − a₃", lambda k: Cell(here + "v", j, k, g))
    return "Δ₃ · (value − output of the head), times ρ", [Sum((signal, beside, one(t, here + "rho", i, j, h)))]


def _queries(t: Tensors, cell: Cell, here: str, signal: str) -> Answer:
    """The error signal of a query, key or value, or of what comes before its rotation or norm"""
    i, j, h = cell.row, cell.column, cell.head or 0
    step = next((s for s in t.steps(here, signal[-1]) if s.before == here + signal), None)
    if step is not None:
        return _before(t, step.norm, step.before, delta_of(step.after), cell)
    r = t.group(here)
    if signal == "q":
        seen = t.seen(here, i)
        every = Sum((row(t, here + "delta_raw", i, h), column(t, here + "k", j, h // r)))
        return f"Δ_raw · keys{masked(t, seen)}", [every.only(seen)]
    seeing = t.seeing(here, i)
    shared = range(h * r, (h + 1) * r)
    also = (", of every head that shares it" if r > 1 else "") + masked(t, seeing)
    if signal == "k":
        sums = [Sum((column(t, here + "delta_raw", i, x), column(t, here + "q", j, x))).only(seeing) for x in shared]
        return f"Δ_rawᵗ · queries{also}", sums
    width = t[here + "v"].shape[2]
    sums = [
        Sum((column(t, here + "rho", i, x), column(t, here + "delta_3", x * width + j))).only(seeing) for x in shared
    ]
    return f"ρᵗ · Δ₃{also}", sums


def _before(t: Tensors, norm: Norm | None, before: str, after: str, cell: Cell) -> Answer:
    i, j, h = cell.row, cell.column, cell.head or 0
    if norm is not None:
        through = number(_derivative(norm, t[before][h, i].double())[:, j], "norm′")
        return "Δ through the norm", [Sum((row(t, after, i, h), through))]
    width = t[after].shape[2]
    turned = t.rotate(torch.eye(width, dtype=torch.float64)[None], slice(i, i + 1), back=True)[0, :, j]
    used = turned.nonzero().flatten()
    signal = number(t[after][h, i, used], "", lambda k: Cell(after, i, int(used[k]), h))
    return "Δ rotated back by the angle of its position", [Sum((signal, number(turned[used], "cos, sin")))]


# ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _gradient(t: Tensors, sentence: TracedSentence, cell: Cell, here: str, symbol: str) -> Answer:
    i, j = cell.row, cell.column
    letter, _, n = symbol.partition("_")
    if n in ("tok", "pos"):
        return _table(t, sentence, n, i, j)
    if n in ("q_norm", "k_norm"):
        return _query_norm(t, here, n[0], j)
    if n in ("1", "5", "10"):
        signal = column(t, f"{here}delta_{int(n) + 1}", j)
        if letter == "b":
            return "Δ, summed over the tokens", [Sum((signal,))]
        return "normalised input · Δ, over the tokens", [Sum((column(t, f"{here}a_bar_{n}", j), signal))]
    layer, source, outputs = t.layer(here, _owner(t, here, n))
    delta = _output_column(t, here, n, outputs, j)
    if letter == "b":
        return "Δ, summed over the tokens", [Sum((delta,))]
    if letter == "w":
        ratio = _magnitude_ratio(t, here, n, j)
        return "input · Δ, over the tokens", [Sum((column(t, source, i), delta), ratio)]
    if letter == "d":
        return "input · scale Δ uᵗ, over the tokens", [Sum((column(t, source, i), column(t, f"{here}g_{n}", j)))]
    if letter == "u":
        passed = layer.share(t.flat(outputs).to(t.model.dtype)).z[:, j]
        scale = getattr(layer, "scale", 1.0)
        parts = (column(t, f"{here}h_{n}", i), number(passed, "Δ", delta.cell))
        return "scale · input through d · Δ, over the tokens", [Sum(parts, scale)]
    b, m = layer.plain().added_bias(), layer.named_symbols()["m"]
    assert m is not None
    out = layer.forward(t[source].to(t.model.dtype))[:, j] - (0 if b is None else b[j])
    return "Δ · output / magnitude, over the tokens", [Sum((delta, number(out / m[j], "z/c")))]


def _owner(t: Tensors, here: str, n: str) -> str:
    """The number of the layer that holds w_n: w_q may be a part of w_2."""
    if not here or n in t.block(here).numbered():
        return n
    return "2" if n in ("q", "k", "v") else "6"


def _output_column(t: Tensors, here: str, n: str, outputs: list[str], j: int) -> Factor:
    """Column j of the error signals of a layer's output, or of its part n"""
    letters = ("q", "k", "v") if n in ("q", "k", "v") or not here else t.block(here).mlp.letters()
    names = [outputs[letters.index(n)]] if len(outputs) > 1 and n in letters else outputs
    first = _cell_of(t, names, 0, j)
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
    layer, _, outputs = t.layer(here, n)
    u = layer.named_symbols()["u"]
    assert u is not None
    signal = layer.share(t.flat(outputs)[i : i + 1].to(t.model.dtype)).z[0]
    parts = (number(signal, "Δ", lambda k: _cell_of(t, outputs, i, k)), number(u[j].detach(), f"u_{n}"))
    return "scale · Δ · row of the adapter's u", [Sum(parts, getattr(layer, "scale", 1.0))]


def _magnitude_ratio(t: Tensors, here: str, n: str, j: int) -> float:
    """m/c of an adapter with a magnitude; 1 without one"""
    layer, _, outputs = t.layer(here, _owner(t, here, n))
    if layer.named_symbols().get("m") is None:
        return 1.0
    ones = torch.ones_like(t.flat(outputs)[:1], dtype=t.model.dtype)
    ratio: float = layer.share(ones).z[0, j].item()
    return ratio


def _table(t: Tensors, sentence: TracedSentence, which: str, i: int, j: int) -> Answer:
    delta = t["blocks.0.delta_1"][:, j]
    if which == "pos":
        used = [i] if i < len(delta) else []
        text = "Δ₁ of the token at this position"
    else:
        used = [k for k, id in enumerate(sentence.ids) if id == i]
        text = "Δ₁ of the tokens with this id"
    sums = [Sum((number(delta[used], "Δ₁", lambda k: Cell("blocks.0.delta_1", used[k], j)),))] if used else []
    if which == "tok" and t.model.config.tied:
        sums.append(Sum((column(t, "delta_12", i), column(t, "a_11", j))))
        text += ", plus Δ₁₂ · a₁₁: the head has the same weight"
    return text, sums or [Sum((number(0.0, "not used"),))]


def _query_norm(t: Tensors, here: str, letter: str, j: int) -> Answer:
    """The gain of the norm of queries or keys: over tokens and heads"""
    step = next(s for s in t.steps(here, letter) if s.norm is not None)
    assert step.norm is not None
    norm, sums = wide(step.norm), []
    for h, x in enumerate(t.wide(step.before)):
        a_bar = norm.statistics(norm.forward(x.contiguous())[1])["a_bar"][:, j]
        beside = number(a_bar, "ā", partial(_in_column, step.before, j, h))
        sums.append(Sum((beside, column(t, delta_of(step.after), j, h))))
    return "normalised input · Δ, over the tokens and the heads", sums


def _in_column(name: str, j: int, h: int, k: int) -> Cell:
    return Cell(name, k, j, h)

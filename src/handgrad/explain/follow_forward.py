"""How a cell of an activation was computed, layer by layer: the sums that `follow.py` shows."""

import math

import torch

from .follow_tensors import Cell, Tensors
from .follow_terms import Sum, column, number, one, row
from .session import TracedSentence

Answer = tuple[str, list[Sum]]  # the formula, and the sums; no sum: a number that is not computed from others
NORMED = {"a_2": "1", "a_6": "5", "a_11": "10"}
ADDED = {"a_5": ("a_1", "a_4"), "a_10": ("a_5", "a_9")}  # a skip connection
PRODUCT = {"a_4": ("a_3", "3"), "a_9": ("a_8", "8"), "a_12": ("a_11", "11"), "a_7": ("a_6", "6"),
           "a_gate": ("a_6", "gate"), "a_up": ("a_6", "up")}  # fmt: skip


def rule(t: Tensors, sentence: TracedSentence, cell: Cell, here: str, last: str) -> Answer:
    """The sums that make a cell of an activation or of one of its parts."""
    i, j = cell.row, cell.column
    kind, _, rest = last.partition("_")
    if last == "a_1":
        return _input(t, sentence, here, i, j)
    if last in NORMED:
        n = NORMED[last]
        bias = [Sum((one(t, f"{here}b_{n}", 0, j),))] if hasattr(t.norm(here, n), "bias") else []
        gain = Sum((one(t, f"{here}a_bar_{n}", i, j), one(t, f"{here}w_{n}", 0, j)))
        return f"the normalised input times the gain{', plus the bias' if bias else ''}", [gain, *bias]
    if last.startswith("a_bar_"):
        return _normalised(t, here, rest.removeprefix("bar_"), i, j)
    if kind == "mu":
        name = _read_by_norm(t, here, rest)
        d = t[name].shape[1]
        return "the mean of the row", [Sum((row(t, name, i),), 1 / d)]
    if last in ADDED:
        return "the skip connection plus the branch", [Sum((one(t, here + name, i, j),)) for name in ADDED[last]]
    if last in PRODUCT:
        name, letter = PRODUCT[last]
        return _product(t, here + name, f"{here}w_{letter}", i, j)
    if last == "a_3":
        return _heads(t, here, i, j)
    if last == "a_8":
        return _activation(t, here, i, j)
    if last in ("rho", "y_pred"):
        source = "score" if last == "rho" else "a_12"
        value = number(t.value(cell), "softmax", lambda k: cell._replace(name=here + source))
        return f"the softmax of the row of {'scores' if here else 'logits'}", [Sum((value,))]
    if last == "score":
        q, k = row(t, here + "q", i, cell.head), row(t, here + "k", j, (cell.head or 0) // t.group(here))
        return "query · key / √d_ρ", [Sum((q, k), 1 / math.sqrt(len(q.values)))]
    if last in ("q", "k", "v", "x_q", "x_k", "n_q", "n_k"):
        return _queries(t, cell, here, last)
    if kind == "h":
        layer, source, _ = t.layer(here, rest)
        down = layer.named_symbols()["d"]
        assert down is not None
        return "the input times the adapter's d", [Sum((row(t, source, i), number(down[:, j].detach(), f"d_{rest}")))]
    if kind in ("w", "b"):
        return "a parameter of the model", []
    return "a statistic of the row" if kind in ("sigma", "rms") else "a token", []


def _input(t: Tensors, sentence: TracedSentence, here: str, i: int, j: int) -> Answer:
    """a_1: the embeddings, or the output of the block before"""
    b = int(here.split(".")[1])
    if b:
        return "the output of the block before", [Sum((one(t, f"blocks.{b - 1}.a_10", i, j),))]
    sums = [Sum((one(t, "w_tok", sentence.ids[i], j),))]
    if "w_pos" in t.model.tables():
        sums.append(Sum((one(t, "w_pos", i, j),)))
    return "the row of the token" + (" plus the row of its position" if len(sums) > 1 else ""), sums


def _read_by_norm(t: Tensors, here: str, n: str) -> str:
    """The name of a norm's input."""
    return f"{here}a_{n}" if here else f"blocks.{len(t.model.blocks) - 1}.a_10"


def _normalised(t: Tensors, here: str, n: str, i: int, j: int) -> Answer:
    a = one(t, _read_by_norm(t, here, n), i, j)
    spread = "sigma" if f"{here}sigma_{n}" in t.trace else "rms"
    name = f"{here}{spread}_{n}"
    inverse = number(1 / t[name][i, 0].item(), f"1/{'σ' if spread == 'sigma' else 'rms'}", lambda k: Cell(name, i, 0))
    sums = [Sum((a, inverse))]
    if spread == "sigma":
        sums.append(Sum((one(t, f"{here}mu_{n}", i, 0), inverse), -1))
        return "(input − mean) / σ", sums
    return "input / rms", sums


def _product(t: Tensors, source: str, w: str, i: int, j: int) -> Answer:
    """A row of the input times a column of the weight, plus the bias"""
    b = w.replace("w_", "b_", 1)
    here, _, letter = w.rpartition("w_")
    sums = [Sum((row(t, source, i), column(t, w, j)))]
    if t.weights(here)[letter][1] is not None:
        sums.append(Sum((one(t, b, 0, j),)))
        return "input · column of the weight, plus the bias", sums
    return "input · column of the weight", sums


def _heads(t: Tensors, here: str, i: int, j: int) -> Answer:
    width = t[here + "v"].shape[2]
    h, c = divmod(j, width)
    seen = t.seen(here, i)
    every = Sum((row(t, here + "rho", i, h), column(t, here + "v", c, h // t.group(here))))
    return f"attention weights · values{masked(t, seen)}", [every.only(seen)]


def masked(t: Tensors, seen: range) -> str:
    """How many tokens are no terms of a sum in attention."""
    count = len(t.trace["a_0"]) - len(seen)
    return f"; {count:,} masked {'token is' if count == 1 else 'tokens are'} left out" if count else ""


def _activation(t: Tensors, here: str, i: int, j: int) -> Answer:
    mlp = t.block(here).mlp
    letters = mlp.letters()
    if not mlp.gated:
        value = number(t[here + "a_8"][i, j].item(), "g(a₇)", lambda k: Cell(f"{here}a_7", i, j))
        return "the activation function of a₇", [Sum((value,))]
    x = t[f"{here}a_{letters[0]}"][i : i + 1, j : j + 1].double()
    g = number(mlp.activate([x, torch.ones_like(x)]), "g(gate)", lambda k: Cell(f"{here}a_gate", i, j))
    return "g(gate) · up", [Sum((g, one(t, f"{here}a_{letters[1]}", i, j)))]


def _queries(t: Tensors, cell: Cell, here: str, last: str) -> Answer:
    """A query, key or value: from its rotation, its norm or its projection"""
    letter, h, i, j = last[-1], cell.head or 0, cell.row, cell.column
    step = next((s for s in t.steps(here, letter) if s.after == here + last), None)
    if step is None:
        width = t[here + letter].shape[2]
        return _product(t, here + "a_2", f"{here}w_{letter}", i, h * width + j)
    if step.norm is None:
        width = t[step.after].shape[2]
        turned = t.rotate(torch.eye(width, dtype=torch.float64)[None], slice(i, i + 1))[0, :, j]
        used = turned.nonzero().flatten()
        x = number(t[step.before][h, i, used], "", lambda k: Cell(step.before, i, int(used[k]), h))
        return "rotated by the angle of its position", [Sum((x, number(turned[used], "cos, sin")))]
    rms = step.norm.statistics(step.norm.forward(t[step.before][h, i : i + 1].to(t.model.dtype))[1])["rms"]
    gain = number(step.norm.weight.detach()[j], f"w_{letter}_norm")
    return "input / rms times the gain", [Sum((one(t, step.before, i, j, h), number(1 / rms.item(), "1/rms"), gain))]

"""How cells of a mixture of experts were computed, and what its steps send back."""

import torch
from torch import Tensor

from ...errors import HandgradError
from ...model.layers.experts import Experts
from ..session.session import TracedSentence
from ..stations.network import NetworkStep
from .tensors import Cell, Tensors
from .terms import Factor, Sum, number, one, row

Answer = tuple[str, list[Sum]]


def router(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    e = int(t.trace[step.here + "chosen"][cell.row, cell.column])
    value = number(t.value(cell), f"the share of expert {e}", lambda k: Cell(step.inputs[0], cell.row, e))
    return f"the gate of expert {e}, from the row of scores", [Sum((value,))]


def experts(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    slot, j = divmod(cell.column, _width(t, step))
    e = int(t.trace[step.here + "chosen"][cell.row, slot])
    a_8, _ = _expert(t, step, cell.row, e)
    layer = _mixture(t, step).experts[e].contract
    w, b = layer.effective_weight()[:, j], layer.plain().added_bias()
    sums = [Sum((number(a_8, f"a₈ of expert {e}", lambda k: None), number(w, "w", lambda k: None)))]
    return f"what expert {e} computes", sums + ([] if b is None else [Sum((number(b[j], "b"),))])


def mixture(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    i, j, d = cell.row, cell.column, t[cell.name].shape[1]
    y = step.inputs[1]
    outputs = Factor(t[y][i, j::d].double(), lambda k: Cell(y, i, k * d + j))
    sums = [Sum((row(t, step.inputs[0], i), outputs))]
    if len(step.inputs) > 2:
        sums.append(Sum((one(t, step.inputs[2], i, j), *_share(t, step, i))))
    return "gates · outputs of the experts" + (", plus the shared expert" if len(step.inputs) > 2 else ""), sums


def sent_by_router(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    value = number(t.value(cell), "Δ through the gates", lambda k: Cell(step.signals[0], cell.row, k))
    return "Δ of the gates, through the slope of the router", [Sum((value,))]


def sent_by_experts(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    if cell.name.endswith("scores"):
        return "the choice of experts has no slope", [Sum((number(0.0, "no slope"),))]
    i, d = cell.row, _width(t, step)
    sums = []
    for slot, e in enumerate(t.trace[step.here + "chosen"][i].tolist()):
        expert = _mixture(t, step).experts[e]
        delta = t[step.signals[0]][i : i + 1, slot * d : (slot + 1) * d].double()
        delta_8 = delta @ expert.contract.effective_weight().double().t()
        parts, _ = expert.backward_activation(delta_8, _expert(t, step, i, e)[1])
        w = torch.cat([layer.effective_weight().double() for layer in expert.projections()], 1)[cell.column]
        sums.append(Sum((number(torch.cat(parts, 1), f"Δ of expert {e}", lambda k: None), number(w, "w"))))
    return "Δ of the experts' gate and up · rows of their weights", sums


def gradient(t: Tensors, step: NetworkStep, symbol: str, cell: Cell) -> Answer:
    """Of the weights of an expert: w_gate_3, w_up_3 or w_8_3, and their biases; from the tokens that chose it"""
    letter, _, number_of = symbol.partition("_")
    kind, _, e = number_of.rpartition("_")
    if letter not in "wb" or kind not in ("gate", "up", "8"):
        raise HandgradError(f"{symbol} belongs to an expert, and is not a weight or bias that can be followed")
    expert, d = _mixture(t, step).experts[int(e)], _width(t, step)
    inputs, deltas = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.float64)]
    for row_of_e, slot in (t.trace[step.here + "chosen"] == int(e)).nonzero().tolist():
        a_8, parts = _expert(t, step, row_of_e, int(e))
        x, delta = a_8, t[step.signals[0]][row_of_e : row_of_e + 1, slot * d : (slot + 1) * d].double()
        if kind != "8":
            delta_8 = delta @ expert.contract.effective_weight().double().t()
            delta = expert.backward_activation(delta_8, parts)[0][0 if kind == "gate" else 1]
            x = t[step.inputs[0]][row_of_e].double()
        inputs.append(x.flatten()[cell.row : cell.row + 1])
        deltas.append(delta.flatten()[cell.column : cell.column + 1])
    told = number(torch.cat(deltas), "Δ", lambda k: None)
    if letter == "b":
        return "Δ, summed over the tokens of the expert", [Sum((told,))]
    return "input · Δ, over the tokens of the expert", [Sum((number(torch.cat(inputs), "input", lambda k: None), told))]


def sent_by_mixture(t: Tensors, sentence: TracedSentence, step: NetworkStep, cell: Cell) -> Answer:
    i, j, delta = cell.row, cell.column, step.signals[0]
    d = t[delta].shape[1]
    place = [x.replace("a_", "delta_") for x in step.inputs].index(cell.name)
    if place == 0:
        y = step.inputs[1]
        outputs = Factor(t[y][i, j * d : (j + 1) * d].double(), lambda k: Cell(y, i, j * d + k))
        return "Δ₉ · the output of the expert", [Sum((row(t, delta, i), outputs))]
    if place == 1:
        slot, column = divmod(j, d)
        return "the gate · Δ₉", [Sum((one(t, step.inputs[0], i, slot), one(t, delta, i, column)))]
    if place == 2:
        return "Δ₉, times the gate of the shared expert if it has one", [
            Sum((one(t, delta, i, j), *_share(t, step, i)))
        ]
    (share,) = _share(t, step, i)
    slope = number(share.values * (1 - share.values), "σ(1 − σ)", lambda k: Cell(step.inputs[3], i, 0))
    shared = row(t, step.inputs[2], i)
    return "Δ₉ · the output of the shared expert, times σ(1 − σ)", [Sum((row(t, delta, i), shared, slope))]


def _share(t: Tensors, step: NetworkStep, i: int) -> list[Factor]:
    """The gate of the shared expert, if it has one."""
    if len(step.inputs) < 4:
        return []
    return [number(torch.sigmoid(t[step.inputs[3]][i].double()), "σ(a₆ v)", lambda k: Cell(step.inputs[3], i, 0))]


def _mixture(t: Tensors, step: NetworkStep) -> Experts:
    layers = t.block(step.here).mlp
    assert isinstance(layers, Experts)
    return layers


def _width(t: Tensors, step: NetworkStep) -> int:
    return t[step.inputs[0]].shape[1]


def _expert(t: Tensors, step: NetworkStep, i: int, e: int) -> tuple[Tensor, list[Tensor]]:
    """a_8 (f), and gate and up, of expert e at row i"""
    expert, a = _mixture(t, step).experts[e], t[step.inputs[0]][i : i + 1].double()
    parts = []
    for layer in expert.projections():
        b = layer.plain().added_bias()
        parts.append(a @ layer.effective_weight().double() + (0 if b is None else b.double()))
    return expert.activate(parts)[0], parts

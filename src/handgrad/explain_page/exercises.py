"""The exercises of the course on the page: the stations that offer them, and cases made from the tensors of a sentence."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..learn.exercise import Case, Exercise
from ..model.gpt import GPT
from ..model.passes.objective import TEXT_LOSS
from ..paper.attention import Head
from ..paper.rotary import frequencies
from ..paper.transformer import Block, Options
from .presentation.notation import symbols
from .session.session import Session, TracedSentence
from .stations.table import Station

MAX_TOKENS = 32  # of a case: the first tokens of the sentence
MAX_COLUMNS = 512  # of a weight: a vocabulary has tens of thousands
PAPER = ("norm", "attention", "linear", "add", "norm", "linear", "activation", "linear", "add")  # the paper's block

Make = Callable[..., Case]  # of an exercise: a case from the tensors of a layer


def offered_at(station: Station, model: GPT) -> list[str]:
    """The names of the exercises that belong to a station of this model."""
    c = model.config
    adapted = any(p.symbol.startswith("u_") for p in station.parameters)
    found = {
        "tokens": [], "norm": [f"{c.norm}norm"], "add": ["block"],
        "attention": ["softmax", "attention", *(["rotary"] if c.positions == "rotary" else [])],
    }.get(station.kind, [station.kind])  # fmt: skip
    return found + (["lora"] if adapted and station.kind == "linear" else [])


def case_of(session: Session, sentence: TracedSentence, exercise: Exercise, station: Station | None) -> Case | None:
    """The exercise with the tensors of this sentence at a station, by default its first; None if the model has none."""
    offering = [s for s in session.stations if exercise.name in offered_at(s, session.model)]
    if station is None or station not in offering:
        station = next(iter(offering), None)
    if station is None:
        return None
    with session.model_at(sentence.version) as model, torch.no_grad():
        return _BUILDERS[exercise.name](_Tensors(session, sentence, station, model), exercise.case)


class _Tensors:
    """The tensors at a station of a sentence, in float64, cut to a size that can be judged quickly."""

    def __init__(self, session: Session, sentence: TracedSentence, station: Station, model: GPT):
        self.sentence, self.station, self.model, self.config = sentence, station, model, model.config
        self.here = "" if station.block is None else f"blocks.{station.block}."
        self.n = min(len(sentence.ids), MAX_TOKENS)
        self.inside = [] if station.block is None else session.network.blocks[station.block]
        around = [s for s in session.stations if s.block == station.block]
        self._parameters = {p.symbol.partition(" ")[0]: p for s in [*around, station] for p in s.parameters}
        self._values = dict(model.named_parameters())
        place = "" if station.block is None else f", block {station.block + 1}"
        cut = f", its first {self.n} tokens" if self.n < len(sentence.ids) else ""
        self.label = f"this sentence{cut}{place}, {symbols(station.a) if station.a else 'a₀'}"

    def of(self, name: str) -> Tensor:
        """A tensor of the trace, (n, features)."""
        return self.sentence.trace[name][: self.n].double()

    def delta(self) -> Tensor:
        return self.of(self.station.incoming[0])

    def input(self) -> Tensor:
        return self.of(self.station.inputs[0])

    def expanded(self) -> str:
        """What the layer before an activation reads."""
        return next(step.inputs[0] for step in self.inside if self.station.inputs[0] in step.outputs)

    def weight(self, symbol: str) -> Tensor | None:
        """A parameter under the paper's name, oriented as there; None if the model has no such parameter."""
        found = self._parameters.get(symbol)
        return None if found is None else found.view(self._values[found.name].detach())

    def first_weight(self, letter: str) -> Tensor | None:
        """The weight (w) or offset (b) of this station, or of the first of its branches."""
        names = [p.symbol.partition(" ")[0] for p in self.station.parameters]
        return next((self.weight(name) for name in names if name.startswith(f"{letter}_")), None)


def _linear(t: _Tensors, make: Make) -> Case | None:
    a, w, b, delta = t.input(), t.first_weight("w"), t.first_weight("b"), t.delta()[:, :MAX_COLUMNS]
    if w is None:
        return None
    w = w if w.shape[0] == a.shape[1] else w.t()  # a tied head shows the table of the embedding
    columns = min(w.shape[1], MAX_COLUMNS, delta.shape[1])
    w = w[:, :columns].double()
    b = torch.zeros(columns, dtype=torch.float64) if b is None else b[:columns].double()
    return make(t.label, a, w.contiguous(), b, delta[:, :columns])


def _lora(t: _Tensors, make: Make) -> Case | None:
    d, u, a = t.first_weight("d"), t.first_weight("u"), t.input()
    if d is None or u is None or d.shape[0] != a.shape[1]:
        return None
    u, delta = u[:, :MAX_COLUMNS].double(), t.delta()[:, :MAX_COLUMNS]
    if u.shape[1] != delta.shape[1]:
        return None
    return make(f"{t.label}, with scale 0.5", a, d.double(), u, 0.5, delta)


def _norm(t: _Tensors, make: Make, *others: Tensor) -> Case | None:
    w = t.first_weight("w")
    gain = None if w is None else w.double() + t.config.gain_offset
    return None if gain is None else make(t.label, t.input(), gain, *others, t.delta(), t.config.eps)


def _layernorm(t: _Tensors, make: Make) -> Case | None:
    b = t.first_weight("b")
    return None if b is None else _norm(t, make, b.double())


def _activation(t: _Tensors, make: Make) -> Case:
    return make(f"{t.label}, with GELU", t.input(), t.delta())


def _gated(t: _Tensors, make: Make) -> Case | None:
    weights = [t.weight(name) for name in ("w_gate", "w_up")]
    if any(w is None for w in weights):
        return None
    w_gate, w_up = (w[:, :MAX_COLUMNS].double() for w in weights if w is not None)
    return make(f"{t.label}, with SiLU", t.of(t.expanded()), w_gate, w_up, t.delta()[:, :MAX_COLUMNS])


def _embedding(t: _Tensors, make: Make) -> Case:
    ids = t.sentence.trace["a_0"][: t.n]
    known, renumbered = torch.unique(ids, return_inverse=True)
    delta = t.delta()
    table = torch.zeros(len(known) + 3, delta.shape[1], dtype=torch.float64)  # its values do not matter
    return make(f"{t.label}, ids renumbered from 0", renumbered, table, delta)


def _loss(t: _Tensors, make: Make) -> Case:
    other = "" if t.sentence.objective == TEXT_LOSS else ", with the mean loss, not with what is explained"
    return make(t.label + other, t.model.logit_map.forward(t.of("a_12").clone()), t.sentence.targets[0, : t.n])


def _softmax(t: _Tensors, make: Make) -> Case:
    rho = t.sentence.trace[t.here + "rho"][0, : t.n, : t.n].double()
    v = t.sentence.trace[t.here + "v"][0, : t.n].double()
    return make(f"{t.label}, head 1", rho.log(), t.delta()[:, : t.config.value_width] @ v.t())


def _rotary(t: _Tensors, make: Make) -> Case:
    trace = t.sentence.trace
    q, k = (trace[t.here + name][0, : t.n].double() for name in "qk")
    delta = trace[t.here + "delta_raw"][0, : t.n, : t.n].double() @ k
    theta = frequencies(t.config.query_width, t.config.rope_base)
    return make(f"{t.label}, queries of head 1", q, torch.arange(t.n), theta, delta)


def _head(t: _Tensors, i: int) -> Head | None:
    """Head i with the weights of its keys and values; offsets that the model does not have are 0."""
    c, parts = t.config, []
    group = i * c.kv_heads // c.n_heads
    for letter, width, at in (("q", c.query_width, i), ("k", c.query_width, group), ("v", c.value_width, group)):
        columns = slice(at * width, (at + 1) * width)
        w, b = t.weight(f"w_{letter}"), t.weight(f"b_{letter}")
        if w is None:
            return None
        parts.append(w[:, columns].double().contiguous())
        parts.append(torch.zeros(width, dtype=torch.float64) if b is None else b[columns].double())
    return Head(*parts)


def _attention(t: _Tensors, make: Make) -> Case | None:
    head = _head(t, 0)
    if head is None:
        return None
    without = ", without norms and rotation" if t.config.positions == "rotary" or t.config.qk_norm else ""
    label = f"{t.label}, head 1{without}"
    return make(label, t.input(), head, t.delta()[:, : t.config.value_width])


def _block(t: _Tensors, make: Make) -> Case | None:
    """The whole block, if it is the paper's: LayerNorm, learned positions, one feed-forward branch, a smooth activation."""
    c = t.config
    ours = c.norm == "layer" and c.positions == "learned" and not c.gated and not c.qk_norm and c.causal
    ours = ours and tuple(step.kind for step in t.inside) == PAPER
    if not ours or c.kv_heads != c.n_heads or c.window is not None or not c.activation.startswith("gelu"):
        return None
    heads = [_head(t, i) for i in range(c.n_heads)]
    plain: dict[str, Any] = {name: t.weight(name) for name in Block._fields if name != "heads"}
    if any(x is None for x in (*heads, *plain.values())):
        return None
    p = Block(**{name: x.double().contiguous() for name, x in plain.items()}, heads=[h for h in heads if h is not None])
    first, last = t.inside[0].inputs[0], t.inside[-1].signals[0]
    return make(t.label, t.of(first), p, t.of(last), Options(c.activation, c.eps, True))


_BUILDERS: dict[str, Callable[[_Tensors, Make], Case | None]] = {
    "softmax": _softmax, "loss": _loss, "linear": _linear, "activation": _activation, "embedding": _embedding,
    "layernorm": _layernorm, "rmsnorm": _norm, "gated": _gated, "lora": _lora,
    "rotary": _rotary, "attention": _attention, "block": _block,
}  # fmt: skip

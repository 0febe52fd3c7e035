"""The tensors that a number can be followed into: those of the trace, weights, and what the trace does not record.

blocks.0.score                   q kᵗ/√d_ρ, the scores before the softmax; scaled: before their cap   (h, n, n)
blocks.0.sum_e, sum_e            the sums of e^score of a row of attention, and of e^logit           (h, n, 1), (n, 1)
blocks.0.G_1, mean_G_1, mean_Ga_1   inside a norm's backward pass: G = Δ diag(w), mean(G), mean(G ∘ ā)  (n, d), (n, 1)
blocks.0.x_q, n_q                queries before the norm and before the rotation, if there are any  (h, n, d_ρ)
blocks.0.delta_q, delta_x_q …    the error signals of q, k and v, and of what comes before them
blocks.0.h_8, g_8                inside an adapter: its input a d, and scale · Δ uᵗ                 (n, r)
delta_0                          Δ_1 w_tokᵗ, of tokens relaxed to vectors                           (n, V)
blocks.0.w_8, b_8, w_11, w_tok   weights, oriented as in the paper, with their adapter's product
"""

import copy
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import HandgradError
from ...model.block import Block
from ...model.gpt import GPT
from ...model.inspect.trace import Trace
from ...model.layers import attention
from ...model.layers.attention import Attention
from ...model.layers.linear import Affine
from ...model.layers.norms import Norm
from ...model.layers.sinks import Sinks
from ...model.layers.taps import Taps
from ...model.passes.arguments import Rotations
from ...model.steps import signal
from ...ops import linear, rotary
from ...ops.attention import scores_of
from ..stations.network import Network, NetworkStep

LARGE_EXPONENT = 30.0
Pair = tuple[Tensor, Tensor | None]  # weight (f_in, f_out) and bias


class Cell(NamedTuple):
    """One entry of a tensor. A vector has row 0."""

    name: str
    row: int
    column: int
    head: int | None = None


def products(layers: Sequence[Affine], letters: Sequence[str]) -> dict[str, Pair]:
    """Weight (f_in, width) and bias of each output, whether these are one layer or several."""
    found: dict[str, Pair] = {}
    names = iter(letters)
    for layer in layers:
        plain = layer.plain()
        weights = [x.flatten(1) for x in plain.split(layer.effective_weight())]
        b = plain.added_bias()
        biases: Sequence[Tensor | None] = [None] * len(weights) if b is None else [x.flatten() for x in plain.split(b)]
        found |= {next(names): pair for pair in zip(weights, biases, strict=True)}
    return found


class QueryStep(NamedTuple):
    """One step between a projection and the heads: a norm, or the rotation."""

    before: str
    after: str
    norm: Norm | None  # None: the rotation


class Tensors:
    """Tensors by name, in the dtype in which they were computed: a sum takes its few entries in float64. `here` is the
    prefix of a block, or empty."""

    def __init__(self, model: GPT, trace: Trace, network: Network):
        self.model, self.trace, self.network = model, trace, network
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """(rows, columns), or (heads, rows, columns)"""
        if name not in self._made:
            x = self.trace[name] if name in self.trace else self._derived(name)
            self._made[name] = x[None] if x.ndim == 1 else x
        return self._made[name]

    def wide(self, name: str) -> Tensor:
        """An activation or an error signal in float64."""
        return self[name].double()

    def value(self, cell: Cell) -> float:
        x = self[cell.name]
        if x.ndim == 3:
            if cell.head is None or not 0 <= cell.head < len(x):
                raise HandgradError(f"{cell.name} has {len(x)} heads: pass head=0 to {len(x) - 1}")
            x = x[cell.head]
        if not 0 <= cell.row < x.shape[0] or not 0 <= cell.column < x.shape[1]:
            raise HandgradError(f"{cell.name} is {x.shape[0]} × {x.shape[1]}: there is no {cell.row}, {cell.column}")
        return x[cell.row, cell.column].item()

    def block(self, here: str) -> Block:
        return self.model.blocks[int(here.split(".")[1])]

    def pair(self, here: str, letter: str) -> Pair | None:
        """The weight and bias w_letter and b_letter, with its adapter's product."""
        found = self.network.holder(here, letter)
        for _, layer, letters in found[0].products() if found else ():
            if letter in letters:
                return products([layer], letters)[letter]
        return None

    def attention(self, here: str) -> NetworkStep:
        return self.network.find(int(here.split(".")[1]), "attention")

    def seen(self, here: str, i: int) -> range:
        """The tokens that attention at token i sees."""
        attn = self.block(here).attn
        first = 0 if attn.scores.window is None else max(0, i + 1 - attn.scores.window)
        return range(first, i + 1 if attn.scores.causal else len(self.trace["a_0"]))

    def rho_sink(self, here: str, sinks: Tensor) -> Tensor:
        """The sink's part of every row's softmax (h, n)."""
        hidden, b = self[here + "rho"] == 0, sinks.detach().double()[:, None]
        lse = self[here + "score"].masked_fill(hidden, -math.inf).logsumexp(2)
        return torch.exp(b - torch.logaddexp(lse, b))

    def exponentials(self, here: str) -> tuple[Tensor, bool]:
        """e^score of what each token sees (h, n, n); without a block e^logit (n, V). Where one would be very large or small,
        rows are shifted by their largest entry, and True is returned."""
        if here:
            x = self.wide(here + "score").masked_fill(self[here + "rho"] == 0, -math.inf)
        else:
            x = self.model.logit_map.forward(self.wide("a_12").clone())
        largest = x.amax(-1, keepdim=True)
        shifted = bool(largest.abs().max() > LARGE_EXPONENT)
        return torch.exp(x - largest if shifted else x), shifted

    def seeing(self, here: str, j: int) -> range:
        """The tokens whose attention sees token j."""
        attn, n = self.block(here).attn, len(self.trace["a_0"])
        causal, window, *_ = attn.scores
        return range(j if causal else 0, n if window is None else min(n, j + window))

    # ── between the projections and the heads ───────────────────────────────────────────────────────────────────────

    @cached_property
    def rotations(self) -> Rotations:
        n = len(self.trace["a_0"])
        return self.model.rotations(torch.arange(n), (n,))

    def steps(self, here: str, letter: str) -> list[QueryStep]:
        """The steps from the projection of q, k or v to what the heads read."""
        attn: Attention = self.block(here).attn
        norms: list[Norm | None] = []
        if letter in "qk":
            norms = [*([getattr(attn, f"{letter}_norm")] if attn.normed else []), *([None] if attn.rotated else [])]
        names = [*[f"{here}x_{letter}", f"{here}n_{letter}"][: len(norms)], here + letter]
        return [QueryStep(a, b, norm) for a, b, norm in zip(names[:-1], names[1:], norms, strict=True)]

    def projected(self, here: str, letter: str) -> str:
        """The name of the projection's output: x_q, or q if nothing comes after it."""
        steps = self.steps(here, letter)
        return steps[0].before if steps else here + letter

    def rotate(self, here: str, x: Tensor, rows: slice = slice(None), back: bool = False) -> Tensor:
        """(n, h, d_ρ) → the same, rotated by the angles of these rows"""
        attn: Attention = self.block(here).attn
        cos, sin = (table[rows].double() for table in self.rotations[attn.rotary_table])
        return (rotary.backward if back else rotary.forward)(x, cos, sin, neighbors=attn.neighbors)

    # ── what the trace does not record ──────────────────────────────────────────────────────────────────────────────

    def _derived(self, name: str) -> Tensor:
        here, last = split(name)
        if here and here not in [f"blocks.{i}." for i in range(len(self.model.blocks))]:
            raise HandgradError(f"there is no tensor {name!r} to follow")
        kind, _, rest = last.partition("_")
        if kind in ("w", "b") and (x := self._parameter(here, kind, rest)) is not None:
            return x.detach()
        if last in self.model.tables():
            table = self.model.tables()[last]
            return table.table(torch.arange(self.model.config.n_vocab))[0].detach() if table.weight is None else table.w
        if last == "delta_0" and not here:
            return self.model.embed.scale * linear.backward(self[signal(self.network.start)], self["w_tok"])
        if last == "sum_e":
            return self._sum_of_softmax(here)
        if last.startswith(("G_", "mean_G")):
            return self._inside_norm(here, last)
        if last[:2] in ("h_", "g_") and self._adapted(here, last[2:]):
            return self._adapter(here, last[0], last[2:])
        if here and (made := self._inside_block(here, last)) is not None:
            return made
        raise HandgradError(f"there is no tensor {name!r} to follow")

    def _sum_of_softmax(self, here: str) -> Tensor:
        e, _ = self.exponentials(here)
        total = e.sum(-1, keepdim=True)
        sinks = self.block(here).attn.sinks if here else None
        if sinks is not None:  # from ρ = e^score/Σ, which includes the sink
            share = self.rho_sink(here, sinks)[..., None]
            total = total / (1 - share)
        return total

    def _inside_norm(self, here: str, last: str) -> Tensor:
        n = last.rpartition("_")[2]
        found = self.network.holder(here, n)
        if found is None or found[0].kind != "norm":
            raise HandgradError(f"there is no tensor {here + last!r} to follow")
        if last.startswith("G_"):
            return self.wide(found[0].signals[0]) * found[0].norm()[1].gain.detach().double()
        g = self[f"{here}G_{n}"]
        return (g if last.startswith("mean_G_") else g * self.wide(f"{here}a_bar_{n}")).mean(1, keepdim=True)

    def _parameter(self, here: str, kind: str, letter: str) -> Tensor | None:
        found = self.network.holder(here, letter)
        layer = None if found is None else found[0].layers[found[1]]
        if isinstance(layer, Norm | Sinks | Taps):
            p = layer.named_symbols().get(kind)
            return layer.in_order(p) if isinstance(layer, Taps) and kind == "w" and p is not None else p
        pair = self.pair(here, letter)
        return None if pair is None else pair[0 if kind == "w" else 1]

    def _inside_block(self, here: str, last: str) -> Tensor | None:
        inner = last.removeprefix("delta_")
        if last in ("scaled", "score"):
            scores = self.block(here).attn.scores
            uncapped = scores if last == "score" else scores._replace(cap=None)
            return scores_of(self.wide(here + "q"), self.shared(here, "k"), uncapped)
        if last == "delta_v":
            return self._grouped(here, self.wide(here + "rho").mT @ self.by_head(here, self.attention(here).signals[0]))
        if last in ("delta_q", "delta_k"):
            raw = self.wide(here + "delta_raw")
            if last == "delta_q":
                return raw @ self.shared(here, "k")
            return self._grouped(here, raw.mT @ self.wide(here + "q"))
        steps = self.steps(here, inner[-1]) if inner[2:] in ("q", "k") else []
        if here + inner not in [step.before for step in steps]:
            return None
        return self._forward_to(here, last, steps) if last == inner else self._backward_to(here, inner, steps)

    def _forward_to(self, here: str, last: str, steps: list[QueryStep]) -> Tensor:
        """The projection's output, or that after its norm."""
        pair = self.pair(here, last[-1])
        assert pair is not None
        w, b = pair
        x = linear.forward(self.wide(self.attention(here).inputs[0]), w.double(), None if b is None else b.double())
        x = x.view(len(x), -1, self[here + last[-1]].shape[2])
        if last.startswith("n_"):
            norm = steps[0].norm
            assert norm is not None
            x = attention.normalize(wide(norm), x)[0]
        return x.transpose(0, 1)

    def _backward_to(self, here: str, inner: str, steps: list[QueryStep]) -> Tensor:
        """The error signal before a step, from that after it."""
        step = next(step for step in steps if step.before == here + inner)
        after = self.wide(delta_of(step.after)).transpose(0, 1)
        if step.norm is None:
            return self.rotate(here, after, back=True).transpose(0, 1)
        norm, x = wide(step.norm), self.wide(step.before).transpose(0, 1).contiguous()
        saved = attention.normalize(norm, x)[1]
        a_bar = norm.rebuild_output(saved)[0]
        return norm.backward(after.reshape(a_bar.shape), a_bar, saved).view(x.shape).transpose(0, 1)

    def _adapted(self, here: str, number: str) -> bool:
        """Whether w_number has an adapter."""
        found = self.network.holder(here, number)
        layer = found[0].layers.get(number) if found else None
        return isinstance(layer, Affine) and layer.adapted

    def _adapter(self, here: str, kind: str, number: str) -> Tensor:
        """h = a d, or g = scale · Δ uᵗ, of the adapter of w_number"""
        layer, source, signals = self.layer(here, number)
        if kind == "h":
            d = layer.named_symbols()["d"]
            assert d is not None
            return self.wide(source) @ d.detach().double()
        made: Tensor = layer.upstream(self.flat(signals.values()).to(self.model.dtype)).h
        return made

    # ── layers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def layer(self, here: str, letter: str) -> tuple[Affine, str, dict[str, str]]:
        """The layer that holds w_letter, the name of its input, and the error signals of its outputs by their letters."""
        found = self.network.holder(here, letter)
        assert found is not None
        step, number = found
        if step.kind == "attention":
            signals = {x: delta_of(self.projected(here, x)) for x in "qkv"}
        else:
            every = [x for _, _, letters in step.products() for x in letters]
            signals = dict(zip(every, step.signals, strict=True))
        layer, letters = next((layer, letters) for n, layer, letters in step.products() if n == number)
        return layer, step.inputs[0], {x: signals[x] for x in letters}

    def flat(self, names: Iterable[str]) -> Tensor:
        """Signals side by side, (n, all columns)"""
        tensors = [self.wide(name) for name in names]
        return torch.cat([x.transpose(0, 1).flatten(1) if x.ndim == 3 else x for x in tensors], 1)

    def shared(self, here: str, letter: str) -> Tensor:
        """Keys or values of every query head, (h, n, w)"""
        x = self.wide(here + letter)
        return x.repeat_interleave(len(self[here + "q"]) // len(x), 0)

    def group(self, here: str) -> int:
        """Query heads per head of keys."""
        return len(self[here + "q"]) // len(self[here + "k"])

    def by_head(self, here: str, name: str) -> Tensor:
        """The output of the heads or its error signal as (h, n, d_h)"""
        x = self.wide(name)
        return x.view(len(x), len(self[here + "q"]), -1).transpose(0, 1)

    def _grouped(self, here: str, x: Tensor) -> Tensor:
        return x.view(-1, self.group(here), *x.shape[1:]).sum(1)


def split(name: str) -> tuple[str, str]:
    """blocks.0.a_5 → "blocks.0." and "a_5" """
    head, dot, last = name.rpartition(".")
    return head + dot, last


def delta_of(name: str) -> str:
    """The name of the error signal of a tensor inside attention: blocks.0.x_q → blocks.0.delta_x_q"""
    here, last = split(name)
    return f"{here}delta_{last}"


def wide(norm: Norm) -> Norm:
    """A copy in float64 whose backward pass adds nothing to any gradient."""
    return frozen(norm).double()


def frozen(norm: Norm) -> Norm:
    """A copy of a norm that adds nothing to any gradient."""
    made = copy.deepcopy(norm)
    made.requires_grad_(False)
    for p in made.parameters():
        p.grad = None
    return made

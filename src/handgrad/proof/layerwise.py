"""`LayerwiseChecker`: the checks of `Checker` for a large model, with a float64 copy of one layer at a time.

Forward, only the input of every block is stored. Backward, each block is copied to float64, run by hand and by autograd,
compared, and freed; autograd's error signal goes on to the block below. The head and the token table are compared in groups
of rows. Nothing of the size of the model exists twice, and what the formulas computed is computed again, block by block,
when it is read.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.injection import adapters_of
from ..model.gpt import GPT
from ..model.objective import MEAN_LOSS, Objective
from ..model.passes import Pass
from ..ops import attention, embedding, linear, rotary
from ..ops.loss import NO_TARGET
from ..tolerances import DIFFERENCE_FLOOR, ENTRY_FLOOR, LOSS_FLOOR, NORM_FLOOR, TOLERANCE
from .by_hand import ByHand
from .layerwise_rounding import errors_by_rounding
from .oracles import directional_error
from .reference import (
    block_weights,
    choices_of,
    differentiate_part,
    hold_norms,
    reference_block,
    reference_norm,
    reference_objective,
)
from .tensor_errors import TensorErrors
from .verify import check_finite_and_trained, concatenate, difference_steps, loss_of

VOCABULARY_AT_ONCE = 4096  # rows of the head that are compared at a time


def shared_copy(model: GPT) -> GPT:
    """A copy with the same weights in memory."""
    known: dict[int, Any] = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, known)


class LayerwiseChecker:
    """Check one model on one sequence, layer by layer.

    errors     relative errors, by the trace's names of activations and signals and the model's names of parameters
    rounding   errors of `computed`, the signals that the model computed in its own dtype
    rounding_limits   the largest such errors allowed: the tolerance of the dtype; where that is exceeded, what rounding
               explains, if that is more
    trained    sizes of the trainable parameters by name

    The weights are not copied: replace them meanwhile, but do not change them in place.
    """

    def __init__(
        self,
        model: GPT,
        tokens: Tensor,
        targets: Tensor,
        computed: "Mapping[str, Tensor] | None" = None,  # a trace
        *,
        objective: Objective = MEAN_LOSS,
        seed: int = 0,
        pause: Callable[[], None] = lambda: None,
    ):
        self.model = model = shared_copy(model)
        self.objective, self.pause = objective, pause
        check_finite_and_trained(model)
        for adapter in adapters_of(model).values():
            if adapter.magnitude is not None:
                hold_norms(adapter, copy.deepcopy(adapter).double().column_norms())
        self.choices = choices_of(model.config)
        (self.piece,) = model.pieces(tokens, objective.select(targets, model.config.n_vocab), None, math.inf)
        self.targets = torch.full((len(self.piece.ids),), NO_TARGET)
        self.targets[self.piece.rows] = self.piece.targets
        self.names = {p: name for name, p in model.named_parameters()}
        self.trained = {name: p.numel() for p, name in self.names.items() if p.requires_grad}
        self.limit = TOLERANCE[torch.float64]
        self.steps, self.difference_limit = difference_steps(model.config)
        self.ours = ByHand(model, Pass(attention.spans_of(self.piece.lengths), rotation=self._rotation()), pause)
        self._generator = torch.Generator().manual_seed(seed)
        self._activations, self._signals, self._gradients, self._roundings = (TensorErrors() for _ in range(4))
        self._norms: dict[str, float] = {}  # of the gradients
        self._largest_signal = 0.0  # its norm
        with torch.no_grad():
            self._check(computed or {})
        self.errors = {
            **self._activations.relative(0.0),
            **self._signals.relative(ENTRY_FLOOR),
            **self._gradients.relative(ENTRY_FLOOR),
            "loss": abs(self.loss - self._expected_loss) / max(abs(self._expected_loss), LOSS_FLOOR),
        }
        self.rounding = self._roundings.relative(NORM_FLOOR)
        self.rounding_limits = dict.fromkeys(self.rounding, TOLERANCE[model.dtype])
        if any(error > TOLERANCE[model.dtype] for error in self.rounding.values()):
            explained = errors_by_rounding(self, seed)
            self.rounding_limits |= {
                name: max(x, explained[name]) for name, x in self.rounding_limits.items() if self.rounding[name] > x
            }

    # ── layers in float64 ───────────────────────────────────────────────────────────────────────────────────────────

    def _rotation(self) -> tuple[Tensor, Tensor] | None:
        c = self.model.config
        if c.positions != "rotary":
            return None
        theta, factor = rotary.frequencies(c.query_width, c.rope_base, c.rope_scaling, torch.float64)
        return rotary.angles(self.piece.positions, theta, factor)

    def vocabulary(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Rows of the head in float64: (rows, d), and their bias"""
        w, b = self.model.head.effective_weight().t(), self.model.head.plain().added_bias()
        for start in range(0, len(w), VOCABULARY_AT_ONCE):
            rows = slice(start, min(start + VOCABULARY_AT_ONCE, len(w)))
            yield rows, w[rows].double(), None if b is None else b[rows].double()

    def embeddings(self) -> Tensor:
        """a_1 in float64"""
        table, rows = self.model.embed.table(self.piece.ids)
        a = table[rows].double()
        if self.model.has("positions"):
            a = a + self.model.positions.w[self.piece.positions].double()
        return a

    # ── the comparison ──────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, computed: Mapping[str, Tensor]) -> None:
        self.ours.outside["a_0"] = self.piece.ids
        self.ours.forward(self.embeddings())
        upstream = self._check_readout(computed)
        for i in reversed(range(len(self.model.blocks))):
            upstream = self._check_block(i, upstream, computed)
        self._check_tables(upstream)

    def _compare(
        self,
        ours: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        deltas: Mapping[str, Tensor],
        computed: Mapping[str, Tensor],
    ) -> None:
        """Compare activations and signals, by the names of their Δ, with what the formulas and the model computed."""
        for name, signal in deltas.items():
            found = ours.get(name)
            self._signals.add(name, torch.full_like(signal, math.nan) if found is None else found, signal)
            self._largest_signal = max(self._largest_signal, signal.norm().item())
            if name in computed:
                self._roundings.add(name, computed[name], signal, norm=True)
            if (a := name.replace("delta_", "a_")) in ours:
                self._activations.add(a, ours[a], values[name])

    def _add_gradient(self, p: nn.Parameter, ours: Tensor | None, expected: Tensor) -> None:
        name = self.names[p]
        if name in self.trained:
            self._gradients.add(name, torch.full_like(expected, math.nan) if ours is None else ours, expected)
            self._norms[name] = math.hypot(self._norms.get(name, 0.0), expected.norm().item())

    def _check_readout(self, computed: Mapping[str, Tensor]) -> Tensor:
        """a_10 → the loss and Δ_10, by hand and by autograd, which is returned"""
        model, piece, a_10 = self.model, self.piece, self.ours.inputs[-1]
        norm, weight = copy.deepcopy(model.final_norm).double(), 1 / len(piece.targets)
        a_11, saved = norm.forward(a_10)
        a_12 = torch.cat([linear.forward(a_11, w.t(), b, None) for _, w, b in self.vocabulary()], 1)
        end = differentiate_part(lambda a, _: reference_objective(a, self.targets, self.objective) * weight, a_12)
        self._expected_loss, self._expected = end.out.item(), end.delta  # Δ_12
        total, rows = self.objective.forward_and_delta(a_12[piece.rows].clone(), piece.targets, weight)
        self.loss = total.item() * weight
        delta_12 = torch.zeros_like(a_12).index_copy_(0, piece.rows, rows)
        self._compare({"a_12": a_12, "delta_12": delta_12}, {"delta_12": a_12}, {"delta_12": end.delta}, computed)
        del a_12, rows, end  # as large as the vocabulary
        delta_11, upstream = torch.zeros_like(a_11), torch.zeros_like(a_11)
        for columns, w, _ in self.vocabulary():
            self.pause()
            delta_11 += linear.backward(delta_12[:, columns], w.t())
            upstream += differentiate_part(lambda a, _, w=w: a @ w.T, a_11, (), self._expected[:, columns]).delta  # type: ignore[misc]
        self.ours.deltas[len(model.blocks) - 1] = norm.backward(delta_11, norm.rebuild_output(saved)[0], saved)
        grads = [p.grad for p in norm.parameters()]
        pair, choices = (norm.weight, getattr(norm, "bias", None)), self.choices
        part = differentiate_part(
            lambda a, _: reference_norm(a, pair, choices.norm, choices.eps), a_10, list(norm.parameters()), upstream
        )
        ours = {"a_11": a_11, "delta_11": delta_11}
        self._compare(ours, {"delta_11": part.out}, {"delta_11": upstream}, computed)
        for p, mine, expected in zip(model.final_norm.parameters(), grads, part.grads, strict=True):
            self._add_gradient(p, mine, expected)
        statistics = {f"{name}_10": x for name, x in norm.statistics(saved).items()}
        self.ours.outside |= {**ours, "delta_12": delta_12, **statistics}
        return part.delta

    def _check_block(self, i: int, upstream: Tensor, computed: Mapping[str, Tensor]) -> Tensor:
        """Δ_10 → Δ_1, by hand and by autograd, which is returned"""
        ours, block = self.ours.run_block(i)
        parameters = list(block.parameters())
        grads = [p.grad for p in parameters]
        self.pause()
        part = differentiate_part(
            lambda a, hook: reference_block(block_weights(block, self.model.config), self.choices, i, a, hook),
            self.ours.inputs[i],
            parameters,
            upstream,
        )
        self._compare(ours, part.values, part.deltas, computed)
        for p, mine, expected in zip(self.model.blocks[i].parameters(), grads, part.grads, strict=True):
            self._add_gradient(p, mine, expected)
        return part.delta

    def _check_tables(self, upstream: Tensor) -> None:
        """The embeddings and the head, whose weight may be the same"""
        model, ids, delta_1 = self.model, self.piece.ids, self.ours.deltas[-1]
        head, a_11 = model.head.plain(), self.ours["a_11"]
        if head.bias is not None:
            self._add_gradient(head.bias, linear.grad_b(self.ours["delta_12"], None), self._expected.sum(0))
        tied = model.config.tied
        for name, table in model.tables().items():
            if table.weight is None or not table.weight.requires_grad:
                continue
            rows = ids if name == "w_tok" else self.piece.positions
            used, inverse = torch.unique(rows, return_inverse=True)
            small = torch.zeros(len(used), delta_1.shape[1], dtype=torch.float64)
            ours = embedding.grad_w(delta_1, inverse, small, None)
            lookup = differentiate_part(lambda w, _: w[inverse], small, (), upstream).delta  # noqa: B023
            if not (tied and name == "w_tok"):
                self._add_gradient(table.weight, ours, lookup)
                continue
            self._check_head(table.weight, used, ours, lookup)
        if head.weight is not None and not tied and head.weight.requires_grad:
            self._check_head(head.weight, torch.empty(0, dtype=torch.long), a_11[:0], a_11[:0])
        del self._expected  # as large as the vocabulary

    def _check_head(self, weight: nn.Parameter, used: Tensor, ours: Tensor, expected: Tensor) -> None:
        """The gradient of the head in groups of rows; to the rows `used` the embedding adds its part"""
        a_11 = self.ours["a_11"]
        for columns, w, _ in self.vocabulary():
            self.pause()
            mine = linear.grad_w(a_11, self.ours["delta_12"][:, columns], None)  # Δᵗ a, as the head is stored
            part = differentiate_part(lambda w, _: a_11 @ w.T, w, (), self._expected[:, columns]).delta
            inside = (used >= columns.start) & (used < columns.stop)
            where = used[inside] - columns.start
            mine, part = mine.index_add(0, where, ours[inside]), part.index_add(0, where, expected[inside])
            self._add_gradient(weight, mine, part)

    # ── finite differences ──────────────────────────────────────────────────────────────────────────────────────────

    def difference(self, signal: str) -> float:
        """Error of a signal by finite differences of the loss along a random direction."""
        claimed = self.ours[signal]
        floor = DIFFERENCE_FLOOR * self._largest_signal
        f = lambda x: self._loss(signal, x)  # noqa: E731
        return directional_error(f, torch.zeros_like(claimed), claimed, self._generator, floor, self.steps)

    def can_differentiate(self, name: str) -> bool:
        """Whether finite differences of a parameter can be taken: of the blocks and the final norm, not of the tables."""
        return self._layer_number(name) is not None

    def difference_of(self, names: Sequence[str]) -> float:
        """Error of the gradients of several parameters of one layer, by finite differences along a random direction."""
        i, layer = self._layer_of(names[0])
        parameters = {self.names[p]: q for p, q in zip(self._original(i).parameters(), layer.parameters(), strict=True)}
        members = [parameters[name] for name in names]
        claimed = concatenate([q.grad for q in members if q.grad is not None])
        floor = DIFFERENCE_FLOOR * max(self._norms.values())
        f = loss_of(members, lambda: self._loss("", self.piece.ids, i, layer))
        return directional_error(f, concatenate(members), claimed, self._generator, floor, self.steps)

    def gradient(self, name: str) -> Tensor:
        """The gradient of a parameter of a block, computed again."""
        i, layer = self._layer_of(name)
        pairs = zip(self._original(i).parameters(), layer.parameters(), strict=True)
        found: Tensor | None = next(q.grad for p, q in pairs if self.names[p] == name)
        assert found is not None
        return found

    def _original(self, i: int) -> nn.Module:
        return self.model.blocks[i] if i < len(self.model.blocks) else self.model.final_norm

    def _layer_number(self, name: str) -> int | None:
        """The number of the block that has this parameter; after the last one, the final norm; None for all others."""
        layers = range(len(self.model.blocks) + 1)
        return next((i for i in layers if any(self.names[p] == name for p in self._original(i).parameters())), None)

    def _layer_of(self, name: str) -> tuple[int, Any]:
        """The number of this parameter's layer, and a copy of the layer in float64 with its gradients by hand."""
        i = self._layer_number(name)
        if i is None:
            raise KeyError(name)
        if i < len(self.model.blocks):
            return i, self.ours.run_block(i)[1]
        norm = copy.deepcopy(self.model.final_norm).double()
        with torch.no_grad():
            saved = norm.forward(self.ours.inputs[-1])[1]
            norm.backward(self.ours["delta_11"], norm.rebuild_output(saved)[0], saved)
        return i, norm

    def _loss(self, signal: str, change: Tensor, first: int | None = None, layer: Any = None) -> float:
        """The loss of the reference from one block on, with `change` added to one intermediate, or with another layer in the
        place of that block; after the last block, of the final norm."""
        blocks = len(self.model.blocks)
        if first is None:
            first = int(signal.split(".")[1]) if signal.startswith("blocks.") else blocks

        def hook(name: str, x: Tensor) -> Tensor:
            return x + change if name == signal else x

        with torch.no_grad():
            a = self.ours.inputs[first]
            for i in range(first, blocks):
                block = layer if layer is not None and i == first else self.ours.block(i)
                a = reference_block(block_weights(block, self.model.config), self.choices, i, a, hook)
            replaced = layer is not None and first == blocks
            norm = layer if replaced else copy.deepcopy(self.model.final_norm).double()
            pair = (norm.weight, getattr(norm, "bias", None))
            a_11 = hook("delta_11", reference_norm(a, pair, self.choices.norm, self.choices.eps))
            parts = [a_11 @ w.T if b is None else a_11 @ w.T + b for _, w, b in self.vocabulary()]
            logits = hook("delta_12", torch.cat(parts, 1))
            return reference_objective(logits, self.targets, self.objective).item() / len(self.piece.targets)

"""The reference on a model and a batch: its loss, and by autograd every error signal and every parameter's gradient.

Autograd runs through one layer at a time, from the head to the embeddings, and its error signal goes on to the layer below.
So the layers need not be in float64 all at once; the head and the tables are differentiated in groups of rows.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model.gpt import GPT
from ..model.layers.experts import Experts
from ..model.layers.norms import Norm
from ..model.passes.objective import MEAN_LOSS, Objective
from ..model.steps import require, signal
from .reference import (
    RULES,
    Change,
    Reference,
    affine,
    block_weights,
    choices_of,
    reference_block,
    reference_logits,
    reference_norm,
    reference_objective,
    weight_and_bias,
)
from .reference_experts import RouterTerms, mixture_of, router_terms
from .wide_layers import WideLayers, row_groups

Visit = Callable[[int, str, Tensor], Tensor]  # first row, name, activation → the activation to go on with


def unchanged(start: int, name: str, x: Tensor) -> Tensor:
    """Default visitor: do nothing."""
    return x


def _scores_into(scores: list[Tensor], visit: Visit = unchanged) -> Visit:
    """A visitor that also lists the scores of routers."""

    def listing(start: int, name: str, x: Tensor) -> Tensor:
        x = visit(start, name, x)
        if name.endswith(".a_scores"):
            scores.append(x)
        return x

    return listing


class Part(NamedTuple):
    """What autograd computes of one part of the network."""

    values: dict[str, Tensor]  # activations by name
    deltas: dict[str, Tensor]  # error signals by name
    grads: dict[str, Tensor]  # by parameter name
    rows: slice | None = None  # of a large parameter: the rows that `grads` holds
    loss: float | None = None  # in the first part


class _Derivatives(NamedTuple):
    """What autograd computes of a function f(a, visit)."""

    out: Tensor
    values: dict[str, list[Tensor]]  # per sequence
    deltas: dict[str, list[Tensor]]
    delta: Tensor  # of a
    grads: list[Tensor]  # of the parameters


def differentiate(
    f: Callable[[Tensor, Visit], Tensor],
    a: Tensor,
    parameters: Sequence[Tensor] = (),
    upstream: Tensor | None = None,
    added: Callable[[dict[str, list[Tensor]]], Tensor | float] = lambda seen: 0.0,
) -> _Derivatives:
    """Autograd through f(a, visit) and its parameters, from the Δ of its output; None for a scalar. `added` is a term that
    depends on the activations."""
    seen: dict[str, list[Tensor]] = {}

    def visit(start: int, name: str, x: Tensor) -> Tensor:
        seen.setdefault(name, []).append(x)
        return x

    with torch.enable_grad():
        leaf = a.detach().clone().requires_grad_()
        out = f(leaf, visit)
        total = (out if upstream is None else (out * upstream).sum()) + added(seen)
        wanted = [*(x for parts in seen.values() for x in parts), leaf, *parameters]
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
    found = iter([torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)])
    deltas = {signal(name): [next(found) for _ in parts] for name, parts in seen.items()}
    values = {name: [x.detach() for x in parts] for name, parts in seen.items()}
    return _Derivatives(out.detach(), values, deltas, next(found), list(found))


class ReferenceModel:
    """The reference for a model on a packed batch. The model is only read; `pause` is called before every activation, and
    may block. `edit` then sees, and may replace, what it has visited and which experts are chosen."""

    def __init__(
        self,
        model: GPT,
        tokens: Tensor,
        targets: Tensor,
        lengths: list[int] | None = None,
        objective: Objective = MEAN_LOSS,
        pause: Callable[[], None] = lambda: None,
        edit: Visit = unchanged,
    ):
        for block in model.blocks:
            require(block.steps(), RULES, "the reference")
        self.model, self.pause, self.edit = model, pause, edit
        self.layers, self.choices = WideLayers(model, pause), choices_of(model.config)
        batch = model.pack(tokens, lengths)
        self.ids, self.positions, self.lengths = batch.ids, batch.positions, batch.lengths
        self.starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        self.objective = reference_objective(objective, targets.reshape(-1).to(self.ids), self.lengths)
        self.with_routers = model.config.router_losses and objective.routers

    # ── forward ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def inputs(self) -> list[Tensor]:
        """a_1 of every block, and a_10 of the last"""
        found = [self.layers.embeddings(self.ids, self.positions).detach()]
        with torch.no_grad():
            for i in range(self.model.config.n_blocks):
                found.append(self._block(self.layers.layer(i), i, found[-1], unchanged))
        return found

    @cached_property
    def routers(self) -> tuple[RouterTerms, float]:
        """The losses of the routers, whose counts do not change with small changes of the weights; and their value."""
        seen: list[Tensor] = []
        with torch.no_grad():
            for i in range(self.model.config.n_blocks):
                self._block(self.layers.layer(i), i, self.inputs[i], _scores_into(seen))
        terms = self.terms_of(seen)
        return terms, float(sum(terms.of_block(x) for x in seen))

    def terms_of(self, scores: list[Tensor]) -> RouterTerms:
        """The losses of the routers whose scores these are, one after the other."""
        mlps = [block.mlp for block in self.model.blocks]
        return router_terms(self.model.config, scores, mixture_of(next(x for x in mlps if isinstance(x, Experts))))

    def loss(self, visit: Visit = unchanged, first: int | None = None, layer: Any = None) -> Tensor:
        """The mean loss, or the objective, with every activation replaced by visit(…). It is computed from block `first`
        on, with `layer` in its place; after the last block this is the final norm. None: from the embeddings. The losses
        of the routers that are computed are added."""
        n, scores = self.model.config.n_blocks, list[Tensor]()
        visit = _scores_into(scores, visit)
        a = self.layers.embeddings(self.ids, self.positions) if first is None else self.inputs[first]
        for i in range(first or 0, n):
            a = self._block(self.layers.layer(i) if layer is None or i != first else layer, i, a, visit)
        norm = self.layers.layer(n) if layer is None or first != n else layer
        a_11 = visit(0, "a_11", self._norm(norm, a))
        logits = torch.cat([affine(a_11, pair) for _, pair in self.layers.head_parts()], 1)
        value = self.objective(reference_logits(visit(0, "a_12", logits), self.choices))
        return value + sum(self.routers[0].of_block(x) for x in scores) if self.with_routers else value

    def loss_with(self, name: str, change: Tensor, first: int) -> float:
        """The loss with `change` added to the activation of that name, in block `first`."""

        def visit(start: int, here: str, x: Tensor) -> Tensor:
            if here != name:
                return x
            rows = slice(start, start + x.shape[-2])
            return x + (change[:, rows, rows] if x.ndim == 3 else change[rows])

        with torch.no_grad():
            return self.loss(visit, first).item()

    @torch.no_grad()
    def logits(self) -> Tensor:
        """(n, V), as the softmax reads them"""
        a_11 = self._norm(self.layers.layer(self.model.config.n_blocks), self.inputs[-1])
        a_12 = torch.cat([affine(a_11, pair) for _, pair in self.layers.head_parts()], 1)
        return reference_logits(a_12, self.choices)

    def _block(self, block: Any, i: int, a: Tensor, visit: Visit, change: Change | None = None) -> Tensor:
        """a_1 → a_10 of all sequences. `change` is applied to every activation before it is visited."""
        weights, found = block_weights(block, self.model.config), []
        for start, x in zip(self.starts, torch.split(a, list(self.lengths)), strict=True):

            def hook(name: str, x: Tensor, start: int = start) -> Tensor:
                self.pause()
                if x.is_floating_point():
                    x = visit(start, name, x if change is None else change(x))
                return self.edit(start, name, x)

            found.append(reference_block(weights, self.choices, i, x, hook, change))
        return torch.cat(found)

    def _norm(self, norm: Norm, a: Tensor, change: Change | None = None) -> Tensor:
        return reference_norm(a, weight_and_bias(norm), self.choices.norm, self.choices.eps, change)

    # ── backward ────────────────────────────────────────────────────────────────────────────────────────────────────

    def differentiate(self, change: Change | None = None) -> Reference:
        """Every value, Δ and gradient of the batch at once. `change` is applied to every intermediate: it may round."""
        loss, values, deltas, grads = 0.0, dict[str, Tensor](), dict[str, Tensor](), dict[str, list[Tensor]]()
        for part in self.parts(change):
            loss = loss if part.loss is None else part.loss
            values |= part.values
            deltas |= part.deltas
            for name, grad in part.grads.items():
                grads.setdefault(name, []).append(grad)
        return Reference(loss, values, deltas, {name: torch.cat(rows) for name, rows in grads.items()})

    def parts(self, change: Change | None = None) -> Iterator[Part]:
        """Both passes, part by part from the head to the embeddings."""
        shared: dict[str, Tensor] = {}  # gradients of parameters that several blocks have, so far
        for i, (part,), (delta,) in self._passes([change], grads=True):
            if i == self.model.config.n_blocks:
                a_11, delta_12 = part.values["a_11"], part.deltas["delta_12"]
            for name in list(part.grads):
                grad = part.grads.pop(name)
                total = shared.pop(name) + grad if name in shared else grad
                (part.grads if self.layers.number_of(name) == i else shared)[name] = total
            if i == 0:
                delta_1 = delta
            yield part
            del part  # of the head: as large as the vocabulary
        yield from self._tables(a_11, delta_12, delta_1)

    def signals(self, changes: Sequence[Change | None]) -> Iterator[list[dict[str, Tensor]]]:
        """The error signals of several passes, part by part: one pass for each change of the intermediates."""
        for _, parts, _ in self._passes(changes, grads=False):
            yield [part.deltas for part in parts]

    @torch.no_grad()
    def _passes(self, changes: Sequence[Change | None], grads: bool) -> Iterator[tuple[int, list[Part], list[Tensor]]]:
        """Several passes through one copy of each layer: the number of the layer, its part in every pass, and the Δ of its
        input."""
        n = self.model.config.n_blocks
        inputs = [[self.layers.embeddings(self.ids, self.positions)] * len(changes)]
        scores: list[list[Tensor]] = [[] for _ in changes]
        for i in range(n):
            block, own = self.layers.layer(i), zip(inputs[-1], changes, scores, strict=True)
            inputs.append([self._block(block, i, a, _scores_into(seen), x) for a, x, seen in own])
        terms = [self.terms_of(seen) if self.with_routers else None for seen in scores]
        if changes[0] is None:
            self.inputs = [passes[0].detach() for passes in inputs]
        deltas: list[Any] = [None] * len(changes)
        for i in reversed(range(n + 1)):
            layer = self.layers.layer(i)
            parameters = self.layers.parameters(i, layer) if grads else {}
            parts = []
            for j, (a, change) in enumerate(zip(inputs.pop(), changes, strict=True)):
                if i == n:
                    part, deltas[j] = self._readout(layer, a, parameters, change)
                else:
                    part, deltas[j] = self._differentiate_block(layer, i, a, parameters, deltas[j], change, terms[j])
                parts.append(part)
            yield i, parts, deltas
            del parts  # of the head: as large as the vocabulary

    def _differentiate_block(
        self,
        block: Any,
        i: int,
        a: Tensor,
        parameters: dict[str, nn.Parameter],
        delta: Tensor,
        change: Change | None,
        terms: RouterTerms | None,
    ) -> tuple[Part, Tensor]:
        """a_1, Δ_10 → the tensors of a block, and Δ_1"""

        def added(seen: dict[str, list[Tensor]]) -> Tensor | float:
            scores = seen.get(f"blocks.{i}.a_scores")
            return 0.0 if terms is None or scores is None else terms.of_block(torch.cat(scores))

        f = lambda a, visit: self._block(block, i, a, visit, change)  # noqa: E731
        found = differentiate(f, a, list(parameters.values()), delta, added)
        values, deltas = ({x: self._joined(parts) for x, parts in y.items()} for y in (found.values, found.deltas))
        return Part(values, deltas, dict(zip(parameters, found.grads, strict=True))), found.delta

    def _readout(
        self, norm: Norm, a: Tensor, parameters: dict[str, nn.Parameter], change: Change | None
    ) -> tuple[Part, Tensor]:
        """a_10 → the loss, Δ_12 and Δ_11, and Δ_10"""
        changed = change or (lambda x: x)
        a_11 = changed(self._norm(norm, a, change))
        logits = changed(torch.cat([affine(a_11, pair) for _, pair in self.layers.head_parts()], 1))
        end = differentiate(lambda x, _: self.objective(reference_logits(x, self.choices)), logits)
        delta_12, delta_11 = changed(end.delta), torch.zeros_like(a_11)
        for columns, pair in self.layers.head_parts():
            delta_11 += differentiate(lambda a, _, pair=pair: affine(a, pair), a_11, (), delta_12[:, columns]).delta  # type: ignore[misc]
        delta_11 = changed(delta_11)
        found = differentiate(lambda a, _: self._norm(norm, a, change), a, list(parameters.values()), delta_11)
        values, deltas = {"a_11": a_11, "a_12": logits}, {"delta_12": delta_12, "delta_11": delta_11}
        return Part(values, deltas, dict(zip(parameters, found.grads, strict=True)), loss=end.out.item()), found.delta

    @torch.no_grad()
    def _tables(self, a_11: Tensor, delta_12: Tensor, delta_1: Tensor) -> Iterator[Part]:
        """The gradients of the head and of the embeddings, some rows at a time; both may have the same weight."""
        model, head = self.model, self.model.head.plain()
        terms: dict[nn.Parameter, list[Callable[[slice], Tensor]]] = {}
        for name, table in model.tables().items():
            if table.trains:
                assert table.weight is not None
                ids, scale = (self.ids, table.scale) if name == "w_tok" else (self.positions, 1.0)
                terms[table.weight] = [partial(looked_up, ids, delta_1 * scale)]
        if model.head.adapted:
            wide, own = self.layers.head(), list(model.head.parameters())
            chosen = [q for p, q in zip(own, wide.parameters(), strict=True) if p.requires_grad]
            found = differentiate(lambda a, _: affine(a, weight_and_bias(wide)), a_11, chosen, delta_12).grads
            for p, grad in zip((p for p in own if p.requires_grad), found, strict=True):
                terms.setdefault(p, []).append(grad.__getitem__)
        else:
            if head.trains:
                assert head.weight is not None
                terms.setdefault(head.weight, []).append(partial(_of_head, head.weight, a_11, delta_12))
            if head.bias is not None and head.bias.requires_grad:
                terms[head.bias] = [partial(_of_bias, head.bias, delta_12)]
        for p, parts in terms.items():
            for rows in row_groups(len(p)):
                self.pause()
                grad = sum((part(rows) for part in parts[1:]), parts[0](rows))
                yield Part({}, {}, {self.layers.names[p]: grad}, rows)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Join the sequences: rows (n, d) are concatenated, maps (h, n, n) are put on the diagonal of one map."""
        if parts[0].ndim == 2:
            return torch.cat(parts)
        n = sum(self.lengths)
        joined = parts[0].new_zeros(parts[0].shape[0], n, n)
        for start, x in zip(self.starts, parts, strict=True):
            rows = slice(start, start + x.shape[-1])
            joined[:, rows, rows] = x
        return joined


def looked_up(ids: Tensor, delta_1: Tensor, rows: slice) -> Tensor:
    """What an embedding adds to the gradient of some rows of its table."""
    here = (ids >= rows.start) & (ids < rows.stop)
    table = delta_1.new_zeros(rows.stop - rows.start, delta_1.shape[1])
    return differentiate(lambda w, _: F.embedding(ids[here] - rows.start, w), table, (), delta_1[here]).delta


def _of_head(w: Tensor, a_11: Tensor, delta_12: Tensor, rows: slice) -> Tensor:
    """What the head adds to the gradient of some rows of its weight (V, d)."""
    return differentiate(lambda w, _: a_11 @ w.T, w[rows].double(), (), delta_12[:, rows]).delta


def _of_bias(b: Tensor, delta_12: Tensor, rows: slice) -> Tensor:
    return differentiate(lambda b, _: b.expand(len(delta_12), -1), b[rows].double(), (), delta_12[:, rows]).delta

"""What the hand-derived formulas compute in float64: of the whole model at once, or a block at a time.

Both have the tensors by the trace's names, the `loss`, and `gradient(name)`.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..errors import HandgradError
from ..model.inspect.trace import own_gradients, record_pass
from ..model.passes.arguments import Pass, Recorder, Within
from ..model.passes.objective import Objective
from ..model.passes.readout import target_rows
from ..model.passes.router_losses import RouterLosses
from ..ops import attention, embedding, linear
from .wide_layers import WideLayers


class Recorded(dict[str, Tensor]):
    """The tensors of one recorded pass of a model in float64."""

    def __init__(
        self, layers: WideLayers, tokens: Tensor, targets: Tensor, lengths: list[int] | None, objective: Objective
    ):
        super().__init__()
        model = layers.model
        self.routers = RouterLosses(model.config)

        def record(name: str, value: Tensor) -> None:
            layers.pause()
            self[name] = value

        with own_gradients(model.parameters()):
            self.loss = record_pass(
                model, tokens, targets, lengths, record=record, objective=objective, routers=self.routers
            )
            self.grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def gradient(self, name: str, rows: slice | None = None) -> Tensor | None:
        """The gradient of a parameter, or some rows of it; None if there is none."""
        found = self.grads.get(name)
        return found if found is None or rows is None else found[rows]


class ByHand(Mapping[str, Tensor]):
    """The tensors of a model of which one block at a time is in float64. Stored are those outside the blocks, and of each
    block what enters it from both sides; all others of a block are computed again when one is read, and stay until another
    block is read. The logits are freed with the first block.

    inputs   a_1 of every block, and a_10 of the last
    deltas   Δ_10 of every block; at −1, Δ_1 of the first
    """

    @torch.no_grad()
    def __init__(
        self, layers: WideLayers, tokens: Tensor, targets: Tensor, lengths: list[int] | None, objective: Objective
    ):
        model = layers.model
        own = [p for block in model.blocks for p in block.parameters()]
        if len(set(own)) < len(own):
            raise HandgradError("blocks share a parameter: the model can only be checked as a whole, in float64")
        work = model.prepare(model.pack(tokens, lengths), targets, objective, complete=True)
        (self._piece,), self.routers = work.pieces, work.routers
        self._layers, self._model, piece = layers, model, self._piece
        self._run = Pass(
            attention.spans_of(piece.lengths),
            rotations=model.rotations(piece.positions, piece.lengths, torch.float64),
            routers=self.routers,
        )
        self._latest: tuple[int, dict[str, Tensor], dict[str, Tensor | None]] = (-1, {}, {})
        self._tables: dict[str, Tensor] = {}  # gradients outside the blocks of which no rows are taken
        self.inputs = [layers.embeddings(piece.ids, piece.positions)]
        if self.routers is not None:
            self.routers.begin()
        for i in range(len(model.blocks)):
            self.inputs.append(layers.layer(i).forward(self.inputs[i], self._run)[0])
        if self.routers is not None:
            self.routers.counting = False
        self.deltas: dict[int, Tensor] = {}
        self.outside = {"a_0": piece.ids, **self._read_out(work.objective)}

    def _read_out(self, objective: Objective) -> dict[str, Tensor]:
        """a_10 → the loss, and the tensors outside the blocks"""
        layers, piece, n = self._layers, self._piece, len(self._model.blocks)
        norm, weight = layers.layer(n), 1 / objective.count(piece.lengths, len(piece.targets))
        a_11, saved = norm.forward(self.inputs[n])
        head = layers.head() if self._model.head.adapted else None
        if head is None:
            a_12 = torch.cat([linear.forward(a_11, w, b, None) for _, (w, b) in layers.head_parts()], 1)
        else:
            a_12 = head.forward(a_11)
        y = self._model.logit_map.forward(a_12[piece.rows].clone())
        total, rows = objective.forward_and_delta(y.clone(), target_rows(piece, slice(None)), weight)
        rows = self._model.logit_map.backward(rows, y)
        self.loss = total.item() * weight
        delta_12 = torch.zeros_like(a_12).index_copy_(0, piece.rows, rows)
        if head is None:
            delta_11 = torch.zeros_like(a_11)
            for columns, (w, _) in layers.head_parts():
                delta_11 += linear.backward(delta_12[:, columns], w)
        else:
            head.zero_grad()
            delta_11 = head.backward(delta_12)
            head.accumulate(delta_12, a_11)
            pairs = zip(self._model.head.parameters(), head.parameters(), strict=True)
            self._tables = {layers.names[p]: q.grad for p, q in pairs if q.grad is not None}
        norm.zero_grad()
        self.deltas[n - 1] = norm.backward(delta_11, norm.rebuild_output(saved)[0], saved)
        self._tables |= {name: p.grad for name, p in layers.parameters(n, norm).items() if p.grad is not None}
        statistics = {f"{name}_10": x for name, x in norm.statistics(saved).items()}
        return {**statistics, "a_11": a_11, "a_12": a_12, "delta_12": delta_12, "delta_11": delta_11}

    @torch.no_grad()
    def _block(self, i: int) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        """All that block i records, and its gradients by parameter name."""
        if self._latest[0] != i:
            if i not in self.deltas:
                self._block(i + 1)
            values: dict[str, Tensor] = {}
            self._latest = (-1, {}, {})
            self.outside.pop("a_12", None)  # as large as the vocabulary
            block = self._layers.layer(i)
            run = self._run._replace(observer=Within(Recorder(values.__setitem__), f"blocks.{i}."))
            block.zero_grad()
            saved = block.forward(self.inputs[i], run)[1]
            self.deltas[i - 1] = block.backward(self.deltas[i], saved, run)
            grads = {name: p.grad for name, p in self._layers.parameters(i, block).items()}
            block.zero_grad()
            self._latest = (i, values, grads)
        return self._latest[1:]

    @torch.no_grad()
    def gradient(self, name: str, rows: slice | None = None) -> Tensor | None:
        """The gradient of a parameter, or some rows of it; None if there is none."""
        i = self._layers.number_of(name)
        if i is not None and i < len(self._model.blocks):
            return self._block(i)[1].get(name)
        found = self._tables.get(name)
        p = self._model.get_parameter(name)
        rows = rows or slice(0, len(p))
        total = None if found is None else found[rows]
        head, delta_12, delta_1 = self._model.head.plain(), self.outside["delta_12"], self.deltas.get(-1)
        if not self._model.head.adapted and p is head.bias:
            return linear.grad_b(delta_12[:, rows], None)
        if not self._model.head.adapted and p is head.weight:
            total = linear.grad_w(self.outside["a_11"], delta_12[:, rows], None)  # Δᵗ a, as the head is stored
        for table, ids in (
            (self._model.embed, self._piece.ids),
            (self._model.tables().get("w_pos"), self._piece.positions),
        ):
            if table is not None and table.weight is p:
                assert delta_1 is not None
                here = (ids >= rows.start) & (ids < rows.stop)
                small = delta_1.new_zeros(rows.stop - rows.start, delta_1.shape[1])
                total = embedding.grad_w(delta_1[here] * table.scale, ids[here] - rows.start, small, total)
        return total

    def __getitem__(self, name: str) -> Tensor:
        if not name.startswith("blocks."):
            return self.outside[name]
        i = int(name.split(".")[1])
        if not 0 <= i < len(self._model.blocks):
            raise KeyError(name)
        return self._block(i)[0][name]

    def __iter__(self) -> Iterator[str]:
        yield from self.outside
        for i in reversed(range(len(self._model.blocks))):
            yield from self._block(i)[0]

    def __len__(self) -> int:
        return sum(1 for _ in self)

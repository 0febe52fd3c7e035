"""Gradients of single examples, measured inside the backward pass. An example is a sequence of the batch.

    norms = ExampleNorms()                  ‖∂_i‖ of every example; with grads=True `.grad` is filled as usual
    ExamplePairs()                          ⟨∂_i, ∂_j⟩ of all pairs of a batch
    ExamplesAgainst({p: q})                 ⟨∂_i, Q_k⟩ with given gradients q (K, *p.shape)
    model.loss_and_grads(tokens, targets, lengths, examples=norms)
    norms.result()

A layer hands over the factors of a parameter's gradient, (a, Δ), instead of computing it: `ops/per_example.py` has the
formulas. Results belong to the mean loss of each example alone: what `loss_and_grads` of that example would compute.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...ops import linear, per_example
from .batch import Piece

CPU = torch.device("cpu")  # of the results


class Segments(NamedTuple):
    """Which rows belong to which examples: those of example first + i are `lengths[i]` rows, end to end."""

    first: int
    lengths: tuple[int, ...]
    ids: tuple[Tensor, ...]  # the tokens of each example

    @property
    def here(self) -> slice:
        """The places of these examples in a result."""
        return slice(self.first, self.first + len(self.lengths))


class ExampleGradients(ABC):
    """The interface that layers use, through `PieceExamples`. Each call adds the part of one parameter."""

    grads = False  # whether `.grad` is filled as well
    needs_losses = False  # whether `row_losses` is called
    together = False  # whether all pieces of a batch have to be processed together
    tied: nn.Parameter | None = None  # the matrix that the embedding and the logits layer share, if it trains

    def begin(self, pieces: Sequence[Piece], n_examples: int, n_targets: int, tied: nn.Parameter | None) -> None:
        """Called before the passes over a batch."""
        self.n_examples, self.tied = n_examples, tied
        self.expected = sum(len(piece.lengths) for piece in pieces)
        # The backward pass divides by the targets of the batch; an example alone is divided by its own.
        self.scale = torch.zeros(n_examples, dtype=torch.float64, device=CPU)  # 0 without a target: its gradient is 0
        for piece in pieces:
            counts = torch.tensor(piece.counts(), dtype=torch.float64, device=CPU)
            self.scale[piece.first : piece.first + len(counts)] = torch.where(counts > 0, n_targets / counts, 0.0)

    def row_losses(self, x: Tensor, rows: Segments) -> None:  # noqa: B027  only norms keep them
        """The loss of every row with a target."""

    @abstractmethod
    def product(self, p: nn.Parameter, a: Tensor, delta: Tensor, rows: Segments, in_out: bool) -> None:
        """∂p = aᵗ Δ, stored transposed unless `in_out`."""

    @abstractmethod
    def sums(self, p: nn.Parameter, x: Tensor, rows: Segments) -> None:
        """∂p = Σ_tok x, in rows of all its numbers"""

    @abstractmethod
    def look_up(self, p: nn.Parameter, delta: Tensor, ids: Tensor, rows: Segments) -> None:
        """∂p = ohe(ids)ᵗ Δ"""


class ExampleNorms(ExampleGradients):
    """‖∂_i‖ of every example; `losses` are their mean losses, (B) in float64."""

    needs_losses = True

    def __init__(self, grads: bool = False):
        self.grads = grads
        self.squares = self.losses = torch.zeros(0, dtype=torch.float64, device=CPU)

    def begin(self, pieces: Sequence[Piece], n_examples: int, n_targets: int, tied: nn.Parameter | None) -> None:
        super().begin(pieces, n_examples, n_targets, tied)
        self.squares = torch.zeros(n_examples, dtype=torch.float64, device=CPU)
        self.losses = torch.zeros(n_examples, dtype=torch.float64, device=CPU)
        self._input: tuple[Tensor, list[Tensor]] | None = None  # the Gram matrices of an input that layers share
        # by example: a_11, and the columns of Δ_12 of its tokens
        self._head: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def result(self) -> Tensor:
        """(B) norms, float64"""
        return self.squares.clamp(min=0).sqrt() * self.scale

    def row_losses(self, x: Tensor, rows: Segments) -> None:
        counts = torch.tensor(rows.lengths, dtype=torch.float64, device=CPU).clamp(min=1)
        self.losses[rows.here] = per_example.sums(x.double(), rows.lengths).cpu() / counts

    def product(self, p: nn.Parameter, a: Tensor, delta: Tensor, rows: Segments, in_out: bool) -> None:
        left, right = (a, delta) if in_out else (delta, a)
        if per_example.forming(rows.lengths, a.shape[1], delta.shape[1], self.grads):
            for i, grad in enumerate(per_example.formed(left, right, rows.lengths, p.dtype), rows.first):
                self.squares[i] += per_example.dot(grad, grad)
                if self.grads:
                    p.grad = grad if p.grad is None else p.grad.add_(grad)
        else:
            if self._input is None or self._input[0] is not a:
                self._input = a, per_example.grams(a, rows.lengths)
            grams = per_example.grams(delta, rows.lengths)
            self.squares[rows.here] += per_example.squares(self._input[1], grams).cpu()
            if self.grads:
                p.grad = linear.grad_w(right, left, p.grad, p.dtype)
        if p is self.tied:
            self._keep_columns(a, delta, rows)

    def sums(self, p: nn.Parameter, x: Tensor, rows: Segments) -> None:
        added = per_example.sums(x, rows.lengths)
        self.squares[rows.here] += added.double().square().sum(1).cpu()
        if self.grads:
            total = added.sum(0).to(p.dtype).view_as(p)
            p.grad = total if p.grad is None else p.grad.add_(total)

    def look_up(self, p: nn.Parameter, delta: Tensor, ids: Tensor, rows: Segments) -> None:
        self._input = None
        self.squares[rows.here] += per_example.table_squares(delta, ids, rows.lengths).cpu()
        if p is self.tied:  # ‖E + H‖² = ‖E‖² + ‖H‖² + 2⟨E, H⟩
            for i, delta_1 in enumerate(torch.split(delta, [*rows.lengths]), rows.first):
                for a_11, columns in self._head.pop(i, ()):
                    self.squares[i] += 2 * per_example.table_head(delta_1, a_11, columns)
        if self.grads:
            p.grad = (torch.zeros_like(p) if p.grad is None else p.grad).index_add_(0, ids, delta)

    def _keep_columns(self, a: Tensor, delta: Tensor, rows: Segments) -> None:
        """Keep of a tied head's Δ_12 the columns that the embedding's gradient will meet."""
        for i, (a_i, delta_i) in enumerate(
            zip(torch.split(a, [*rows.lengths]), torch.split(delta, [*rows.lengths]), strict=True)
        ):
            self._head.setdefault(rows.first + i, []).append((a_i, delta_i[:, rows.ids[i]]))


class _Gathered:
    """The factors of one parameter's gradient, from the pieces that have arrived; the rows of all examples in the end."""

    def __init__(self) -> None:
        self.factors: list[tuple[Tensor, Tensor]] = []
        self.lengths: list[int] = []
        self.places: list[int] = []  # of the examples in the result

    def add(self, x: Tensor, y: Tensor, rows: Segments) -> None:
        self.factors.append((x, y))
        self.lengths += rows.lengths
        self.places += range(rows.first, rows.here.stop)

    def joined(self) -> tuple[Tensor, Tensor]:
        x, y = zip(*self.factors, strict=True)
        return torch.cat(x), torch.cat(y)


class ExamplePairs(ExampleGradients):
    """⟨∂_i, ∂_j⟩ of all pairs. A parameter's factors are kept until those of all examples have arrived."""

    together = True

    def begin(self, pieces: Sequence[Piece], n_examples: int, n_targets: int, tied: nn.Parameter | None) -> None:
        super().begin(pieces, n_examples, n_targets, tied)
        self.inner = torch.zeros(n_examples, n_examples, dtype=torch.float64, device=CPU)
        self._products: dict[nn.Parameter, _Gathered] = {}
        self._sums: dict[nn.Parameter, _Gathered] = {}
        self._tables: dict[nn.Parameter, _Gathered] = {}

    def result(self) -> Tensor:
        """(B, B) inner products, float64"""
        return self.inner * self.scale[:, None] * self.scale

    def product(self, p: nn.Parameter, a: Tensor, delta: Tensor, rows: Segments, in_out: bool) -> None:
        gathered = self._gather(self._products, p, a, delta.clone(), rows)  # the logits' buffer is used again
        if gathered is not None and p is not self.tied:
            self._add(per_example.products(*gathered.joined(), gathered.lengths), gathered)
            del self._products[p]

    def sums(self, p: nn.Parameter, x: Tensor, rows: Segments) -> None:
        added = per_example.sums(x, rows.lengths)
        gathered = self._gather(self._sums, p, added, added, rows)
        if gathered is not None:
            self._add(per_example.inner(*gathered.joined()), gathered)
            del self._sums[p]

    def look_up(self, p: nn.Parameter, delta: Tensor, ids: Tensor, rows: Segments) -> None:
        gathered = self._gather(self._tables, p, delta, ids, rows)
        if gathered is None:
            return
        delta, ids = gathered.joined()
        self._add(per_example.table_products(delta, ids, gathered.lengths), gathered)
        if p is self.tied:  # ⟨E_i + H_i, E_j + H_j⟩ = ⟨E_i, E_j⟩ + ⟨H_i, H_j⟩ + ⟨E_i, H_j⟩ + ⟨H_i, E_j⟩
            head = self._products.pop(p)
            a, signal = head.joined()
            self._add(per_example.products(a, signal, head.lengths), head)
            met = per_example.table_head_products(delta, ids, gathered.lengths, a, signal, head.lengths)
            self._add(met + met.t(), gathered)

    def _gather(
        self, found: dict[nn.Parameter, _Gathered], p: nn.Parameter, x: Tensor, y: Tensor, rows: Segments
    ) -> _Gathered | None:
        """Add a piece's factors; return all of them if they are complete."""
        gathered = found.setdefault(p, _Gathered())
        gathered.add(x, y, rows)
        return gathered if len(gathered.places) == self.expected else None

    def _add(self, value: Tensor, gathered: _Gathered) -> None:
        places = torch.tensor(gathered.places, device=CPU)
        self.inner[places[:, None], places] += value.to(CPU)


class ExamplesAgainst(ExampleGradients):
    """⟨∂_i, Q_k⟩ with given gradients: Q_k of parameter p is the row k of gradients[p], (K, *p.shape)."""

    def __init__(self, gradients: Mapping[nn.Parameter, Tensor]):
        self.gradients = gradients

    def begin(self, pieces: Sequence[Piece], n_examples: int, n_targets: int, tied: nn.Parameter | None) -> None:
        super().begin(pieces, n_examples, n_targets, tied)
        (count,) = {len(q) for q in self.gradients.values()}
        self.inner = torch.zeros(n_examples, count, dtype=torch.float64, device=CPU)

    def result(self) -> Tensor:
        """(B, K) inner products, float64"""
        return self.inner * self.scale[:, None]

    def product(self, p: nn.Parameter, a: Tensor, delta: Tensor, rows: Segments, in_out: bool) -> None:
        q = self.gradients[p]
        found = per_example.products_with(a, delta, q if in_out else q.transpose(1, 2), rows.lengths)
        self.inner[rows.here] += found.cpu()

    def sums(self, p: nn.Parameter, x: Tensor, rows: Segments) -> None:
        self.inner[rows.here] += per_example.inner(
            per_example.sums(x, rows.lengths), self.gradients[p].flatten(1)
        ).cpu()

    def look_up(self, p: nn.Parameter, delta: Tensor, ids: Tensor, rows: Segments) -> None:
        """The uses of a tied matrix add up: ⟨E_i + H_i, Q⟩ has no cross term."""
        for k, q in enumerate(self.gradients[p]):
            along = torch.linalg.vecdot(delta, q[ids], dim=1)
            self.inner[rows.here, k] += per_example.sums(along.double(), rows.lengths).cpu()


class Several(ExampleGradients):
    """Several measurements in one pass."""

    def __init__(self, *parts: ExampleNorms | ExamplePairs | ExamplesAgainst):
        self.parts = parts
        self.together = any(part.together for part in parts)
        self.needs_losses = any(part.needs_losses for part in parts)

    def begin(self, pieces: Sequence[Piece], n_examples: int, n_targets: int, tied: nn.Parameter | None) -> None:
        for part in self.parts:
            part.begin(pieces, n_examples, n_targets, tied)

    def results(self) -> list[Tensor]:
        return [part.result() for part in self.parts]

    def row_losses(self, x: Tensor, rows: Segments) -> None:
        for part in self.parts:
            part.row_losses(x, rows)

    def product(self, p: nn.Parameter, a: Tensor, delta: Tensor, rows: Segments, in_out: bool) -> None:
        for part in self.parts:
            part.product(p, a, delta, rows, in_out)

    def sums(self, p: nn.Parameter, x: Tensor, rows: Segments) -> None:
        for part in self.parts:
            part.sums(p, x, rows)

    def look_up(self, p: nn.Parameter, delta: Tensor, ids: Tensor, rows: Segments) -> None:
        for part in self.parts:
            part.look_up(p, delta, ids, rows)


class PieceExamples:
    """The examples of one piece, as layers see them: a call finds its examples' rows by their number."""

    def __init__(self, gradients: ExampleGradients, piece: Piece):
        ids = torch.split(piece.ids, [*piece.lengths])
        self.gradients = gradients
        self.every_row = Segments(piece.first, piece.lengths, ids)
        self.target_rows = Segments(piece.first, piece.counts(), ids)

    def product(self, p: nn.Parameter, a: Tensor, delta: Tensor, in_out: bool = True) -> None:
        self.gradients.product(p, a, delta, self._rows(len(a)), in_out)

    def losses(self, x: Tensor) -> None:
        self.gradients.row_losses(x, self.target_rows)

    def sums(self, p: nn.Parameter, x: Tensor) -> None:
        self.gradients.sums(p, x.to(p.dtype), self._rows(len(x)))

    def look_up(self, p: nn.Parameter, delta: Tensor, ids: Tensor) -> None:
        self.gradients.look_up(p, delta, ids, self._rows(len(ids)))

    def groups(self, most: int) -> list[tuple[slice, "PieceExamples"]]:
        """Rows with a target in groups of complete examples, at most `most` rows each unless a single example has more."""
        first, counts, ids = self.target_rows
        groups: list[tuple[slice, PieceExamples]] = []
        begin = start = 0  # example, row
        while begin < len(counts):
            end, stop = begin + 1, start + counts[begin]
            while end < len(counts) and (stop + counts[end] - start <= most or not counts[end]):
                stop += counts[end]
                end += 1
            group = self._with(Segments(first + begin, counts[begin:end], ids[begin:end]))
            groups.append((slice(start, stop), group))
            begin, start = end, stop
        return groups

    def of_rows(self, rows: Tensor, n: int) -> "PieceExamples":
        """The same examples with some of the n rows, in order: those that go to one expert."""
        first, lengths, ids = self._rows(n)
        owner = torch.repeat_interleave(torch.tensor(lengths, device=rows.device))
        counts = torch.bincount(owner[rows], minlength=len(lengths)).tolist()
        return self._with(Segments(first, tuple(counts), ids))

    def _with(self, segments: Segments) -> "PieceExamples":
        """The same measurement of other rows."""
        found = object.__new__(PieceExamples)
        found.gradients, found.every_row, found.target_rows = self.gradients, segments, segments
        return found

    def _rows(self, n: int) -> Segments:
        """All rows, or those with a target: the last block continues with these alone."""
        return self.every_row if n == sum(self.every_row.lengths) else self.target_rows

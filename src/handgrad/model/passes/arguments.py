"""`Pass`: the arguments of a block besides its input, the same in the forward and in the backward pass; and `Observer`,
which sees every tensor of a pass and may replace it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import HandgradError
from ...kernels.calls import Scores
from ...ops.attention import Saved, Spans
from ..storage.weights import STORED, Weights

if TYPE_CHECKING:
    from .example_gradients import PieceExamples
    from .router_losses import RouterLosses

Rows = slice | Tensor  # rows of the stream
Rotations = tuple[tuple[Tensor, Tensor], ...]  # cos and sin (n, w/2) of every token's position, in the model's tables
Record = Callable[[str, Tensor], object]  # called with the paper's name of a tensor and the tensor


class Observer:
    """Sees the tensors of a pass as soon as they are computed, each under the paper's name: blocks.0.a_4, delta_11.

    edits   Whether `at` may return another tensor than it was given. Then ρ is a matrix, and nothing is computed again in
            the backward pass, so that every tensor has one place where it can be replaced.
    """

    edits = False

    def at(self, name: str, x: Tensor) -> Tensor:
        """Return the tensor to go on with."""
        self.note(name, x)
        return x

    def note(self, name: str, x: Tensor) -> None:
        """See a tensor that nothing else is computed from: the statistics of a norm, or ρ where it is not a matrix."""


class Recorder(Observer):
    """Calls a function with every name and tensor."""

    def __init__(self, record: Record):
        self.record = record

    def note(self, name: str, x: Tensor) -> None:
        self.record(name, x)


class Unedited(Observer):
    """Raises if the observer changes a tensor in place: the pass would go on with it. Tensors of torch.inference_mode do not
    count their changes, so there it cannot tell."""

    def __init__(self, observer: Observer):
        self.observer = observer

    def at(self, name: str, x: Tensor) -> Tensor:
        seen: Tensor = self._checked(self.observer.at, name, x)
        return seen

    def note(self, name: str, x: Tensor) -> None:
        self._checked(self.observer.note, name, x)

    def _checked(self, see: Callable[[str, Tensor], Any], name: str, x: Tensor) -> Any:
        before = None if x.is_inference() else x._version
        seen = see(name, x)
        if before is not None and x._version != before:
            raise HandgradError(f"{name} was changed in place by its recorder: change a clone, or use hg.trace(edit=…)")
        return seen


class Within(Observer):
    """Adds a prefix to the names: those of one block."""

    def __init__(self, observer: Observer, prefix: str):
        self.observer, self.prefix, self.edits = observer, prefix, observer.edits

    def at(self, name: str, x: Tensor) -> Tensor:
        return self.observer.at(self.prefix + name, x)

    def note(self, name: str, x: Tensor) -> None:
        self.observer.note(self.prefix + name, x)


class BlockCache(Protocol):
    """What generation stores of one block: keys and values, or the last rows that a short convolution reads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None) -> Saved:
        """Append the keys and values of new tokens, and return the heads' output for their queries."""

    def continued(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """New rows of a convolution's input → those with the rows that each sequence has before them, and their places."""


class Pass(NamedTuple):
    """One piece of the batch in one block."""

    spans: Spans = ()  # where the sequences lie, for attention
    query_rows: Tensor | None = None  # (m) rows that are needed after the keys and values; None: all
    input_signal: bool = True  # False in the lowest trained block: Δ_1 is not needed
    dropout_seed: int | None = None  # of the adapters' dropout; None: no dropout
    observer: Observer | None = None
    rotations: Rotations = ()
    weights: Weights = STORED  # the matrices of the layers: see Network.weights
    operand: torch.dtype | None = (
        None  # of what products read, if it is not the dtype of everything else: mixed precision
    )
    cache: BlockCache | None = None  # generation: earlier keys and values
    adapters: tuple[tuple[str, Rows], ...] = ()  # of several named adapters: the rows of each
    examples: "PieceExamples | None" = (
        None  # receives the factors of the gradients, if examples are measured one by one
    )
    dropout_rows: tuple[int, int] | None = None  # first row of the input, and how many rows share its mask
    routers: "RouterLosses | None" = None  # counts the rows of a mixture's router, and adds its losses to Δ_s

    def at(self, name: str, x: Tensor) -> Tensor:
        """Show a tensor to the observer, if there is one, and return the tensor to go on with."""
        if self.observer is None:
            return x
        seen = self.observer.at(name, x)
        if seen is not x and not self.observer.edits:  # what is computed again in the backward pass would be another
            raise HandgradError(f"an observer that replaces tensors, such as {name}, must say so: edits = True")
        return seen

    def note_statistics(self, statistics: Callable[[Any], dict[str, Tensor]], saved: Any, number: str) -> None:
        """Show the statistics of a norm to the observer, if there is one: mu_1, sigma_1, a_bar_1."""
        if self.observer is not None:
            for name, x in statistics(saved).items():
                self.observer.note(f"{name}_{number}", x)

    def of_rows(self, rows: Tensor, n: int) -> "Pass":
        """The pass of these rows of n, for a part of a layer: without the observer, to whom the layer shows tensors."""
        adapters = []
        for name, its in self.adapters:
            found = torch.zeros(n, dtype=torch.bool, device=rows.device)
            found[its] = True
            if len(where := found[rows].nonzero()[:, 0]):
                adapters.append((name, where))
        examples = None if self.examples is None else self.examples.of_rows(rows, n)
        return self._replace(observer=None, adapters=tuple(adapters), examples=examples)

    @property
    def rounded(self) -> bool:
        """Whether products round their operands: mixed precision."""
        return self.operand is not None

    @property
    def edited(self) -> bool:
        """Whether the observer may replace tensors."""
        return self.observer is not None and self.observer.edits

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the sequences."""
        assert self.query_rows is None  # spans leave out sequences without a query
        return tuple(length for span in self.spans for length in (span.length,) * span.sequences)

    def key_rotation(self, table: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the keys' positions."""
        return self.rotations[table]

    def query_rotation(self, table: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the queries' positions."""
        cos, sin = self.key_rotation(table)
        return (cos, sin) if self.query_rows is None else (cos[self.query_rows], sin[self.query_rows])


PLAIN = Pass()  # no dropout, no observer, weights as they are stored

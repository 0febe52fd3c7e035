"""`Pass`: the arguments of a block besides its input, the same in the forward and in the backward pass."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from ..ops.attention import Saved, Spans

if TYPE_CHECKING:
    from .example_gradients import PieceExamples

Rows = slice | Tensor  # rows of the stream
Record = Callable[[str, Tensor], None]  # called with the paper's name of a tensor and the tensor


def no_record(name: str, value: Tensor) -> None:
    """Default recorder: do nothing."""


class BlockCache(Protocol):
    """The keys and values of one block that generation stores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Saved:
        """Append the keys and values of new tokens, and return the heads' output for their queries."""


class Pass(NamedTuple):
    """One piece of the batch in one block. A recorder observes; it never changes what is computed."""

    spans: Spans = ()  # where the sequences lie, for attention
    query_rows: Tensor | None = None  # (m) rows that are needed after the keys and values; None: all
    input_signal: bool = True  # False in the lowest trained block: Δ_1 is not needed
    dropout_seed: int | None = None  # of the adapters' dropout; None: no dropout
    record: Record = no_record
    rotation: tuple[Tensor, Tensor] | None = None  # cos and sin (n, d_ρ/2) of every token's position
    cache: BlockCache | None = None  # generation: earlier keys and values
    adapters: tuple[tuple[str, Rows], ...] = ()  # of several named adapters: the rows of each
    examples: "PieceExamples | None" = (
        None  # receives the factors of the gradients, if examples are measured one by one
    )
    dropout_rows: tuple[int, int] | None = None  # first row of the input, and how many rows share its mask

    @property
    def recording(self) -> bool:
        return self.record is not no_record

    def key_rotation(self) -> tuple[Tensor, Tensor]:
        """cos and sin of the keys' positions."""
        assert self.rotation is not None
        return self.rotation

    def query_rotation(self) -> tuple[Tensor, Tensor]:
        """cos and sin of the queries' positions."""
        cos, sin = self.key_rotation()
        return (cos, sin) if self.query_rows is None else (cos[self.query_rows], sin[self.query_rows])


PLAIN = Pass()  # no dropout, no recorder

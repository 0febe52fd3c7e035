"""`Pass`: the arguments of a block besides its input, the same in the forward and in the backward pass."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..ops.attention import Spans

Record = Callable[[str, Tensor], None]  # called with the paper's name of a tensor and the tensor


def no_record(name: str, value: Tensor) -> None:
    """Default recorder: do nothing."""


class Pass(NamedTuple):
    """One piece of the batch on its way through one block. A recorder observes; it never changes what is computed."""

    spans: Spans = ()  # where the sequences lie, for attention
    query_rows: Tensor | None = None  # (m) rows that are needed after the keys and values; None: all
    input_signal: bool = True  # False in the lowest trained block: Δ_1 is not needed
    dropout_seed: int | None = None  # of the adapters' dropout; None: no dropout
    record: Record = no_record

    @property
    def recording(self) -> bool:
        return self.record is not no_record


PLAIN = Pass()  # no dropout, no recorder

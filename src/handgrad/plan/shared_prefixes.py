"""What a run computes once for several examples: prefixes that those of a batch have in common."""

from collections.abc import Sequence
from typing import NamedTuple

from ..formatting import percent
from ..model.config import ModelConfig
from ..model.passes.batch import Piece
from ..ops.attention import spans_of
from .flop import Work, flop
from .parameters import Ranks

LEAST_SAVED = 0.01  # of the tokens, for a line about it


class Sharing(NamedTuple):
    """Sizes of some training steps in which common prefixes are computed once."""

    tokens: int  # that the steps read
    computed: int
    largest_step: int  # its computed tokens
    largest_piece: int
    keys: int  # rows of keys that attention reads in a piece: a prefix again for every branch
    flop: tuple[int, int]  # of a mean step, forward and backward

    @property
    def saved(self) -> float:
        """The share of the tokens that is not computed."""
        return 1 - self.computed / self.tokens

    def __str__(self) -> str:
        return (
            f"{percent(self.saved)} of the tokens are prefixes that examples of a batch have in common, computed once"
        )


def sharing_of(
    steps: Sequence[Sequence[Piece]], tokens: int, config: ModelConfig, ranks: Ranks, recompute: str
) -> Sharing | None:
    """Count the pieces of these steps, which read so many tokens; None if hardly any prefix is common."""
    pieces = [piece for step in steps for piece in step]
    sizes = [sum(len(piece.ids) for piece in step) for step in steps]
    if tokens - sum(sizes) < LEAST_SAVED * tokens or not any(piece.parents for piece in pieces):
        return None
    forward, backward = flop(config, Work.of_pieces(pieces, config), ranks, recompute)
    return Sharing(
        tokens, sum(sizes), max(sizes), max(len(piece.ids) for piece in pieces), max(map(_keys, pieces)),
        (forward // len(steps), backward // len(steps)),
    )  # fmt: skip


def _keys(piece: Piece) -> int:
    spans = spans_of(piece.lengths, None, piece.parents)
    return sum(rows.stop - rows.start for x in spans for rows in (*x.before, x.keys))

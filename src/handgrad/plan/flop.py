"""FLOP of a step's matrix products; a multiply-add counts as two."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.config import ModelConfig
from ..model.names import block_of, without_block
from ..model.passes.batch import Piece
from ..ops.loss import NO_TARGET
from .outline import LinearLayer, layers_of_block
from .parameters import Ranks

Pairs = dict[int | None, int]  # (query, key) pairs of a block by its window; None: no window


@dataclass(frozen=True)
class Work:
    """The sizes of a batch that determine its FLOP."""

    tokens: int
    rows: int  # tokens with a target: the last block and the head compute only these
    pairs: Pairs
    row_pairs: Pairs  # whose query has a target
    read_again: int = 0  # by the head: a row of a common prefix has the targets of several sequences

    @staticmethod
    def of(length: int, config: ModelConfig, rows: int | None = None) -> "Work":
        """The work of a sequence of which every token has a target, or the last `rows`."""
        targets = torch.zeros(1, length)
        targets[:, : length - (length if rows is None else rows)] = NO_TARGET
        return Work.of_batch(targets, None, config)

    def times(self, n: int) -> "Work":
        """The work of n such batches."""
        pairs, row_pairs = ({window: n * x for window, x in y.items()} for y in (self.pairs, self.row_pairs))
        return Work(n * self.tokens, n * self.rows, pairs, row_pairs, n * self.read_again)

    @staticmethod
    def of_batch(targets: Tensor, lengths: Sequence[int] | None, config: ModelConfig) -> "Work":
        """The work of a batch with targets (B, T), or (n) with `lengths`; −100 is no target."""
        sizes = torch.tensor(len(targets) * [targets.shape[1]] if lengths is None else list(lengths))
        ends = sizes.cumsum(0).repeat_interleave(sizes)
        length = sizes.repeat_interleave(sizes)
        keys = torch.arange(len(length)) - ends + length + 1 if config.causal else length
        has_target = targets.reshape(-1).cpu() != NO_TARGET
        pairs, row_pairs = {}, {}
        for window in {config.window_of(i) for i in range(config.n_blocks)}:
            seen = keys if window is None else keys.clamp(max=window)
            pairs[window], row_pairs[window] = int(seen.sum()), int(seen[has_target].sum())
        return Work(len(length), int(has_target.sum()), pairs, row_pairs)

    @staticmethod
    def of_pieces(pieces: Sequence[Piece], config: ModelConfig) -> "Work":
        """The work of pieces, in which common prefixes are computed once."""
        needed = [piece.needed for piece in pieces]
        keys = torch.cat([piece.positions for piece in pieces]) + 1
        of_rows = torch.cat([piece.positions[rows] for piece, rows in zip(pieces, needed, strict=True)]) + 1
        windows = {config.window_of(i) for i in range(config.n_blocks)}
        pairs, row_pairs = (
            {w: int((seen if w is None else seen.clamp(max=w)).sum()) for w in windows} for seen in (keys, of_rows)
        )
        targets = sum(len(piece.targets) for piece in pieces)
        return Work(len(keys), len(of_rows), pairs, row_pairs, targets - len(of_rows))


def flop(config: ModelConfig, work: Work, ranks: Ranks, recompute: str = "none") -> tuple[int, int]:
    """FLOP of the forward and of the backward pass. Skipped work is not counted: weight gradients of frozen layers, the
    backward pass below the lowest trainable layer, and rows without a target in the last block. What adapters compute
    twice to save memory counts once."""
    c, last, head = config, config.n_blocks - 1, config.table.names["head"]
    layers = [layers_of_block(c, i) for i in range(c.n_blocks)]
    in_block = [[x for name, x in own.items() if name != head and x.part_of is None] for own in layers]
    adapted = [(layers[block_of(name) or 0][without_block(name)], block_of(name), rank) for name, rank in ranks.items()]
    lowest = min((i for _, i, _ in adapted if i is not None), default=c.n_blocks) if ranks else 0
    scores = c.n_heads * (c.query_width + c.value_width)  # q kᵗ and ρ v
    signals = c.n_heads * (3 * c.query_width + 2 * c.value_width)  # q kᵗ again, Δ vᵗ, ρᵗ Δ, Δ_raw k and Δ_rawᵗ q

    def rows(layer: LinearLayer, i: int | None) -> int:
        """Rows that a layer of block i computes, or the head."""
        if i is None:
            return work.rows + work.read_again
        return work.tokens if layer.every_row or i < last else work.rows

    def blocks(first: int, per_pair: int) -> int:
        """Multiply-adds of the blocks from `first` on."""
        if first > last:
            return 0
        total, every = 0, not c.leaves_rows_out(last)
        for i in range(first, last + 1):
            pairs = 0 if i in c.conv_blocks else (work.pairs if i < last or every else work.row_pairs)[c.window_of(i)]
            total += sum(rows(layer, i) * layer.products for layer in in_block[i]) + per_pair * pairs
        return total

    of_head = (work.rows + work.read_again) * layers[0][head].products
    branches = [rows(layer, i) * rank * (layer.f_in + layer.f_out) for layer, i, rank in adapted]  # a d, then (a d) u
    forward = blocks(0, scores) + of_head + sum(branches)
    # Δ wᵗ costs as much as a w, and so does aᵗ Δ of a trainable weight. A branch has Δ uᵗ, (Δ uᵗ) dᵗ and two gradients.
    backward = blocks(lowest, signals) + of_head + 2 * sum(branches)
    if not ranks:
        backward += blocks(lowest, 0) + of_head
    elif lowest <= last:
        # no layer below the lowest q, k and v, or what is parallel to them, needs their error signal
        backward -= sum(rows(layer, lowest) * layer.products for layer in in_block[lowest] if layer.reads_first)
        unneeded = ((layer, rank) for layer, i, rank in adapted if i == lowest and layer.reads_first)
        backward -= sum(rows(layer, lowest) * rank * layer.f_in for layer, rank in unneeded)
    if recompute == "blocks":
        in_blocks = (x for x, (_, i, _) in zip(branches, adapted, strict=True) if i is not None)
        backward += blocks(lowest, scores) + sum(in_blocks)
    return 2 * forward, 2 * backward

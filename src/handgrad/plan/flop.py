"""FLOP of a step's matrix products; a multiply-add counts as two."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..model.config import ModelConfig
from ..model.names import block_of
from .parameters import Ranks, linear_shapes, target_of


@dataclass(frozen=True)
class Work:
    """The sizes of a batch that determine its FLOP."""

    tokens: int
    rows: int  # tokens with a target: the last block and the head compute only these
    pairs: int  # (query, key) pairs
    row_pairs: int  # pairs whose query has a target

    @staticmethod
    def of(length: int, causal: bool = True) -> "Work":
        """The work of a sequence in which every token has a target."""
        pairs = length * (length + 1) // 2 if causal else length * length
        return Work(length, length, pairs, pairs)

    def times(self, n: int) -> "Work":
        """The work of n such batches."""
        return Work(n * self.tokens, n * self.rows, n * self.pairs, n * self.row_pairs)

    @staticmethod
    def of_batch(targets: Tensor, lengths: Sequence[int] | None, causal: bool = True) -> "Work":
        """The work of a batch with targets (B, T), or (n) with `lengths`; −100 is no target."""
        sizes = torch.tensor(len(targets) * [targets.shape[1]] if lengths is None else list(lengths))
        ends = sizes.cumsum(0).repeat_interleave(sizes)
        length = sizes.repeat_interleave(sizes)
        seen = torch.arange(len(length)) - ends + length + 1 if causal else length
        has_target = targets.reshape(-1).cpu() != -100
        return Work(len(length), int(has_target.sum()), int(seen.sum()), int(seen[has_target].sum()))


def flop(config: ModelConfig, work: Work, ranks: Ranks, recompute: str = "none") -> tuple[int, int]:
    """FLOP of the forward and of the backward pass. Skipped work is not counted: weight gradients of frozen layers, the
    backward pass below the lowest trainable layer, and rows without a target in the last block. What adapters compute
    twice to save memory counts once."""
    c, shapes = config, linear_shapes(config)
    lowest = min((i for name in ranks if (i := block_of(name)) is not None), default=c.n_blocks) if ranks else 0
    visited = c.n_blocks - lowest  # blocks in the backward pass
    full, after = prod(shapes["c_attn"]), sum(prod(shapes[t]) for t in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"))
    scores = c.n_heads * (c.query_width + c.value_width)  # q kᵗ and ρ v
    signals = c.n_heads * (3 * c.query_width + 2 * c.value_width)  # q kᵗ again, Δ vᵗ, ρᵗ Δ, Δ_raw k and Δ_rawᵗ q

    def blocks(count: int, per_pair: int) -> int:
        """Multiply-adds of the last `count` blocks."""
        if not count:
            return 0
        inner = (count - 1) * (work.tokens * (full + after) + per_pair * work.pairs)
        return inner + work.tokens * full + work.rows * after + per_pair * work.row_pairs

    def branch(name: str, rank: int) -> int:
        """a d, then (a d) u"""
        only_targets = name == "lm_head" or (
            block_of(name) == c.n_blocks - 1 and target_of(name) not in ("c_attn", "q", "k", "v")
        )
        return (work.rows if only_targets else work.tokens) * rank * sum(shapes[target_of(name)])

    head = work.rows * prod(shapes["lm_head"])
    branches = sum(branch(name, rank) for name, rank in ranks.items())
    of_blocks = branches - (branch("lm_head", ranks["lm_head"]) if "lm_head" in ranks else 0)
    forward = blocks(c.n_blocks, scores) + head + branches
    # Δ wᵗ costs as much as a w, and so does aᵗ Δ of a trainable weight. A branch has Δ uᵗ, (Δ uᵗ) dᵗ and two gradients.
    backward = blocks(visited, signals) + head + 2 * branches
    if not ranks:
        backward += blocks(visited, 0) + head
    elif visited:
        # no layer below the lowest c_attn needs its error signal
        backward -= work.tokens * (full + ranks.get(f"{c.table.names['blocks']}.{lowest}.attn.c_attn", 0) * c.d_model)
    if recompute == "blocks":
        backward += blocks(visited, scores) + of_blocks
    return 2 * forward, 2 * backward

"""FLOP of a step's matrix products, two for each multiply-add."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..model.config import GPTConfig
from .parameters import Ranks, block_of, linear_shapes, target_of


@dataclass(frozen=True)
class Work:
    """What a batch consists of, as far as its cost goes."""

    tokens: int
    rows: int  # tokens that have a target: in the last block and the head only these are computed
    pairs: int  # of a token and one it attends to
    row_pairs: int  # those whose query has a target

    @staticmethod
    def of(lengths: Sequence[int], causal: bool = True) -> "Work":
        """Sequences of these lengths; every token has a target."""
        pairs = sum(t * (t + 1) // 2 if causal else t * t for t in lengths)
        return Work(sum(lengths), sum(lengths), pairs, pairs)

    @staticmethod
    def of_batch(targets: Tensor, lengths: Sequence[int] | None, causal: bool = True) -> "Work":
        """Of targets (B, T), or (n) with the lengths of the sequences; −100 is none."""
        sizes = torch.tensor(len(targets) * [targets.shape[1]] if lengths is None else list(lengths))
        ends = sizes.cumsum(0).repeat_interleave(sizes)
        length = sizes.repeat_interleave(sizes)
        seen = torch.arange(len(length)) - ends + length + 1 if causal else length
        asked = targets.reshape(-1).cpu() != -100
        return Work(len(length), int(asked.sum()), int(seen.sum()), int(seen[asked].sum()))


def flop(config: GPTConfig, work: Work, ranks: Ranks, recompute: str = "none") -> tuple[int, int]:
    """FLOP of the forward and of the backward pass, without what is skipped: weight gradients of frozen layers, all that
    lies below the lowest trainable layer, and in the last block rows without a target. What adapters compute twice to
    save memory counts once."""
    c, shapes = config, linear_shapes(config)
    lowest = min((i for name in ranks if (i := block_of(name)) is not None), default=c.n_blocks) if ranks else 0
    walked = c.n_blocks - lowest  # blocks of the backward pass
    full, after = prod(shapes["c_attn"]), sum(prod(shapes[t]) for t in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"))
    scores = c.n_heads * (c.query_width + c.value_width)  # q kᵗ and ρ v
    signals = c.n_heads * (3 * c.query_width + 2 * c.value_width)  # q kᵗ again, Δ vᵗ, ρᵗ Δ, Δ_raw k and Δ_rawᵗ q

    def blocks(count: int, per_pair: int) -> int:
        """Products of the last `count` blocks."""
        if not count:
            return 0
        inner = (count - 1) * (work.tokens * (full + after) + per_pair * work.pairs)
        return inner + work.tokens * full + work.rows * after + per_pair * work.row_pairs

    def branch(name: str, rank: int) -> int:
        """a d, then (a d) u"""
        few = name == "lm_head" or (
            block_of(name) == c.n_blocks - 1 and target_of(name) not in ("c_attn", "q", "k", "v")
        )
        return (work.rows if few else work.tokens) * rank * sum(shapes[target_of(name)])

    head = work.rows * prod(shapes["lm_head"])
    branches = sum(branch(name, rank) for name, rank in ranks.items())
    of_blocks = branches - (branch("lm_head", ranks["lm_head"]) if "lm_head" in ranks else 0)
    forward = blocks(c.n_blocks, scores) + head + branches
    # Δ wᵗ costs what a w cost, and so does aᵗ Δ for a weight that trains. A branch has Δ uᵗ, (Δ uᵗ) dᵗ and two gradients.
    backward = blocks(walked, signals) + head + 2 * branches
    if not ranks:
        backward += blocks(walked, 0) + head
    elif walked:
        # nothing below the lowest block's c_attn needs its error signal
        backward -= work.tokens * (full + ranks.get(f"transformer.h.{lowest}.attn.c_attn", 0) * c.d_model)
    if recompute == "blocks":
        backward += blocks(walked, scores) + of_blocks
    return 2 * forward, 2 * backward

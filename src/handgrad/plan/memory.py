"""Bytes of a training step: the tensors that exist at its peak, counted from the configuration."""

from collections import Counter
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..inference.conv_state import STRIDE
from ..kernels import library
from ..model.config import ModelConfig
from ..model.layers.experts import Experts
from ..model.layers.mlp import MLP
from ..model.passes.arguments import Pass
from ..model.passes.batch import FROZEN_AT_ONCE, TOKENS_AT_ONCE, pieces_of
from ..model.passes.readout import rows_at_once
from ..ops.attention import spans_of
from .outline import KINDS, kinds_of_blocks, outline
from .parameters import parameters

WORKSPACE = 50_000_000  # bytes that torch's matmul library keeps allocated once it has multiplied large matrices
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}  # per number


@lru_cache(maxsize=32)
@torch.no_grad()
def saved_per_token(config: ModelConfig, i: int = 0, mixed: bool = False) -> float:
    """Numbers that block i saves per token, counted in a forward pass of one token on the meta device: a_1 and a_5 with
    their statistics, q, k, v, a_3, the log-sum-exp, a_7 or gate and up. In mixed precision those that products read have two
    bytes instead of four, and count half."""
    model = outline(config, i, torch.float32) if mixed else outline(config, i)
    rotations = model.rotations(torch.zeros(1, device="meta"), (1,))
    run = Pass(spans_of((1,)), rotations=rotations, operand=torch.bfloat16 if mixed else None)
    a_1 = torch.empty(1, config.d_model, device="meta", dtype=model.dtype)
    saved = model.blocks[0].forward(a_1, run)[1]
    storages = [x.untyped_storage() for x in _tensors(saved)]  # a part of a tensor keeps all of it in memory
    return sum({x._cdata: x.nbytes() for x in storages}.values()) / a_1.itemsize


def _tensors(saved: Any) -> list[Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(saved, Tensor):
        return [saved]
    return [x for part in saved or () for x in _tensors(part)]


def tokens_per_piece(batch: int, tokens: int, adapted: bool) -> int:
    """Tokens of the largest piece: complete sequences, as `GPT.loss_and_grads` groups them."""
    pieces = min(batch, pieces_of(batch * tokens, FROZEN_AT_ONCE if adapted else TOKENS_AT_ONCE))
    return -(-batch // pieces) * tokens


def saved(
    config: ModelConfig,
    batch: int,
    tokens: int,
    piece: int,
    recompute: str,
    together: bool = False,
    mixed: bool = False,
) -> float:
    """Numbers saved for the backward pass: by every block for one piece; with recompute="blocks" every block's input
    for the batch, and what one block saves for one piece. Rotary positions add cos and sin of every position. Pieces that
    are processed `together`, because weights are packed, are all saved, and so are their a_10 and Δ_10."""
    c = config
    angles = c.rotary_width_of_head * len(c.rotary_tables())
    per_token = {i: saved_per_token(c, i, mixed) for i in kinds_of_blocks(c)}
    if recompute == "blocks":
        return batch * tokens * (c.d_model * (c.n_blocks + 2) + angles) + piece * max(per_token.values())
    of_token = sum(count * per_token[i] for i, count in kinds_of_blocks(c).items()) + angles
    return batch * tokens * (of_token + 2 * c.d_model) if together else piece * of_token


def temporary(
    config: ModelConfig,
    piece: int,
    head_trains: bool,
    recompute: str = "none",
    unpacked: tuple[float, float] = (0, 0),
    mixed: bool = False,
) -> float:
    """Numbers in temporary buffers at the peak, for pieces of `piece` tokens: the logits of some rows, or a block's
    feed-forward in the backward pass (a_8, Δ_8, Δ_7 or those of gate and up, which a layer that holds both needs side by
    side), or its convolution, whichever is more, and a few copies of the residual stream. `unpacked` are the numbers of a
    block and of the head that are unpacked meanwhile. What a recomputed block saves does not exist while the logits do. In
    mixed precision a_8 and Δ_7 have two bytes."""
    rows = min(piece, rows_at_once(config.n_vocab, head_trains))
    feed_forward = max(_feed_forward(outline(config, i).blocks[0].mlp, mixed) for i in kinds_of_blocks(config))
    if config.conv_blocks:  # z, c, a_3, their error signals, and those of B, C and x twice
        feed_forward = max(feed_forward, 12 * config.d_model)
    of_block, of_head = unpacked
    recomputed = piece * max(saved_per_token(config, i, mixed) for i in kinds_of_blocks(config))
    of_head -= recomputed if recompute == "blocks" else 0
    return max(rows * config.n_vocab + of_head, piece * feed_forward + of_block) + 4 * piece * config.d_model


def _feed_forward(mlp: MLP | Experts, mixed: bool) -> float:
    """Numbers per token that exist at once in its backward pass; one expert, or the shared one, at a time."""
    if isinstance(mlp, Experts):
        parts = [*mlp.experts[:1], *([mlp.shared] if mlp.has("shared") else [])]
        return max(_feed_forward(part, mixed) for part in parts)
    signals = len(mlp.letters())
    copies = signals if len(mlp.projections()) < signals else 0
    return (1 + (1 + signals + copies) / (2 if mixed else 1)) * mlp.contract.plain().f_in


def float32_copies(config: ModelConfig) -> int:
    """Bytes of the float32 copies of the largest bfloat16 parameter and its gradient, while it is updated."""
    sizes: Counter[str] = Counter()
    for p in parameters(config):
        sizes[p.name] += p.count
    return 8 * max(sizes.values())


def workspace(config: ModelConfig, dtype: str, mixed: bool = False) -> int:
    """Bytes that matrix products keep allocated besides tensors: nothing where handgrad computes them itself."""
    if mixed:
        return 0
    if library.allowed() and library.multiplies() and library.load(getattr(torch, dtype)) is not None:
        return 0
    return min(WORKSPACE, BYTES[dtype] * config.n_vocab * config.d_model)


def largest_layer(config: ModelConfig) -> int:
    """Numbers in the gradients that exist at once when each layer is updated inside the backward pass. The gradient of a
    tied embedding exists from the first block to the last."""
    of = {
        layer: sum(p.count for p in parameters(config) if p.layer == layer) for layer in ("embedding", *KINDS, "logits")
    }
    block = max(of[kind] for kind in KINDS)
    return of["embedding"] + block if config.tied else max(of.values())


def cached_per_token(config: ModelConfig) -> int:
    """Numbers that generation stores per token: keys and values of blocks with attention, and of those with a convolution a
    share of the states that are kept after some tokens."""
    c, conv = config, len(config.conv_blocks)
    attention = (c.n_blocks - conv) * c.kv_heads * (c.query_width + c.value_width)
    return attention + -(-conv * (c.conv_taps - 1) * c.d_model // STRIDE)

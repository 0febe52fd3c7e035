"""Bytes of a training step: the tensors that exist at its peak, counted from the configuration."""

from ..model.batch import TOKENS_AT_ONCE
from ..model.config import ModelConfig
from ..model.readout import rows_at_once
from .parameters import parameters

WORKSPACE = 50_000_000  # bytes that the matmul library keeps allocated once it has multiplied large matrices
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}  # per number


def saved_per_token(config: ModelConfig) -> int:
    """Numbers that a block saves per token: a_1 and a_5 with two statistics each, q, k, v, a_3, the log-sum-exp, a_7."""
    c = config
    heads = c.n_heads * (2 * c.query_width + 2 * c.value_width + 1)
    return 2 * (c.d_model + 2) + heads + c.hidden_width


def tokens_per_piece(batch: int, tokens: int) -> int:
    """Tokens of a piece: complete sequences, about TOKENS_AT_ONCE tokens."""
    return min(batch, max(1, TOKENS_AT_ONCE // tokens)) * tokens


def saved(config: ModelConfig, batch: int, tokens: int, recompute: str) -> int:
    """Numbers saved for the backward pass: by every block for one piece; with recompute="blocks" every block's input
    for the batch, and what one block saves for one piece."""
    piece = tokens_per_piece(batch, tokens)
    if recompute == "blocks":
        return batch * tokens * config.d_model * (config.n_blocks + 2) + piece * saved_per_token(config)
    return piece * saved_per_token(config) * config.n_blocks


def temporary(config: ModelConfig, batch: int, tokens: int, head_trains: bool) -> int:
    """Numbers in temporary buffers at the peak: the logits of some rows, or a block's feed-forward in the backward pass
    (a_8, the slope, Δ_8 or Δ_7), whichever is more, and a few copies of the residual stream."""
    piece = tokens_per_piece(batch, tokens)
    rows = min(piece, rows_at_once(config.n_vocab, head_trains))
    return max(rows * config.n_vocab, piece * 3 * config.hidden_width) + 4 * piece * config.d_model


def largest_layer(config: ModelConfig) -> int:
    """Numbers in the gradients that exist at once when each layer is updated inside the backward pass. The gradient of a
    tied embedding exists from the first block to the last."""
    of = {
        layer: sum(p.count for p in parameters(config) if p.layer == layer)
        for layer in ("embedding", "block", "logits")
    }
    return of["embedding"] + of["block"] if config.tied else max(of.values())

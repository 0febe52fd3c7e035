"""Parameters, operations, bytes and seconds of a step, before it runs: arithmetic on the model's configuration.

Counts are exact. FLOP are those of the matrix products, two for each multiply-add. Bytes are those of the tensors that
must exist at the highest point of a step. Seconds are predicted in `timing.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import HandgradError
from ..model.batch import TOKENS_AT_ONCE
from ..model.config import GPTConfig
from ..model.readout import rows_at_once
from .flop import Work, flop
from .parameters import Ranks, linear_shapes, parameters, target_of, target_ranks

WORKSPACE = 50_000_000  # bytes the library of matrix products keeps for itself once it has met large matrices
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


# ── low-rank adapters ───────────────────────────────────────────────────────────────────────────────────────────────


# ── the plan ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Plan:
    """What training a model on `batch` sequences of `tokens` tokens takes."""

    config: GPTConfig
    batch: int
    tokens: int
    dtype: str
    rank: int  # the largest; 0: all weights train
    targets: tuple[str, ...]
    recompute: str

    # parameters
    per_block: int
    embedding: int
    final_norm: int
    logits: int
    total: int
    adapters: int
    trainable: int

    # floating-point operations of one step
    forward_flop: int
    backward_flop: int

    # bytes
    bytes_weights: int
    bytes_gradients: int
    bytes_optimizer: int
    bytes_saved: int
    bytes_passing: int
    bytes_cache_per_token: int

    ranks: Ranks = field(default_factory=dict, repr=False)

    @property
    def bytes_peak(self) -> int:
        """Of a whole step, at its highest point."""
        kept = self.bytes_weights + self.bytes_gradients + self.bytes_optimizer
        return kept + self.bytes_saved + self.bytes_passing


def make_plan(
    config: GPTConfig,
    batch: int = 1,
    tokens: int | None = None,
    dtype: str = "float32",
    rank: int = 0,
    targets: str | Sequence[str] = (),
    recompute: str = "none",
    update_inside: bool = False,
    *,
    ranks: Ranks | None = None,
    extra: int = 0,
) -> Plan:
    """Full training if `rank` is 0, otherwise only adapters of that rank beside `targets`. `recompute` as in
    `GPT.loss_and_grads`; `update_inside` updates a layer as soon as its gradients are final, and frees them.

    ranks   of an adapter that exists, layer by layer, in place of rank and targets
    extra   what trains of it besides the factors: magnitudes, layers kept whole
    """
    tokens = config.n_context if tokens is None else tokens
    if dtype not in BYTES:
        raise HandgradError(f"unknown dtype {dtype!r}; choose one of {', '.join(BYTES)}")
    if recompute not in ("none", "blocks"):
        raise HandgradError(f"--recompute must be none or blocks, not {recompute!r}")
    if batch < 1 or tokens < 1 or rank < 0:
        raise HandgradError("batch and tokens must be at least 1, and the rank at least 0")
    if tokens > config.n_context:
        raise HandgradError(f"{tokens} tokens do not fit into a context of {config.n_context}")
    if targets and not rank:
        raise HandgradError("targets go with adapters: give a rank of at least 1 as well")
    if ranks is None:
        ranks = target_ranks(config, rank, targets or "all-linear") if rank else {}

    sizes = parameters(config)
    of = {layer: sum(p.count for p in sizes if p.layer == layer) for layer in {p.layer for p in sizes}}
    total = of["embedding"] + config.n_blocks * of["block"] + of["final norm"] + of.get("logits", 0)
    shapes = linear_shapes(config)
    adapters = sum(r * sum(shapes[target_of(name)]) for name, r in ranks.items()) + extra
    trainable = adapters if ranks else total
    size = BYTES[dtype]
    forward, backward = flop(config, Work.of([tokens] * batch, config.causal), ranks, recompute)

    return Plan(
        config, batch, tokens, dtype, max(ranks.values(), default=0), tuple(dict.fromkeys(map(target_of, ranks))),
        recompute,
        per_block=of["block"],
        embedding=of["embedding"],
        final_norm=of["final norm"],
        logits=of.get("logits", 0),
        total=total,
        adapters=adapters,
        trainable=trainable,
        forward_flop=forward,
        backward_flop=backward,
        bytes_weights=size * (total + adapters),
        bytes_gradients=size * (_largest_layer(config) if update_inside and not ranks else trainable),
        bytes_optimizer=2 * size * trainable,
        bytes_saved=size * _saved(config, batch, tokens, recompute),
        bytes_passing=size * _passing(config, batch, tokens, not ranks or "lm_head" in ranks)
        + min(WORKSPACE, size * config.n_vocab * config.d_model),
        bytes_cache_per_token=size * config.n_blocks * config.n_heads * (config.query_width + config.value_width),
        ranks=ranks,
    )  # fmt: skip


# ── operations ──────────────────────────────────────────────────────────────────────────────────────────────────────


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def saved_per_token(config: GPTConfig) -> int:
    """Numbers a block keeps per token: a_1 and a_5 with two statistics each, q, k, v, a_3, the log-sum-exp, a_7."""
    c = config
    heads = c.n_heads * (2 * c.query_width + 2 * c.value_width + 1)
    return 2 * (c.d_model + 2) + heads + c.hidden_width


def walked_together(batch: int, tokens: int) -> int:
    """Tokens of a piece: whole sequences, about TOKENS_AT_ONCE of them."""
    return min(batch, max(1, TOKENS_AT_ONCE // tokens)) * tokens


def _saved(config: GPTConfig, batch: int, tokens: int, recompute: str) -> int:
    """Numbers kept for the way back: the blocks' save-set of one piece, or all inputs of blocks and one block's set."""
    piece = walked_together(batch, tokens)
    if recompute == "blocks":
        return batch * tokens * config.d_model * (config.n_blocks + 2) + piece * saved_per_token(config)
    return piece * saved_per_token(config) * config.n_blocks


def _passing(config: GPTConfig, batch: int, tokens: int, head_trains: bool) -> int:
    """Numbers that come and go at the highest point: the head's logits of some rows, or a block's feed-forward on its way
    back (a_8, the slope, Δ_8 or Δ_7), whichever is more, beside a few copies of the stream."""
    piece = walked_together(batch, tokens)
    rows = min(piece, rows_at_once(config.n_vocab, head_trains))
    return max(rows * config.n_vocab, piece * 3 * config.hidden_width) + 4 * piece * config.d_model


def _largest_layer(config: GPTConfig) -> int:
    """Entries of gradients that exist at once when each layer is updated in turn; a tied embedding's live all along."""
    of = {
        layer: sum(p.count for p in parameters(config) if p.layer == layer)
        for layer in ("embedding", "block", "logits")
    }
    return of["embedding"] + of["block"] if config.tied else max(of.values())

"""Parameters, operations, bytes and seconds of a step, before it runs: arithmetic on the model's configuration.

Counts are exact. FLOP are those of the matrix products, two for each multiply-add. Bytes are those of the tensors that
must exist at the highest point of a step. Seconds are predicted in `timing.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from . import lora
from .config import GPTConfig, split_names
from .errors import HandgradError
from .gpt import GPT, TOKENS_AT_ONCE, rows_at_once

WORKSPACE = 50_000_000  # bytes the library of matrix products keeps for itself once it has met large matrices
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model."""

    layer: str  # "embedding", "block", "final norm" or "logits"
    symbol: str  # the paper's
    name: str  # Hugging Face's; inside a block without the block's number
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.shape)


def parameters(config: GPTConfig) -> list[Parameter]:
    """Every tensor, with one block standing for all; the three parts of the fused c_attn are listed one by one."""
    c, d = config, config.d_model
    queries, values, hidden = c.n_heads * c.query_width, c.n_heads * c.value_width, c.hidden_width
    rows = [
        Parameter("embedding", "w_tok", "transformer.wte.weight", (c.n_vocab, d)),
        Parameter("embedding", "w_pos", "transformer.wpe.weight", (c.n_context, d)),
    ]

    def block(symbol: str, name: str, *shape: int) -> None:
        rows.append(Parameter("block", symbol, name, shape))

    block("w_1", "ln_1.weight", d)
    block("b_1", "ln_1.bias", d)
    for letter, width in (("q", queries), ("k", queries), ("v", values)):
        block(f"w_{letter}", "attn.c_attn.weight", d, width)
        if letter != "k" or c.key_bias:
            block(f"b_{letter}", "attn.c_attn.bias", width)
    block("w_3", "attn.c_proj.weight", values, d)
    block("b_3", "attn.c_proj.bias", d)
    block("w_5", "ln_2.weight", d)
    block("b_5", "ln_2.bias", d)
    block("w_6", "mlp.c_fc.weight", d, hidden)
    block("b_6", "mlp.c_fc.bias", hidden)
    block("w_8", "mlp.c_proj.weight", hidden, d)
    block("b_8", "mlp.c_proj.bias", d)
    rows.append(Parameter("final norm", "w_10", "transformer.ln_f.weight", (d,)))
    rows.append(Parameter("final norm", "b_10", "transformer.ln_f.bias", (d,)))
    if not c.tied:
        rows.append(Parameter("logits", "w_11", "lm_head.weight", (d, c.n_vocab)))
    if c.logits_bias:
        rows.append(Parameter("logits", "b_11", "lm_head.bias", (c.n_vocab,)))
    return rows


# ── low-rank adapters ───────────────────────────────────────────────────────────────────────────────────────────────

_BLOCK_TARGETS = ("c_attn", "q", "k", "v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
LORA_TARGETS = {
    "all-linear": ("c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),  # the block's matrices as the files hold them
    "paper": (
        "q",
        "k",
        "v",
        "attn.c_proj",
        "mlp.c_fc",
        "mlp.c_proj",
        "lm_head",
    ),  # Section 7: a pair for each of q, k, v
}


def linear_shapes(config: GPTConfig) -> dict[str, tuple[int, int]]:
    """(f_in, f_out) of everything an adapter can stand beside."""
    c, d = config, config.d_model
    queries, values = c.n_heads * c.query_width, c.n_heads * c.value_width
    return {
        "c_attn": (d, 2 * queries + values),
        "q": (d, queries),
        "k": (d, queries),
        "v": (d, values),
        "attn.c_proj": (values, d),
        "mlp.c_fc": (d, c.hidden_width),
        "mlp.c_proj": (c.hidden_width, d),
        "lm_head": (d, c.n_vocab),
    }


def lora_targets(targets: str) -> tuple[str, ...]:
    """'all-linear', 'paper', or names with commas."""
    chosen = LORA_TARGETS.get(targets) or tuple(dict.fromkeys(t.strip() for t in targets.split(",") if t.strip()))
    known = (*_BLOCK_TARGETS, "lm_head")
    for name in chosen:
        if name not in known:
            options = ", ".join((*LORA_TARGETS, *known))
            raise HandgradError(f"no linear layer is called {name!r}; choose from {options}")
    if not chosen:
        raise HandgradError("no target for the adapters: give all-linear, paper, or names with commas")
    if "c_attn" in chosen and {"q", "k", "v"} & set(chosen):
        raise HandgradError("c_attn is q, k and v together: name either it or them")
    return chosen


def lora_parameters(config: GPTConfig, rank: int, targets: tuple[str, ...]) -> int:
    """r (f_in + f_out) for each target, in every block; the logits layer once"""
    shapes = linear_shapes(config)
    return sum(rank * sum(shapes[t]) * (1 if t == "lm_head" else config.n_blocks) for t in targets)


Ranks = Mapping[str, int]  # rank of the adapter by the name of its layer; empty: all weights train


def target_ranks(config: GPTConfig, rank: int, targets: str | Sequence[str]) -> Ranks:
    """The layers that `targets` names, as in `lora.choose`; or as the paper counts, with adapters for q, k and v apart."""
    names = split_names([targets] if isinstance(targets, str) else targets)
    if {"paper", "q", "k", "v"} & set(names):
        chosen = lora_targets(",".join(names))
        blocks = (f"transformer.h.{i}.{t}" for i in range(config.n_blocks) for t in chosen if t != "lm_head")
        return dict.fromkeys([*blocks, *(["lm_head"] if "lm_head" in chosen else [])], rank)
    return dict.fromkeys(lora.choose(GPT(config, device="meta"), names), rank)


def block_of(name: str) -> int | None:
    """The number of the block that a layer belongs to."""
    parts = name.split(".")
    return int(parts[2]) if parts[1:2] == ["h"] else None


def target_of(name: str) -> str:
    """transformer.h.3.attn.c_attn → c_attn, transformer.h.3.mlp.c_fc → mlp.c_fc: a key of `linear_shapes`"""
    return name.partition(".h.")[2].partition(".")[2].replace("attn.c_attn", "c_attn") or name


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

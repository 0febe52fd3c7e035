"""Parameters, operations, bytes and seconds of a step, before it runs: arithmetic on the model's configuration.

Counts are exact. FLOP are those of the matrix products, two for each multiply-add. Bytes are those of the tensors that
must exist at the highest point of a step. Seconds come from two rates, measured on the machine at hand.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from .config import GPTConfig
from .errors import HandgradError
from .gpt import TOKENS_AT_ONCE, rows_at_once

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


# ── the plan ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Plan:
    """What training a model on `batch` sequences of `tokens` tokens takes."""

    config: GPTConfig
    batch: int
    tokens: int
    dtype: str
    rank: int
    targets: tuple[str, ...]

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
    targets: str = "",
    recompute: str = "none",
    update_inside: bool = False,
) -> Plan:
    """Full training if `rank` is 0, otherwise only adapters of that rank beside `targets`. `recompute` as in
    `GPT.loss_and_grads`; `update_inside` updates a layer as soon as its gradients are final, and lets them go."""
    tokens = config.n_context if tokens is None else tokens
    if dtype not in BYTES:
        raise HandgradError(f"unknown dtype {dtype!r}; choose one of {', '.join(BYTES)}")
    if batch < 1 or tokens < 1 or rank < 0:
        raise HandgradError("batch and tokens must be at least 1, and the rank at least 0")
    if tokens > config.n_context:
        raise HandgradError(f"{tokens} tokens do not fit into a context of {config.n_context}")
    if targets and not rank:
        raise HandgradError("targets go with adapters: give a rank of at least 1 as well")
    chosen = lora_targets(targets or "all-linear") if rank else ()

    sizes = parameters(config)
    of = {layer: sum(p.count for p in sizes if p.layer == layer) for layer in {p.layer for p in sizes}}
    total = of["embedding"] + config.n_blocks * of["block"] + of["final norm"] + of.get("logits", 0)
    adapters = lora_parameters(config, rank, chosen) if rank else 0
    trainable = adapters if rank else total

    n = batch * tokens
    size = BYTES[dtype]
    matrices = _matrix_multiply_adds(config, n)
    attention = _attention_multiply_adds(config, batch, tokens)
    branch = n * adapters  # a d, then (a d) u
    again = matrices - n * prod(linear_shapes(config)["lm_head"]) + attention + branch if recompute == "blocks" else 0
    # Way back: Δ wᵗ costs what a w cost, and so does aᵗ Δ for a weight that trains. Attention rebuilds its scores and
    # has four more products. A branch has Δ uᵗ, (Δ uᵗ) dᵗ and the two gradients.
    backward = (
        matrices * (1 if rank else 2) + _attention_backward_multiply_adds(config, batch, tokens) + 2 * branch + again
    )

    return Plan(
        config, batch, tokens, dtype, rank, chosen,
        per_block=of["block"],
        embedding=of["embedding"],
        final_norm=of["final norm"],
        logits=of.get("logits", 0),
        total=total,
        adapters=adapters,
        trainable=trainable,
        forward_flop=2 * (matrices + attention + branch),
        backward_flop=2 * backward,
        bytes_weights=size * (total + adapters),
        bytes_gradients=size * (_largest_layer(config) if update_inside and not rank else trainable),
        bytes_optimizer=2 * size * trainable,
        bytes_saved=size * _saved(config, batch, tokens, recompute),
        bytes_passing=size * _passing(config, batch, tokens, not rank or "lm_head" in chosen)
        + min(WORKSPACE, size * config.n_vocab * config.d_model),
        bytes_cache_per_token=size * config.n_blocks * config.n_heads * (config.query_width + config.value_width),
    )  # fmt: skip


def saved_per_token(config: GPTConfig) -> int:
    """Numbers a block keeps per token: a_1 and a_5 with two statistics each, q, k, v, a_3, the log-sum-exp, a_7."""
    c = config
    heads = c.n_heads * (2 * c.query_width + 2 * c.value_width + 1)
    return 2 * (c.d_model + 2) + heads + c.hidden_width


def _walked_together(config: GPTConfig, batch: int, tokens: int) -> int:
    """Tokens of a piece: whole sequences, about TOKENS_AT_ONCE of them."""
    return min(batch, max(1, TOKENS_AT_ONCE // tokens)) * tokens


def _saved(config: GPTConfig, batch: int, tokens: int, recompute: str) -> int:
    """Numbers kept for the way back: the blocks' save-set of one piece, or all inputs of blocks and one block's set."""
    piece = _walked_together(config, batch, tokens)
    if recompute == "blocks":
        return batch * tokens * config.d_model * (config.n_blocks + 2) + piece * saved_per_token(config)
    return piece * saved_per_token(config) * config.n_blocks


def _passing(config: GPTConfig, batch: int, tokens: int, head_trains: bool) -> int:
    """Numbers that come and go at the highest point: the head's logits of some rows, or a block's feed-forward on its way
    back (a_8, the slope, Δ_8 or Δ_7), whichever is more, beside a few copies of the stream."""
    piece = _walked_together(config, batch, tokens)
    rows = min(piece, rows_at_once(config.n_vocab, head_trains))
    return max(rows * config.n_vocab, piece * 3 * config.hidden_width) + 4 * piece * config.d_model


def _largest_layer(config: GPTConfig) -> int:
    """Entries of gradients that exist at once when each layer is updated in turn; a tied embedding's live all along."""
    of = {
        layer: sum(p.count for p in parameters(config) if p.layer == layer)
        for layer in ("embedding", "block", "logits")
    }
    return of["embedding"] + of["block"] if config.tied else max(of.values())


def _matrix_multiply_adds(config: GPTConfig, n: int) -> int:
    """Products with weights, forward: each of n tokens meets every entry of a matrix once."""
    shapes = linear_shapes(config)
    block = sum(prod(shapes[t]) for t in LORA_TARGETS["all-linear"])
    return n * (config.n_blocks * block + prod(shapes["lm_head"]))


def _visible_pairs(config: GPTConfig, batch: int, tokens: int) -> int:
    """Pairs of a token and one it may look at."""
    return batch * (tokens * (tokens + 1) // 2 if config.causal else tokens * tokens)


def _attention_multiply_adds(config: GPTConfig, batch: int, tokens: int) -> int:
    """q kᵗ and ρ v, over the pairs that can see each other"""
    widths = config.query_width + config.value_width
    return config.n_blocks * config.n_heads * widths * _visible_pairs(config, batch, tokens)


def _attention_backward_multiply_adds(config: GPTConfig, batch: int, tokens: int) -> int:
    """q kᵗ again, Δ vᵗ, ρᵗ Δ, Δ_raw k and Δ_rawᵗ q"""
    widths = 3 * config.query_width + 2 * config.value_width
    return config.n_blocks * config.n_heads * widths * _visible_pairs(config, batch, tokens)


# ── seconds ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Rates:
    """What this machine does: matrix products, and passes over memory."""

    flop_per_second: float
    bytes_per_second: float

    @staticmethod
    def measure(seconds: float = 0.5) -> "Rates":
        """Products of the size of a GPT-2 layer, and additions far larger than the cache, for about so long each."""
        far, away = torch.ones(1 << 25), torch.ones(1 << 25)
        passing = _best_of(lambda: far.add_(away), seconds)
        return Rates(product_rate(seconds), 3 * 4 * (1 << 25) / passing)

    def seconds(self, plan: Plan) -> float:
        """A step: its products at the rate of products, and AdamW's seven passes over what trains."""
        products = (plan.forward_flop + plan.backward_flop) / self.flop_per_second
        return products + 7 * BYTES[plan.dtype] * plan.trainable / self.bytes_per_second


def product_rate(seconds: float = 0.5) -> float:
    """FLOP per second of a product of the size of a GPT-2 layer."""
    a, w, out = torch.ones(1024, 768), torch.ones(768, 3072), torch.empty(1024, 3072)
    return 2 * 1024 * 768 * 3072 / _best_of(lambda: torch.mm(a, w, out=out), seconds)


def _best_of(run: Callable[[], object], seconds: float) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best

"""The parameters of a model and of its adapters, counted from the configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .. import adapters
from ..adapters.patterns import split_names
from ..errors import HandgradError
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..model.names import without_block


@dataclass(frozen=True)
class Parameter:
    """A tensor of the model."""

    layer: str  # "embedding", "block", "final norm" or "logits"
    symbol: str  # in the paper
    name: str  # in Hugging Face's files; in a block without its prefix transformer.h.N
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.shape)


def parameters(config: ModelConfig) -> list[Parameter]:
    """All tensors, those of a block listed once; the fused c_attn is listed as q, k and v."""
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


_BLOCK_TARGETS = ("c_attn", "q", "k", "v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


LORA_TARGETS = {
    "all-linear": ("c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),  # the matrices of a block, as stored
    "paper": (
        "q",
        "k",
        "v",
        "attn.c_proj",
        "mlp.c_fc",
        "mlp.c_proj",
        "lm_head",
    ),  # Section 7 has separate adapters for q, k and v
}


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(f_in, f_out) of every layer that can have an adapter."""
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
    """The layers named by "all-linear", "paper" or a comma-separated list."""
    chosen = LORA_TARGETS.get(targets) or tuple(dict.fromkeys(t.strip() for t in targets.split(",") if t.strip()))
    known = (*_BLOCK_TARGETS, "lm_head")
    for name in chosen:
        if name not in known:
            options = ", ".join((*LORA_TARGETS, *known))
            raise HandgradError(f"unknown linear layer {name!r}; available: {options}")
    if not chosen:
        raise HandgradError("no target for the adapters: give all-linear, paper, or comma-separated names")
    if "c_attn" in chosen and {"q", "k", "v"} & set(chosen):
        raise HandgradError("c_attn is q, k and v together: name c_attn or its parts, not both")
    return chosen


def lora_parameters(config: ModelConfig, rank: int, targets: tuple[str, ...]) -> int:
    """Number of parameters: r (f_in + f_out) for each target, in every block; lm_head once"""
    shapes = linear_shapes(config)
    return sum(rank * sum(shapes[t]) * (1 if t == "lm_head" else config.n_blocks) for t in targets)


Ranks = Mapping[str, int]  # rank of the adapter by layer name; empty: all weights train


def target_ranks(config: ModelConfig, rank: int, targets: str | Sequence[str]) -> Ranks:
    """The rank for every layer that `targets` names, as in `adapters.choose`, or with separate adapters for q, k and v."""
    names = split_names([targets] if isinstance(targets, str) else targets)
    if {"paper", "q", "k", "v"} & set(names):
        chosen = lora_targets(",".join(names))
        blocks = (
            f"{config.table.names['blocks']}.{i}.{t}" for i in range(config.n_blocks) for t in chosen if t != "lm_head"
        )
        return dict.fromkeys([*blocks, *(["lm_head"] if "lm_head" in chosen else [])], rank)
    return dict.fromkeys(adapters.choose(GPT(config, device="meta"), names), rank)


def target_of(name: str) -> str:
    """The key of a layer in `linear_shapes`: transformer.h.3.attn.c_attn → c_attn, transformer.h.3.mlp.c_fc → mlp.c_fc"""
    return without_block(name).replace("attn.c_attn", "c_attn")

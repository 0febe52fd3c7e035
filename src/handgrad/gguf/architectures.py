"""GGUF's architectures: what their layers are called in GGUF and in Hugging Face's files, their shapes and orders."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
_OUTPUT_BIASES = r"rope_freqs\.weight|blk\.\d+\.(attn_output|ffn_\w+)\.bias"


class Layer(NamedTuple):
    """Hugging Face's name, and the sizes of the weight in torch's order."""

    name: str
    sizes: tuple[str, ...]


_OUTER = {
    "token_embd": Layer("model.embed_tokens", ("vocab", "d")),
    "output_norm": Layer("model.norm", ("d",)),
    "output": Layer("lm_head", ("vocab", "d")),
}
_BLOCK = {
    "attn_norm": Layer("input_layernorm", ("d",)),
    "attn_q": Layer("self_attn.q_proj", ("queries", "d")),
    "attn_k": Layer("self_attn.k_proj", ("keys", "d")),
    "attn_v": Layer("self_attn.v_proj", ("keys", "d")),
    "attn_output": Layer("self_attn.o_proj", ("d", "queries")),
    "ffn_norm": Layer("post_attention_layernorm", ("d",)),
    "ffn_gate": Layer("mlp.gate_proj", ("hidden", "d")),
    "ffn_up": Layer("mlp.up_proj", ("hidden", "d")),
    "ffn_down": Layer("mlp.down_proj", ("d", "hidden")),
}
_LFM2_OUTER = {**_OUTER, "token_embd_norm": Layer("model.embedding_norm", ("d",))}
del _LFM2_OUTER["output_norm"]
_LFM2_BLOCK = {
    **_BLOCK,
    "attn_norm": Layer("operator_norm", ("d",)),
    "attn_output": Layer("self_attn.out_proj", ("d", "queries")),
    "attn_q_norm": Layer("self_attn.q_layernorm", ("head",)),
    "attn_k_norm": Layer("self_attn.k_layernorm", ("head",)),
    "shortconv.conv": Layer("conv.conv", ("d", "taps")),
    "shortconv.in_proj": Layer("conv.in_proj", ("gates", "d")),
    "shortconv.out_proj": Layer("conv.out_proj", ("d", "d")),
    "ffn_norm": Layer("ffn_norm", ("d",)),
    "ffn_gate": Layer("feed_forward.w1", ("hidden", "d")),
    "ffn_up": Layer("feed_forward.w3", ("hidden", "d")),
    "ffn_down": Layer("feed_forward.w2", ("d", "hidden")),
}
MATRICES = {  # Hugging Face's name: GGUF's
    layer.name: name
    for name, layer in [*_BLOCK.items(), *_LFM2_BLOCK.items()]
    if len(layer.sizes) == 2 and name != "shortconv.conv"
}
_QK_NORMS = {
    "attn_q_norm": Layer("self_attn.q_norm", ("head",)),
    "attn_k_norm": Layer("self_attn.k_norm", ("head",)),
}
_GPT2_OUTER = {
    "token_embd": Layer("transformer.wte", ("vocab", "d")),
    "position_embd": Layer("transformer.wpe", ("context", "d")),
    "output_norm": Layer("transformer.ln_f", ("d",)),
    "output": Layer("lm_head", ("vocab", "d")),
}
_GPT2_BLOCK = {
    "attn_norm": Layer("ln_1", ("d",)),
    "attn_qkv": Layer("attn.c_attn", ("qkv", "d")),
    "attn_output": Layer("attn.c_proj", ("d", "d")),
    "ffn_norm": Layer("ln_2", ("d",)),
    "ffn_up": Layer("mlp.c_fc", ("hidden", "d")),
    "ffn_down": Layer("mlp.c_proj", ("d", "hidden")),
}


@dataclass(frozen=True)
class Architecture:
    """What `general.architecture` names."""

    model_class: str  # the class that opens it in transformers
    block: Mapping[str, Layer]
    outer: Mapping[str, Layer] = field(default_factory=lambda: _OUTER)
    blocks: str = "model.layers"
    biases: tuple[str, ...] = ()  # layers that always have a bias
    choices: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # field of config.json → layers that then have one
    permuted: bool = False  # the rows of q and k are in the order of interleaved rotation
    transposed: tuple[str, ...] = ()  # layers whose weight is (f_in, f_out) in Hugging Face's files
    unread: str = r"rope_freqs\.weight"  # tensors with which llama.cpp does not open a file; a regular expression
    whole_width: bool = False  # llama.cpp opens it only if all heads together are as wide as the model


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", _BLOCK, permuted=True, choices={"attention_bias": _ATTENTION, "mlp_bias": _MLP}, unread="",
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM", _BLOCK, permuted=True, choices={"attention_bias": _ATTENTION, "mlp_bias": _MLP},
        unread=_OUTPUT_BIASES,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", _BLOCK, biases=_ATTENTION[:3], whole_width=True),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", _BLOCK | _QK_NORMS, choices={"attention_bias": _ATTENTION}, unread=_OUTPUT_BIASES
    ),
    "lfm2": Architecture("Lfm2ForCausalLM", _LFM2_BLOCK, _LFM2_OUTER),
    "gpt2": Architecture(
        "GPT2LMHeadModel", _GPT2_BLOCK, _GPT2_OUTER, "transformer.h", biases=("output_norm", *_GPT2_BLOCK),
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
}  # fmt: skip


def half_split_order(n: int, d_head: int) -> Tensor:
    """Indices that take n rows from the interleaved order of each head, 0 1 2 3 …, to the half-split one, 0 2 4 … 1 3 5 …"""
    return torch.arange(n).view(-1, d_head // 2, 2).transpose(1, 2).flatten()


def interleaved_order(n: int, d_head: int) -> Tensor:
    """The inverse of `half_split_order`."""
    return half_split_order(n, d_head).argsort()

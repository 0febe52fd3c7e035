"""Llama 2 and 3, SmolLM2 and TinyLlama: RMSNorm, rotary positions, a gated feed-forward layer, grouped queries."""

from collections.abc import Mapping
from typing import Any

from .family import Family

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    stored="out_in",
    names={
        "embed": "model.embed_tokens",
        "blocks": "model.layers",
        "final_norm": "model.norm",
        "head": "lm_head",
        "norm_1": "input_layernorm",
        "attn": "self_attn",
        "attn.q": "q_proj",
        "attn.k": "k_proj",
        "attn.v": "v_proj",
        "attn.out": "o_proj",
        "norm_2": "post_attention_layernorm",
        "mlp": "mlp",
        "mlp.gate": "gate_proj",
        "mlp.expand": "up_proj",
        "mlp.contract": "down_proj",
    },
    fields={
        "vocab_size": ("n_vocab",),
        "max_position_embeddings": ("n_context",),
        "hidden_size": ("d_model",),
        "num_attention_heads": ("n_heads",),
        "num_key_value_heads": ("n_kv_heads",),
        "head_dim": ("d_rho", "d_head"),
        "num_hidden_layers": ("n_blocks",),
        "intermediate_size": ("d_hidden",),
        "hidden_act": ("activation",),
        "rms_norm_eps": ("eps",),
        "tie_word_embeddings": ("tied",),
        "attention_bias": ("qkv_bias", "out_bias"),
        "mlp_bias": ("mlp_bias",),
    },
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    own_vocabulary=32000,
    fixed={"norm": "rms", "positions": "rotary", "gated": True},
    extra_tensors=r"lm_head\.weight|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",  # tables in old files
)


def without(table: Mapping[str, Any], *fields: str) -> dict[str, Any]:
    """A table without some of its fields, for a family that does not have them."""
    return {field: value for field, value in table.items() if field not in fields}

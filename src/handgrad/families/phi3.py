"""Phi-3 and Phi-4-mini: Llama without biases, with q, k and v in one matrix, and gate and up in another; a window in every
block."""

from dataclasses import replace

from .llama import LLAMA, without

_SEPARATE = ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.expand")

PHI3 = replace(
    LLAMA,
    name="phi3",
    architecture="Phi3ForCausalLM",
    names={**without(LLAMA.names, *_SEPARATE), "attn.qkv": "qkv_proj", "mlp.gate_expand": "gate_up_proj"},
    fields=without(LLAMA.fields, "attention_bias", "mlp_bias"),
    defaults={
        **without(LLAMA.defaults, "attention_bias", "mlp_bias"),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    fixed={**LLAMA.fixed, "qkv_bias": False, "out_bias": False, "mlp_bias": False},
    rotary_share=1.0,
    rope_types=("default", "longrope"),
    windows="every block",
    own_vocabulary=32064,
)

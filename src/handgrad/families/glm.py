"""GLM-4: Llama with half of every head rotated, in planes of neighboring features, and gate and up in one matrix."""

from dataclasses import replace

from .llama import LLAMA, without

GLM = replace(
    LLAMA,
    name="glm",
    architecture="GlmForCausalLM",
    names={**without(LLAMA.names, "mlp.gate", "mlp.expand"), "mlp.gate_expand": "gate_up_proj"},
    fields={**without(LLAMA.fields, "mlp_bias"), "attention_bias": ("qkv_bias",)},
    defaults={
        **without(LLAMA.defaults, "mlp_bias"),
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
    },
    fixed={**LLAMA.fixed, "mlp_bias": False, "out_bias": False, "rotary_neighbors": True},
    rotary_share=0.5,
    own_vocabulary=151_552,
)

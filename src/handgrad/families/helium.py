"""Helium: Llama whose planes of rotation are neighboring features."""

from dataclasses import replace

from .llama import LLAMA

HELIUM = replace(
    LLAMA,
    name="helium",
    architecture="HeliumForCausalLM",
    fields={**LLAMA.fields, "attention_bias": ("qkv_bias",)},
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100_000.0,
    },
    fixed={**LLAMA.fixed, "rotary_neighbors": True, "out_bias": False},
    own_vocabulary=48_000,
)

"""Seed-OSS: Llama with biases of q, k and v, and a separate switch for that of the projection."""

from dataclasses import replace

from .llama import LLAMA

SEED_OSS = replace(
    LLAMA,
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    fields={**LLAMA.fields, "attention_bias": ("qkv_bias",), "attention_out_bias": ("out_bias",)},
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
    },
)

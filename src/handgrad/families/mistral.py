"""Mistral: Llama without biases, with a sliding window in every block."""

from dataclasses import replace

from .llama import LLAMA, without

MISTRAL = replace(
    LLAMA,
    name="mistral",
    architecture="MistralForCausalLM",
    fields=without(LLAMA.fields, "attention_bias", "mlp_bias"),
    defaults={
        **without(LLAMA.defaults, "attention_bias", "mlp_bias"),
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    fixed={**LLAMA.fixed, "qkv_bias": False, "out_bias": False, "mlp_bias": False},
    windows="every block",
)

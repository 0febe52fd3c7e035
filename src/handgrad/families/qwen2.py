"""Qwen2 and Qwen2.5: Llama with biases of q, k and v, and windows that may begin at a later block."""

from dataclasses import replace

from .llama import LLAMA, without

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=without(LLAMA.fields, "attention_bias", "mlp_bias"),
    defaults={
        **without(LLAMA.defaults, "attention_bias", "mlp_bias"),
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    fixed={**LLAMA.fixed, "qkv_bias": True, "out_bias": False, "mlp_bias": False},
    windows="late blocks",
)

"""ERNIE 4.5 (dense): Llama whose planes of rotation are neighboring features, with one switch for all biases."""

from dataclasses import replace

from .llama import LLAMA, without

ERNIE4_5 = replace(
    LLAMA,
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    fields={
        **without(LLAMA.fields, "attention_bias", "mlp_bias"),
        "use_bias": ("qkv_bias", "out_bias", "mlp_bias"),
    },
    defaults={
        **without(LLAMA.defaults, "attention_bias", "mlp_bias"),
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": False,
        "rope_theta": 500_000.0,
    },
    fixed={**LLAMA.fixed, "rotary_neighbors": True},
    own_vocabulary=103_424,
)

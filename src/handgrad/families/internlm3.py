"""InternLM 3: Llama with other defaults, and other names of its biases in the first files."""

from dataclasses import replace

from .llama import LLAMA

INTERNLM3 = replace(
    LLAMA,
    name="internlm3",
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    },
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    own_vocabulary=128_512,
)

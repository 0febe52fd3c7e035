"""IQuest-Coder: Llama with other defaults."""

from dataclasses import replace

from .llama import LLAMA

IQUESTCODER = replace(
    LLAMA,
    name="iquestcoder",
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    },
    own_vocabulary=76_800,
)

"""EXAONE 4: OLMo 2 with queries and keys normalized head by head; where blocks have a window, the others are not rotated."""

from dataclasses import replace

from .llama import LLAMA, without
from .olmo2 import OLMO2

EXAONE4 = replace(
    OLMO2,
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    fields=without(LLAMA.fields, "attention_bias", "mlp_bias"),
    defaults={
        **without(LLAMA.defaults, "attention_bias", "mlp_bias"),
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
    fixed={**LLAMA.fixed, "qkv_bias": False, "out_bias": False, "mlp_bias": False, "qk_norm": True},
    windows="pattern",
    pattern=4,
    reads_pattern=True,
    unrotated="every block without a window, if there is one",
    own_vocabulary=102_400,
)

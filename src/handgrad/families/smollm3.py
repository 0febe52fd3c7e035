"""SmolLM3: Llama with blocks whose queries and keys are not rotated, every fourth unless the file lists them."""

from dataclasses import replace

from .llama import LLAMA

SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    windows="unrotated blocks",
    unrotated="listed blocks",
    own_vocabulary=128_256,
)

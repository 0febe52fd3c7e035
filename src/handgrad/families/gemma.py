"""Gemma 1: Llama with gains 1 + w and embeddings times √d."""

from dataclasses import replace

from .llama import LLAMA, without

GEMMA = replace(
    LLAMA,
    name="gemma",
    architecture="GemmaForCausalLM",
    fields=without(LLAMA.fields, "mlp_bias"),
    defaults={
        **without(LLAMA.defaults, "mlp_bias"),
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    fixed={**LLAMA.fixed, "mlp_bias": False, "gain_offset": 1.0, "embedding_scale": "√d_model"},
    no_effect=LLAMA.no_effect
    | {"hidden_activation"},  # some files have it beside hidden_act; transformers reads that one
    means={"gelu": "gelu_pytorch_tanh"},  # in the files that were published first
    own_vocabulary=256_000,
)

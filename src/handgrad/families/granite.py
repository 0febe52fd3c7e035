"""Granite 3: Llama with multipliers of embeddings, scores, branches and logits."""

from dataclasses import replace

from .llama import LLAMA, without

GRANITE = replace(
    LLAMA,
    name="granite",
    architecture="GraniteForCausalLM",
    fields={
        **without(LLAMA.fields, "head_dim"),
        "embedding_multiplier": ("embedding_scale",),
        "attention_multiplier": ("attention_scale",),
        "residual_multiplier": ("residual_scale",),
        "logits_scaling": ("logit_scale",),
    },
    forms={"logits_scaling": "1/x"},
    defaults={
        **without(LLAMA.defaults, "head_dim"),
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
)

"""HyperCLOVA X: Granite with a norm after each branch, and logits times their multiplier instead of divided by it."""

from dataclasses import replace

from .granite import GRANITE
from .llama import without

HYPERCLOVAX = replace(
    GRANITE,
    name="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    names={**GRANITE.names, "post_1": "post_norm1", "post_2": "post_norm2"},
    fields={**GRANITE.fields, "head_dim": ("d_rho", "d_head")},
    defaults={**GRANITE.defaults, "head_dim": None, "attention_multiplier": None},
    forms=without(GRANITE.forms, "logits_scaling"),
    only={**GRANITE.only, "use_post_norm": True},
)

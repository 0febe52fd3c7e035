"""Gemma 3 (text): Gemma 2 with norms of queries and keys and without caps; five of six blocks have a window, and frequencies
of their own."""

from dataclasses import replace

from .gemma2 import GEMMA2
from .llama import without

GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names={**GEMMA2.names, "attn.q_norm": "q_norm", "attn.k_norm": "k_norm"},
    fields=without(GEMMA2.fields, "attn_logit_softcapping"),
    only={"attn_logit_softcapping": None},  # transformers ignores it
    defaults={
        **without(GEMMA2.defaults, "attn_logit_softcapping"),
        "max_position_embeddings": 131_072,
        "final_logit_softcapping": None,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    fixed={**GEMMA2.fixed, "qk_norm": True},
    pattern=6,
    reads_pattern=True,
    local_rope=True,
    own_vocabulary=262_208,
)

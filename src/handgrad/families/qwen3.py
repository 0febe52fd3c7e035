"""Qwen3: Qwen2 with norms of queries and keys and a head width other than d/h; biases of attention are a choice."""

from dataclasses import replace

from .llama import LLAMA, without
from .qwen2 import QWEN2

QWEN3 = replace(
    QWEN2,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    names={**QWEN2.names, "attn.q_norm": "q_norm", "attn.k_norm": "k_norm"},
    fields=without(LLAMA.fields, "mlp_bias"),
    defaults={**QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    fixed={**LLAMA.fixed, "mlp_bias": False, "qk_norm": True},
)

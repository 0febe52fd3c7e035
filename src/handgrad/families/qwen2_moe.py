"""Qwen2-MoE: Qwen2 with a mixture of experts in some or all blocks, and a gated expert that all tokens share."""

from dataclasses import replace

from .mixtral import EXPERTS, ROUTER_LOSS
from .qwen2 import QWEN2

OF_EXPERT = {"expert.gate": "gate_proj", "expert.expand": "up_proj", "expert.contract": "down_proj"}
OF_SHARED = {"shared.gate": "gate_proj", "shared.expand": "up_proj", "shared.contract": "down_proj"}
FIELDS = {
    "num_experts": ("n_experts",),
    "num_experts_per_tok": ("experts_per_token",),
    "moe_intermediate_size": ("d_expert",),
    "norm_topk_prob": ("normalized_gates",),
}

QWEN2_MOE = replace(
    QWEN2,
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    names={
        **QWEN2.names, **EXPERTS, **OF_EXPERT, **OF_SHARED,
        "mlp.shared": "shared_expert", "mlp.shared_gate": "shared_expert_gate",
    },
    fields={**QWEN2.fields, **FIELDS, "shared_expert_intermediate_size": ("d_shared",)},
    defaults={
        **QWEN2.defaults,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        **ROUTER_LOSS,
    },
    only={"qkv_bias": True},
    windows="even early blocks",
)  # fmt: skip

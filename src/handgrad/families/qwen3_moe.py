"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all blocks."""

from dataclasses import replace

from .llama import without
from .mixtral import EXPERTS, ROUTER_LOSS
from .qwen2_moe import FIELDS, OF_EXPERT
from .qwen3 import QWEN3

QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names={**QWEN3.names, **EXPERTS, **OF_EXPERT},
    fields={**QWEN3.fields, **FIELDS},
    defaults={
        **without(QWEN3.defaults, "max_window_layers"),
        "num_key_value_heads": 4,
        "head_dim": None,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        **ROUTER_LOSS,
    },
    aliases={"num_local_experts": "num_experts"},
    no_effect=frozenset({"max_window_layers"}),
    windows="every block",
)

"""dots.llm1: Qwen3's attention with DeepSeek-V3's router: sigmoids, a bias that only chooses, groups, shared experts."""

from dataclasses import replace

from .llama import LLAMA, without
from .mixtral import EXPERTS
from .qwen2_moe import OF_EXPERT, OF_SHARED
from .qwen3 import QWEN3

DOTS1 = replace(
    QWEN3,
    name="dots1",
    architecture="Dots1ForCausalLM",
    names={**QWEN3.names, **EXPERTS, **OF_EXPERT, **OF_SHARED, "mlp.shared": "shared_experts"},
    fields={
        **without(LLAMA.fields, "mlp_bias"),
        "n_routed_experts": ("n_experts",),
        "num_experts_per_tok": ("experts_per_token",),
        "moe_intermediate_size": ("d_expert",),
        "norm_topk_prob": ("normalized_gates",),
        "routed_scaling_factor": ("gate_scale",),
        "n_group": ("expert_groups",),
        "topk_group": ("groups_per_token",),
    },
    defaults={
        **without(QWEN3.defaults, "use_sliding_window"),
        "max_position_embeddings": 2048,
        "head_dim": None,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "n_shared_experts": None,
    },
    fixed={**QWEN3.fixed, "router": "sigmoid"},
    no_effect=frozenset({"output_router_logits"}),  # transformers adds no loss of its routers
)

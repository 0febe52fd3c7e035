"""Granite 4 without state-space layers and experts: Granite 3 with gate and up in one matrix."""

from dataclasses import replace

from .granite import GRANITE
from .llama import without

GRANITE_HYBRID = replace(
    GRANITE,
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    names={
        **without(GRANITE.names, "mlp.gate", "mlp.expand"),
        "mlp": "shared_mlp",
        "mlp.gate_expand": "input_linear",
        "mlp.contract": "output_linear",
    },
    fields={
        **without(GRANITE.fields, "mlp_bias", "intermediate_size"),
        "shared_intermediate_size": ("d_hidden",),
    },
    defaults={**without(GRANITE.defaults, "mlp_bias"), "shared_intermediate_size": 1024},
    fixed={**GRANITE.fixed, "mlp_bias": False},
    only={"num_local_experts": 0, "position_embedding_type": "rope"},
    no_effect=frozenset(
        {
            "intermediate_size",
            "num_experts_per_tok",
            "output_router_logits",
            "mamba_n_groups",
            "mamba_d_state",
            "mamba_d_head",
            "mamba_d_conv",
            "mamba_expand",
            "mamba_chunk_size",
            "mamba_conv_bias",
            "mamba_proj_bias",
            "time_step_limit",
            "layers_block_type",
            "normalization_function",
            "init_method",
        }
    ),
    written={"mamba_n_heads": 1},
    block_kinds=("attention", "full_attention"),
)

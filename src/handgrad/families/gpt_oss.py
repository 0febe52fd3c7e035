"""gpt-oss: experts with biases and a clamped gate, sinks, windows in every other block. Its files stack the experts."""

from dataclasses import replace

from .llama import LLAMA, without
from .mixtral import EXPERTS, ROUTER_LOSS
from .qwen2_moe import OF_EXPERT

GPT_OSS = replace(
    LLAMA,
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    names={
        **without(LLAMA.names, "mlp.gate", "mlp.expand", "mlp.contract"),
        **EXPERTS, **OF_EXPERT, "mlp.router": "router",
    },
    fields={
        **without(LLAMA.fields, "mlp_bias", "hidden_act"),
        "num_local_experts": ("n_experts",),
        "num_experts_per_tok": ("experts_per_token",),
    },
    defaults={
        **without(LLAMA.defaults, "mlp_bias", "hidden_act"),
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        **ROUTER_LOSS,
    },
    fixed={**LLAMA.fixed, "mlp_bias": True, "sinks": True, "activation": "clamped", "router": "softmax of chosen"},
    only={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    aliases={"num_experts": "num_local_experts"},
    no_effect=frozenset({"initial_context_length", "experts_per_token"}),  # older names in its first files
    windows="pattern",
    pattern=2,
    stacked_experts=True,
    quant_methods=("mxfp4",),
)  # fmt: skip

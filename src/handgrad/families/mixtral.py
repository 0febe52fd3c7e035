"""Mixtral: Mistral with a mixture of experts in every block, whose window is optional."""

from dataclasses import replace

from .llama import LLAMA, without
from .mistral import MISTRAL

ROUTER_LOSS = {"output_router_logits": False, "router_aux_loss_coef": 0.001}  # the first switches the second on
EXPERTS = {"mlp.router": "gate", "mlp.experts": "experts"}

MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    architecture="MixtralForCausalLM",
    names={
        **without(LLAMA.names, "mlp.gate", "mlp.expand", "mlp.contract"),
        "mlp": "block_sparse_moe", **EXPERTS, "expert.gate": "w1", "expert.expand": "w3", "expert.contract": "w2",
    },
    fields={**MISTRAL.fields, "num_local_experts": ("n_experts",), "num_experts_per_tok": ("experts_per_token",)},
    defaults={
        **MISTRAL.defaults,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **ROUTER_LOSS,
    },
    only={"router_jitter_noise": 0.0},
    in_memory={"block_sparse_moe": "mlp"},
)  # fmt: skip

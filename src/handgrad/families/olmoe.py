"""OLMoE: Llama with queries and keys normalized over the full width, and a mixture whose gates are not normalized."""

from dataclasses import replace

from .llama import LLAMA, without
from .mixtral import EXPERTS, ROUTER_LOSS
from .qwen2_moe import FIELDS, OF_EXPERT

OLMOE = replace(
    LLAMA,
    name="olmoe",
    architecture="OlmoeForCausalLM",
    names={
        **without(LLAMA.names, "mlp.gate", "mlp.expand", "mlp.contract"),
        **EXPERTS, **OF_EXPERT, "attn.q_norm": "q_norm", "attn.k_norm": "k_norm",
    },
    fields={**without(LLAMA.fields, "mlp_bias", "head_dim"), **without(FIELDS, "moe_intermediate_size")},
    defaults={
        **without(LLAMA.defaults, "mlp_bias", "head_dim"),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        **ROUTER_LOSS,
        "router_aux_loss_coef": 0.01,
    },
    fixed={**LLAMA.fixed, "mlp_bias": False, "qk_norm": True, "qk_norm_joint": True},
    only={"clip_qkv": None},
    aliases={"num_local_experts": "num_experts"},
)  # fmt: skip

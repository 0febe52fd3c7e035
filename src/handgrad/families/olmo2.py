"""OLMo 2: Llama with a norm after each branch instead of before it, and norms of queries and keys over all heads."""

from dataclasses import replace

from .llama import LLAMA, without

OLMO2 = replace(
    LLAMA,
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    names={
        **without(LLAMA.names, "norm_1", "norm_2"),
        "post_1": "post_attention_layernorm",
        "post_2": "post_feedforward_layernorm",
        "attn.q_norm": "q_norm",
        "attn.k_norm": "k_norm",
    },
    fields=without(LLAMA.fields, "mlp_bias", "head_dim"),
    defaults={**without(LLAMA.defaults, "mlp_bias", "head_dim"), "rms_norm_eps": 1e-5},
    fixed={**LLAMA.fixed, "mlp_bias": False, "qk_norm": True, "qk_norm_joint": True},
    own_vocabulary=50_304,
)

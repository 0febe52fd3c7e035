"""Gemma 2: Llama with norms before and after each branch, gains 1 + w, embeddings times √d, capped scores and logits, and a
window in every second block."""

from dataclasses import replace

from .llama import LLAMA, without

GEMMA2 = replace(
    LLAMA,
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    names={
        **LLAMA.names,
        "post_1": "post_attention_layernorm",
        "norm_2": "pre_feedforward_layernorm",
        "post_2": "post_feedforward_layernorm",
    },
    fields={
        **without(LLAMA.fields, "mlp_bias", "hidden_act"),
        "hidden_activation": ("activation",),
        "query_pre_attn_scalar": ("attention_scale",),
        "attn_logit_softcapping": ("score_cap",),
        "final_logit_softcapping": ("logit_cap",),
    },
    forms={"query_pre_attn_scalar": "1/√x"},
    defaults={
        **without(LLAMA.defaults, "mlp_bias", "hidden_act"),
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    fixed={**LLAMA.fixed, "mlp_bias": False, "gain_offset": 1.0, "embedding_scale": "√d_model"},
    no_effect=frozenset({"hidden_act", "cache_implementation"}),
    windows="pattern",
    pattern=2,
    own_vocabulary=256_000,
)

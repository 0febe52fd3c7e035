"""LFM2: short convolutions with gates in place of attention in most blocks, norms of queries and keys in the others."""

from dataclasses import replace

from .llama import LLAMA, without

LFM2 = replace(
    LLAMA,
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    names={
        **without(LLAMA.names, "norm_1", "norm_2"),
        "final_norm": "model.embedding_norm",
        "norm_1": "operator_norm",
        "attn.out": "out_proj",
        "attn.q_norm": "q_layernorm",
        "attn.k_norm": "k_layernorm",
        "conv": "conv",
        "conv.gates": "in_proj",
        "conv.taps": "conv",
        "conv.out": "out_proj",
        "norm_2": "ffn_norm",
        "mlp": "feed_forward",
        "mlp.gate": "w1",
        "mlp.expand": "w3",
        "mlp.contract": "w2",
    },
    fields={
        **without(LLAMA.fields, "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
        "norm_eps": ("eps",),
        "conv_L_cache": ("conv_taps",),
        "conv_bias": ("conv_bias",),
    },
    defaults={
        **without(LLAMA.defaults, "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
        "max_position_embeddings": 128_000,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "conv_L_cache": 3,
        "conv_bias": False,
        # from which the width of the feed-forward layer is computed
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        # other names that older files have
        "tie_embedding": None,
        "block_ff_dim": None,
        "full_attn_idxs": None,
        "layer_types": None,
    },
    fixed={
        **LLAMA.fixed, "activation": "silu", "qkv_bias": False, "out_bias": False, "mlp_bias": False, "qk_norm": True,
    },
    own_vocabulary=65536,
    block_kinds=("full_attention", "conv"),
    extra_tensors=r"lm_head\.weight",
    no_effect=frozenset({"block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
                         "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init",
                         "num_heads", "use_pos_enc", "theta"}),
)  # fmt: skip

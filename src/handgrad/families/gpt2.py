"""GPT-2: LayerNorm, learned positions, a plain feed-forward layer, biases everywhere, q, k and v in one matrix."""

from .family import Family

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    stored="in_out",
    names={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks": "transformer.h",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "norm_1": "ln_1",
        "attn": "attn",
        "attn.qkv": "c_attn",
        "attn.out": "c_proj",
        "norm_2": "ln_2",
        "mlp": "mlp",
        "mlp.expand": "c_fc",
        "mlp.contract": "c_proj",
    },
    fields={
        "vocab_size": ("n_vocab",),
        "n_positions": ("n_context",),
        "n_embd": ("d_model",),
        "n_head": ("n_heads",),
        "n_layer": ("n_blocks",),
        "n_inner": ("d_hidden",),
        "activation_function": ("activation",),
        "layer_norm_epsilon": ("eps",),
        "tie_word_embeddings": ("tied",),
    },
    defaults={
        "n_positions": 1024,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    no_effect=frozenset(
        {
            "n_ctx",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
    extra_tensors=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|lm_head\.weight",  # masks in old files
    own_vocabulary=50257,
    token_ids=("bos_token_id", "eos_token_id"),
    may_omit="transformer.",
)

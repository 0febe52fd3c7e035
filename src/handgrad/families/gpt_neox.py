"""GPT-NeoX and Pythia: LayerNorm, biases everywhere, q, k and v of each head side by side in one matrix, a quarter of every
head rotated, and branches that read the stream side by side."""

from .family import Family

GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    stored="out_in",
    names={
        "embed": "gpt_neox.embed_in",
        "blocks": "gpt_neox.layers",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        "norm_1": "input_layernorm",
        "attn": "attention",
        "attn.qkv": "query_key_value",
        "attn.out": "dense",
        "norm_2": "post_attention_layernorm",
        "mlp": "mlp",
        "mlp.expand": "dense_h_to_4h",
        "mlp.contract": "dense_4h_to_h",
    },
    fields={
        "vocab_size": ("n_vocab",),
        "max_position_embeddings": ("n_context",),
        "hidden_size": ("d_model",),
        "num_attention_heads": ("n_heads",),
        "num_hidden_layers": ("n_blocks",),
        "intermediate_size": ("d_hidden",),
        "hidden_act": ("activation",),
        "layer_norm_eps": ("eps",),
        "tie_word_embeddings": ("tied",),
        "attention_bias": ("qkv_bias", "out_bias"),
        "use_parallel_residual": ("parallel",),
    },
    defaults={
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    fixed={"positions": "rotary", "qkv_by_head": True},
    no_effect=frozenset({"is_decoder", "classifier_dropout", "rotary_emb_base", "rotary_pct"}),
    extra_tensors=r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)|embed_out\.weight",
    in_memory={"embed_out": "lm_head"},
    rotary_share=0.25,
    rope_names={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    own_vocabulary=50_432,
    token_ids=("bos_token_id", "eos_token_id"),
)

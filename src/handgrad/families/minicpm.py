"""MiniCPM 1 and 2: Llama with multipliers of embeddings, branches and logits, as its authors' own code names them."""

from dataclasses import replace

from .llama import LLAMA, without

MINICPM = replace(
    LLAMA,
    name="minicpm",
    architecture="MiniCPMForCausalLM",
    fields={
        **without(LLAMA.fields, "mlp_bias", "head_dim"),
        "scale_emb": ("embedding_scale",),
        "scale_depth": ("residual_scale",),
        "dim_model_base": ("logit_scale",),
    },
    forms={"scale_depth": "x/√n_blocks", "dim_model_base": "x/d_model"},
    defaults={
        **without(LLAMA.defaults, "mlp_bias", "head_dim"),
        "tie_word_embeddings": True,
        "scale_emb": 1.0,
        "scale_depth": 1.0,
        "dim_model_base": 1,
    },
    fixed={**LLAMA.fixed, "mlp_bias": False},
    own_vocabulary=122_753,
)

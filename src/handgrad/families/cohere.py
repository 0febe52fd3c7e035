"""Command R: one LayerNorm without bias, whose output attention and feed-forward both read; neighboring features are
rotated, and logits are scaled."""

from dataclasses import replace

from .llama import LLAMA, without

COHERE = replace(
    LLAMA,
    name="cohere",
    architecture="CohereForCausalLM",
    names=without(LLAMA.names, "norm_2"),
    fields={
        **without(LLAMA.fields, "mlp_bias", "head_dim", "rms_norm_eps"),
        "layer_norm_eps": ("eps",),
        "logit_scale": ("logit_scale",),
    },
    defaults={
        **without(LLAMA.defaults, "mlp_bias", "head_dim", "rms_norm_eps"),
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
    },
    fixed={
        **LLAMA.fixed,
        "norm": "layer",
        "norm_bias": False,
        "mlp_bias": False,
        "parallel": True,
        "rotary_neighbors": True,
    },
    only={"use_qk_norm": False},
    own_vocabulary=256_000,
)

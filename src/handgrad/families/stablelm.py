"""StableLM 2 and 3B: Llama with LayerNorm and a quarter of every head rotated."""

from dataclasses import replace

from .llama import LLAMA, without

STABLELM = replace(
    LLAMA,
    name="stablelm",
    architecture="StableLmForCausalLM",
    fields={
        **without(LLAMA.fields, "attention_bias", "mlp_bias", "head_dim", "rms_norm_eps"),
        "layer_norm_eps": ("eps",),
        "use_qkv_bias": ("qkv_bias",),
    },
    defaults={
        **without(LLAMA.defaults, "attention_bias", "mlp_bias", "head_dim", "rms_norm_eps"),
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": False,
    },
    fixed={**LLAMA.fixed, "norm": "layer", "out_bias": False, "mlp_bias": False},
    only={"qk_layernorm": False, "use_parallel_residual": False},
    rotary_share=0.25,
    own_vocabulary=50_304,
)

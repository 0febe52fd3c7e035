"""Phi-1, 1.5 and 2: one LayerNorm, whose output attention and a plain feed-forward layer both read; biases everywhere, of
the logits as well, and half of every head rotated."""

from dataclasses import replace

from .llama import LLAMA, without

PHI = replace(
    LLAMA,
    name="phi",
    architecture="PhiForCausalLM",
    names={
        **without(LLAMA.names, "norm_2", "mlp.gate"),
        "final_norm": "model.final_layernorm",
        "attn.out": "dense",
        "mlp.expand": "fc1",
        "mlp.contract": "fc2",
    },
    fields={
        **without(LLAMA.fields, "attention_bias", "mlp_bias", "head_dim", "rms_norm_eps"),
        "layer_norm_eps": ("eps",),
    },
    defaults={
        **without(LLAMA.defaults, "attention_bias", "mlp_bias", "head_dim", "rms_norm_eps"),
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
    },
    fixed={"norm": "layer", "positions": "rotary", "parallel": True, "logits_bias": True},
    only={"qk_layernorm": False},
    rotary_share=0.5,
    own_vocabulary=51_200,
)

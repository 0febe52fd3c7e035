"""Jais 2: Llama with LayerNorm, a squared ReLU instead of a gate, and biases everywhere."""

from dataclasses import replace

from .llama import LLAMA, without

JAIS2 = replace(
    LLAMA,
    name="jais2",
    architecture="Jais2ForCausalLM",
    names=without(LLAMA.names, "mlp.gate"),
    fields={**without(LLAMA.fields, "rms_norm_eps"), "layer_norm_eps": ("eps",)},
    defaults={
        **without(LLAMA.defaults, "rms_norm_eps"),
        "hidden_act": "relu2",
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    fixed={"norm": "layer", "positions": "rotary"},
    own_vocabulary=150_272,
)

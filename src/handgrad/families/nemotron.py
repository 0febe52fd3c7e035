"""Nemotron and Minitron: LayerNorm with gains 1 + w, a squared ReLU, half of every head rotated."""

from dataclasses import replace

from .llama import LLAMA, without

NEMOTRON = replace(
    LLAMA,
    name="nemotron",
    architecture="NemotronForCausalLM",
    names=without(LLAMA.names, "mlp.gate"),
    fields={**without(LLAMA.fields, "rms_norm_eps"), "norm_eps": ("eps",)},
    defaults={
        **without(LLAMA.defaults, "rms_norm_eps"),
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
    },
    fixed={"norm": "layer", "positions": "rotary", "gain_offset": 1.0},
    rotary_share=0.5,
    own_vocabulary=256_000,
)

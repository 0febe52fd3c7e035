"""Arcee (AFM): Llama with a squared ReLU instead of a gate."""

from dataclasses import replace

from .llama import LLAMA, without

ARCEE = replace(
    LLAMA,
    name="arcee",
    architecture="ArceeForCausalLM",
    names=without(LLAMA.names, "mlp.gate"),
    defaults={**LLAMA.defaults, "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    fixed={"norm": "rms", "positions": "rotary"},
    own_vocabulary=128_256,
)

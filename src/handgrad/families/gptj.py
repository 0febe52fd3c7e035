"""GPT-J: one LayerNorm, whose output attention and feed-forward both read; biases of the feed-forward layer and of the
logits, and some features of every head rotated, in planes of neighbors."""

from dataclasses import replace

from .gpt2 import GPT2
from .llama import without

GPTJ = replace(
    GPT2,
    name="gptj",
    architecture="GPTJForCausalLM",
    stored="out_in",
    names={
        **without(GPT2.names, "positions", "attn.qkv", "norm_2"),
        "attn.q": "q_proj",
        "attn.k": "k_proj",
        "attn.v": "v_proj",
        "attn.out": "out_proj",
        "mlp.expand": "fc_in",
        "mlp.contract": "fc_out",
    },
    fields={**GPT2.fields, "rotary_dim": ("rotary_width",)},
    defaults={**GPT2.defaults, "n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False},
    fixed={
        "positions": "rotary",
        "rotary_neighbors": True,
        "parallel": True,
        "qkv_bias": False,
        "out_bias": False,
        "logits_bias": True,
    },
    only={},
    no_effect=GPT2.no_effect | {"rotary", "scale_attn_weights"},
    rope_types=(),
    own_vocabulary=50_400,
)

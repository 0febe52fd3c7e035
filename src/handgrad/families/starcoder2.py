"""StarCoder2: Llama with LayerNorm, a plain feed-forward layer, biases everywhere, and a window in every block."""

from dataclasses import replace

from .llama import LLAMA, without

STARCODER2 = replace(
    LLAMA,
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    names={**without(LLAMA.names, "mlp.gate"), "mlp.expand": "c_fc", "mlp.contract": "c_proj"},
    fields={
        **without(LLAMA.fields, "attention_bias", "mlp_bias", "head_dim", "rms_norm_eps"),
        "norm_epsilon": ("eps",),
        "use_bias": ("qkv_bias", "out_bias", "mlp_bias"),
    },
    defaults={
        **without(LLAMA.defaults, "attention_bias", "mlp_bias", "head_dim", "rms_norm_eps"),
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
        "sliding_window": None,
    },
    fixed={"norm": "layer", "positions": "rotary"},
    no_effect=frozenset({"norm_type", "mlp_type", "embedding_dropout"}),
    windows="every block",
    own_vocabulary=49_152,
)

"""GPT-2: its fields of config.json, both ways."""

from pathlib import Path
from typing import Any

import torch

from ..errors import HandgradError, shown
from ..model.config import GPTConfig

_ACTIVATION = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}


_HF_ACTIVATION = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}


# fields of ours in config.json, written only where they differ from GPT-2
_OWN = ("d_rho", "d_head", "logits_bias", "key_bias", "causal")


def config_json(config: GPTConfig, dtype: torch.dtype) -> dict[str, object]:
    """The config.json of a model with these choices, its weights stored in `dtype`."""
    own = {name: getattr(config, name) for name in _OWN if getattr(config, name) != getattr(GPTConfig(), name)}
    return {
        # a model that GPT-2's code would compute differently must not be opened as GPT-2
        **({"model_type": "handgrad"} if own else {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}),
        "vocab_size": config.n_vocab,
        "n_positions": config.n_context,
        "n_embd": config.d_model,
        "n_head": config.n_heads,
        "n_layer": config.n_blocks,
        "n_inner": config.d_hidden,
        "activation_function": _HF_ACTIVATION[config.activation],
        "layer_norm_epsilon": config.eps,
        "tie_word_embeddings": config.tied,
        # GPT-2's defaults hold for its own vocabulary only; otherwise generation_config.json has the ids
        **({} if config.n_vocab >= 50257 else {"bos_token_id": None, "eos_token_id": None}),
        "dtype": str(dtype).removeprefix("torch."),
        **({"handgrad": own} if own else {}),
    }


def read_config(raw: dict[str, Any], file: Path) -> GPTConfig:
    """A parsed config.json → the model it describes. A field that would change the mathematics is refused by name."""
    if raw.get("model_type") not in ("gpt2", "handgrad"):
        raise HandgradError(f"{file}: model_type is {shown(raw.get('model_type'))}; this version reads 'gpt2'")
    for field, only in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if raw.get(field, only) != only:
            raise HandgradError(f"{file}: {field} is {raw[field]}; only {only} is supported")
    activation = raw.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATION:
        raise HandgradError(f"{file}: activation_function {shown(activation)} is not one of {', '.join(_ACTIVATION)}")
    own = raw.get("handgrad", {})
    if not isinstance(own, dict) or not set(own) <= set(_OWN):
        raise HandgradError(f"{file}: 'handgrad' may hold {', '.join(_OWN)}, not {shown(own)}")
    try:
        return GPTConfig(
            n_vocab=raw["vocab_size"],
            n_context=raw.get("n_positions", 1024),
            d_model=raw["n_embd"],
            n_heads=raw["n_head"],
            n_blocks=raw["n_layer"],
            d_hidden=raw.get("n_inner"),
            activation=_ACTIVATION[activation],
            eps=raw.get("layer_norm_epsilon", 1e-5),
            tied=raw.get("tie_word_embeddings", True),
            **own,
        )
    except KeyError as missing:
        raise HandgradError(f"{file} has no field {missing}") from None
    except HandgradError as mistake:
        raise HandgradError(f"{file}: {mistake}") from None

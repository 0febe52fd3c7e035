"""A model as data of a page, for assets/engine/, which computes forward and backward in the browser: its configuration, its
characters, and its weights as float32 in base64. assets/engine/weights.js reads it."""

import base64
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from ..errors import HandgradError, option
from ..formats.models import locate, open_folder, tokenizer_of
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..text.tokenizer import Tokenizer

# What a configuration may choose; the engine computes GPT-2's defaults of everything else.
CHOICES = (
    "n_vocab", "n_context", "d_model", "n_heads", "n_blocks", "d_hidden", "d_rho", "d_head", "activation", "eps", "tied",
    "logits_bias", "key_bias", "causal", "qkv_bias", "out_bias", "mlp_bias", "norm_bias",
)  # fmt: skip
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "relu2")  # of assets/engine/activation.js
EXACT = (torch.float32, torch.bfloat16, torch.float16)  # dtypes whose numbers float32 has


class EngineWeight(TypedDict):
    rows: int  # 1 of a vector
    cols: int
    float32: str  # base64, low byte first


class EngineConfig(TypedDict):
    n_vocab: int
    n_context: int
    d_model: int
    n_heads: int
    n_blocks: int
    d_hidden: int
    d_rho: int
    d_head: int
    activation: str
    eps: float
    causal: bool
    tied: bool
    key_bias: bool


class EngineData(TypedDict):
    config: EngineConfig
    vocabulary: list[str]  # the character of every id
    weights: dict[str, EngineWeight]  # by Hugging Face's names


def data_of_run(folder: str | Path) -> EngineData:
    """The best checkpoint of a run, as `handgrad train` writes it, or a model directory."""
    found = locate(folder, download=False)
    return engine_data(open_folder(found), tokenizer_of(found))


def engine_data(model: GPT, tokenizer: Tokenizer) -> EngineData:
    """A model and its tokenizer of characters; raises if the engine does not compute such a model."""
    config = model.config
    check_config(config)
    weights = dict(model.named_parameters())
    if weights.keys() != dict(GPT(config, device="meta").named_parameters()).keys():
        raise HandgradError(
            "the browser's engine computes plain weights, without adapters or packed matrices: merge the adapter"
            " (handgrad merge), and load the model without packing"
        )
    inexact = {str(p.dtype) for p in weights.values() if p.dtype not in EXACT}
    if inexact:
        raise HandgradError(f"the data of a page are float32, and this model has {inexact.pop()}: load it as float32")
    vocabulary = [tokenizer.decode([id]) for id in range(tokenizer.n_vocab)]
    if not tokenizer.knows_few_characters or len(vocabulary) != config.n_vocab:
        raise HandgradError(
            f"the browser's engine reads characters, one id for each, and this model reads {tokenizer.unit}s by"
            f" {config.n_vocab:,} ids: train one with"
            f" {option('tokenizer', 'chars')}"
        )
    shape: EngineConfig = {
        "n_vocab": config.n_vocab, "n_context": config.n_context, "d_model": config.d_model, "n_heads": config.n_heads,
        "n_blocks": config.n_blocks, "d_hidden": config.hidden_width, "d_rho": config.query_width,
        "d_head": config.value_width, "activation": config.activation, "eps": config.eps, "causal": config.causal,
        "tied": config.tied, "key_bias": config.key_bias,
    }  # fmt: skip
    return {
        "config": shape,
        "vocabulary": vocabulary,
        "weights": {name: _weight(p.detach()) for name, p in weights.items()},
    }


def check_config(config: ModelConfig) -> None:
    """Raise if the engine does not compute a network of this configuration."""
    if config.family != "gpt2":
        raise HandgradError(
            f"the browser's engine computes the layers of gpt2, and this model is of the family {config.family}: choose a"
            " model that was trained as nano (handgrad train)"
        )
    plain = ModelConfig(**{name: getattr(config, name) for name in CHOICES})
    others = [name for name, value in vars(config).items() if value != getattr(plain, name)]
    others += [] if config.activation in ACTIVATIONS else ["activation"]
    if others:
        raise HandgradError(
            f"the browser's engine does not compute {others[0]}={getattr(config, others[0])!r}: choose a model without it"
        )


def _weight(p: Tensor) -> EngineWeight:
    rows, cols = (1, *p.shape)[-2:]
    numbers = p.float().cpu().contiguous().numpy().astype("<f4")
    return {"rows": rows, "cols": cols, "float32": base64.b64encode(numbers.tobytes()).decode()}

"""Hugging Face directories of GPT-2 models: config.json and model.safetensors, both ways, written atomically."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import GPTConfig
from .errors import HandgradError
from .files import write_folder
from .gpt import DTYPES, GPT
from .layers import LoRA

_ACTIVATION = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_HF_ACTIVATION = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
# what a config.json of ours says beyond Hugging Face's fields; absent means GPT-2's way
_OWN = ("d_rho", "d_head", "logits_bias", "key_bias", "causal")


def load(path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> GPT:
    """A model from a directory with config.json and model.safetensors, in the dtype it was stored in unless given."""
    folder = Path(path)
    config = load_config(folder)
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in read_tensors(file).items()}
    if "lm_head.weight" not in tensors and not config.tied:
        config = replace(config, tied=True)
    model = GPT(config, device="meta")
    expected = {name.removeprefix("transformer."): (name, p) for name, p in model.named_parameters()}
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise HandgradError(f"{file}: no tensor {missing[0]!r} ({len(missing)} of {len(expected)} are missing)")
    stored = tensors["wte.weight"].dtype
    dtype = dtype or (stored if stored in DTYPES else torch.float32)
    for short, (name, p) in expected.items():
        found = tensors[short]
        if found.shape != p.shape:
            raise HandgradError(f"{file}: {short} is {tuple(found.shape)}, config.json wants {tuple(p.shape)}")
        if not found.is_floating_point():
            raise HandgradError(f"{file}: {short} holds {found.dtype}, not floating-point numbers")
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(found.to(device=device, dtype=dtype)))
    if config.tied:
        model.lm_head.weight = model.transformer.wte.weight
    return model


def load_config(folder: Path) -> GPTConfig:
    """The shape of the model in a directory."""
    file = folder / "config.json"
    if not folder.is_dir():
        raise HandgradError(f"{folder} is not a directory: give a preset's name or a folder with config.json")
    if not file.exists():
        raise HandgradError(f"{folder} has no config.json: it is not a model directory")
    try:
        raw: Any = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as reason:
        raise HandgradError(f"{file} is not valid JSON: {reason}") from None
    if not isinstance(raw, dict):
        raise HandgradError(f"{file} must hold a JSON object, not a {type(raw).__name__}")
    if raw.get("model_type") not in ("gpt2", "handgrad"):
        raise HandgradError(f"{file}: model_type is {raw.get('model_type')!r}; this version reads 'gpt2'")
    for field, only in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if raw.get(field, only) != only:
            raise HandgradError(f"{file}: {field} is {raw[field]}; only {only} is supported")
    activation = raw.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATION:
        raise HandgradError(f"{file}: activation_function {activation!r} is not one of {', '.join(_ACTIVATION)}")
    own = raw.get("handgrad", {})
    if not isinstance(own, dict) or not set(own) <= set(_OWN):
        raise HandgradError(f"{file}: 'handgrad' may hold {', '.join(_OWN)}, not {own!r}")
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


def save(model: GPT, path: str | Path) -> None:
    """Write the model as a directory that `transformers` opens, if it is a GPT-2 and not something only we can express.
    Whole or not at all; other files of a model directory that is there already stay."""
    folder = Path(path)
    _check_saveable(model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not (folder / "config.json").exists():
        raise HandgradError(f"{folder} exists and is not a model directory: choose another place")
    write_folder(folder, lambda partial: write_model(model, partial))


def write_model(model: GPT, folder: Path) -> None:
    """config.json and model.safetensors, into a folder that nobody reads yet."""
    _check_saveable(model)
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_hf_config(model.config, tensors), indent=2) + "\n")


def _check_saveable(model: GPT) -> None:
    adapted = [name for name, layer in model.named_modules() if isinstance(layer, LoRA)]
    if adapted:
        raise HandgradError(
            f"{adapted[0]} has an adapter beside it: merge or remove the adapters before saving the model"
        )


def _hf_config(config: GPTConfig, tensors: dict[str, Tensor]) -> dict[str, object]:
    own = {name: getattr(config, name) for name in _OWN if getattr(config, name) != getattr(GPTConfig(), name)}
    return {
        # what GPT-2 cannot express must not be opened as if it were one
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
        # GPT-2's own, where its vocabulary is GPT-2's; otherwise the tokenizer and generation_config.json know
        **({} if config.n_vocab >= 50257 else {"bos_token_id": None, "eos_token_id": None}),
        "dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        **({"handgrad": own} if own else {}),
    }


def read_tensors(file: Path) -> dict[str, Tensor]:
    if not file.exists():
        raise HandgradError(f"{file} does not exist: the directory holds no weights")
    try:
        with safe_open(file, "pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as reason:
        raise HandgradError(f"{file} cannot be read: {reason}") from None

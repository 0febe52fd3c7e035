"""Hugging Face directories of GPT-2 models: config.json and model.safetensors, both ways, written atomically."""

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import GPTConfig
from .errors import HandgradError
from .files import sync
from .gpt import GPT

_ACTIVATION = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_HF_ACTIVATION = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
# what a config.json of ours says beyond Hugging Face's fields; absent means GPT-2's way
_OWN = ("d_rho", "d_head", "logits_bias", "key_bias", "causal")


def load(path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> GPT:
    """A model from a directory with config.json and model.safetensors, in the dtype it was stored in unless given."""
    folder = Path(path)
    config = load_config(folder)
    tensors = _read(folder / "model.safetensors")
    tensors = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    stored = next(iter(tensors.values())).dtype
    if dtype is None:
        dtype = torch.float32 if stored == torch.float16 else stored
    if "lm_head.weight" not in tensors and not config.tied:
        config = replace(config, tied=True)
    model = GPT(config, dtype=dtype, device="meta")
    expected = {name.removeprefix("transformer."): (name, p) for name, p in model.named_parameters()}
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise HandgradError(f"{folder / 'model.safetensors'}: no tensor {missing[0]!r} ({len(missing)} are missing)")
    for short, (name, p) in expected.items():
        found = tensors[short]
        if found.shape != p.shape:
            raise HandgradError(
                f"{folder / 'model.safetensors'}: {short} is {tuple(found.shape)}, config.json wants {tuple(p.shape)}"
            )
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
        raw: dict[str, Any] = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as reason:
        raise HandgradError(f"{file} is not valid JSON: {reason}") from None
    if raw.get("model_type") != "gpt2":
        raise HandgradError(f"{file}: model_type is {raw.get('model_type')!r}; this version reads 'gpt2'")
    activation = raw.get("activation_function", "gelu_new")
    if activation not in _ACTIVATION:
        raise HandgradError(f"{file}: activation_function {activation!r} is not one of {', '.join(_ACTIVATION)}")
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
            **raw.get("handgrad", {}),
        )
    except KeyError as missing:
        raise HandgradError(f"{file} has no field {missing}") from None
    except TypeError as reason:
        raise HandgradError(f"{file}: {reason}") from None


def save(model: GPT, path: str | Path) -> None:
    """Write the model as a directory that `transformers` opens. Nothing is left behind if it does not succeed."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not (folder / "config.json").exists():
        raise HandgradError(f"{folder} exists and is not a model directory: choose another place")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(_hf_config(model.config, tensors), indent=2) + "\n")
        for file in partial.iterdir():
            sync(file)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            os.replace(folder, old / "model")
            os.replace(partial, folder)
            shutil.rmtree(old)
        else:
            os.replace(partial, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _hf_config(config: GPTConfig, tensors: dict[str, Tensor]) -> dict[str, object]:
    own = {name: getattr(config, name) for name in _OWN if getattr(config, name) != getattr(GPTConfig(), name)}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.n_vocab,
        "n_positions": config.n_context,
        "n_embd": config.d_model,
        "n_head": config.n_heads,
        "n_layer": config.n_blocks,
        "n_inner": config.d_hidden,
        "activation_function": _HF_ACTIVATION[config.activation],
        "layer_norm_epsilon": config.eps,
        "tie_word_embeddings": config.tied,
        "dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        **({"handgrad": own} if own else {}),
    }


def _read(file: Path) -> dict[str, Tensor]:
    if not file.exists():
        raise HandgradError(f"{file} does not exist: the directory holds no weights")
    try:
        with safe_open(file, "pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as reason:
        raise HandgradError(f"{file} cannot be read: {reason}") from None

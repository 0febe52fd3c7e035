"""Any model by what a user calls it: a preset, a model directory, the folder of a run, an adapter, a name on the hub."""

import importlib.util
import os
import re
from pathlib import Path

import torch

from . import lora, tokenizer
from .checkpoint import load as load_directory
from .config import PRESETS
from .errors import HandgradError
from .gpt import GPT
from .run import model_folder
from .tokenizer import Tokenizer

_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "merges.txt"]


def load(path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> GPT:
    """A model from a directory: Hugging Face's config.json and model.safetensors, in one file or several, with float32,
    bfloat16 or float16 weights; or an adapter of PEFT's, which brings its base model along; or the folder of a run, of
    which it takes the best checkpoint; or, with the package huggingface_hub and a network, a model's name on the hub.

    The weights stay in the dtype they are stored in unless another is given (float16 becomes float32)."""
    return open_folder(locate(path), dtype, device)


def open_folder(folder: Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> GPT:
    """A model from the folder that `locate` found."""
    if lora.is_adapter(folder):
        model = load_directory(base_of(folder), dtype=dtype, device=device)
        lora.load(model, folder)
        return model
    return load_directory(folder, dtype=dtype, device=device)


def locate(path: str | Path) -> Path:
    """The folder in which a model or an adapter lies; what is on the hub is fetched first."""
    name = str(path)
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        return model_folder(folder)
    if (
        os.path.lexists(folder)
        or len(name) > 200
        or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
        or name.startswith(".")
    ):
        raise HandgradError(f"{name} is not a directory: give a folder with config.json, or the folder of a run")
    return _from_hub(name)


def base_of(adapter: Path) -> Path:
    """The folder of the model that an adapter stands beside."""
    name = lora.base_of(adapter)
    if name is None:
        raise HandgradError(f"{adapter} does not say which model it belongs to: load that, then the adapter")
    try:
        return locate(name)
    except HandgradError as mistake:
        raise HandgradError(f"the base model of {adapter} is not there: {mistake}") from None


def tokenizer_folder(folder: Path) -> Path | None:
    """Where the tokenizer of a model lies: beside it, or, for an adapter, perhaps with its base model."""
    if os.path.lexists(folder / "tokenizer.json") or os.path.lexists(folder / "vocab.json"):
        return folder
    if lora.is_adapter(folder):
        return tokenizer_folder(base_of(folder))
    return None


def tokenizer_of(folder: Path) -> Tokenizer:
    return tokenizer.read(tokenizer_folder(folder) or folder)


def _from_hub(name: str) -> Path:
    preset = f" ({name!r} is also a preset: a shape without weights)" if name in PRESETS else ""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise HandgradError(
            f"there is no folder {name}{preset}; to look for it on the hub, pip install huggingface_hub"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as reason:  # the library raises its own, requests' and the system's
        why = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        raise HandgradError(
            f"there is no folder {name}{preset}, and the hub could not be asked for a model of this name: {why}"
        ) from None

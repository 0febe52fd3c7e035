"""Any model by what a user calls it: a preset, a model directory, the folder of a run, an adapter, a name on the hub."""

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import adapters
from ..errors import HandgradError
from ..model.config import PRESETS, GPTConfig, preset
from ..model.gpt import GPT
from ..text import tokenizer
from ..text.tokenizer import Tokenizer
from .checkpoint import load as load_directory
from .checkpoint import load_config
from .run_folder import RUNS, model_folder, newest_run

_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "merges.txt"]


@dataclass(frozen=True)
class Found:
    """The model that a user named: a preset, which is a shape without weights, or a folder with weights."""

    name: str  # as given, or the run that was taken
    folder: Path | None  # of the model or the adapter; None: a preset
    note: str = ""  # what the user should know about the choice

    @property
    def is_preset(self) -> bool:
        return self.folder is None

    @property
    def config(self) -> GPTConfig:
        """The shape; of an adapter, its base model's."""
        if self.folder is None:
            return preset(self.name)
        return load_config(base_of(self.folder) if adapters.is_adapter(self.folder) else self.folder)


def find_model(name: str | None) -> Found:
    """Which model a user means, for every command. The first that applies:

    1. no name: the newest run in runs/ that has a checkpoint
    2. the bare name of a preset: the preset, even if a folder has the same name
    3. a folder: a model directory, an adapter, or a run, of which the best checkpoint is taken
    4. a name on the hub, owner/model, which is fetched
    """
    if name is None:
        newest = newest_run(with_checkpoint=True)
        if newest is None:
            raise HandgradError(f"there is no run with a checkpoint in {RUNS}/: name a model with --model")
        return Found(str(newest), model_folder(newest))
    if name in PRESETS:
        both = Path(name).is_dir()
        return Found(
            name, None, f"{name} is the preset here; for the folder of that name write ./{name}" if both else ""
        )
    if "/" not in name and not Path(name).expanduser().is_dir():
        raise HandgradError(f"{name!r} is neither a preset ({', '.join(PRESETS)}) nor a directory")
    return Found(name, locate(name))


def weights_folder(name: str | None) -> Path:
    """The folder of the model a user means, for commands that need weights."""
    found = find_model(name)
    if found.folder is not None:
        return found.folder
    remedy = f"for the folder of that name write ./{name}" if found.note else "give the folder of a trained model"
    raise HandgradError(f"{name} is a preset, a shape without weights: {remedy}{_on_the_hub(found.name)}")


def _on_the_hub(name: str) -> str:
    return f", or openai-community/{name} to fetch it from the hub" if name.startswith("gpt2") else ""


def load(path: str | Path, *, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None) -> GPT:
    """A model from a directory: Hugging Face's config.json and model.safetensors, in one file or several, with float32,
    bfloat16 or float16 weights; or an adapter of PEFT's, which brings its base model along; or the folder of a run, of
    which it takes the best checkpoint; or, with the package huggingface_hub and a network, a model's name on the hub.

    The weights stay in the dtype they are stored in unless another is given (float16 becomes float32)."""
    return open_folder(locate(path), dtype, device)


def open_folder(folder: Path, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None) -> GPT:
    """A model from the folder that `locate` found."""
    if adapters.is_adapter(folder):
        model = load_directory(base_of(folder), dtype=dtype, device=device)
        adapters.load(model, folder)
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
    name = adapters.base_of(adapter)
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
    if adapters.is_adapter(folder):
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

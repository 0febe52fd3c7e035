"""Write a model to a new directory: in another dtype, in one file or several."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import lora
from ..errors import HandgradError, option
from ..files import manifest
from ..files.atomic import write_folder
from ..model.dtype import STORED_DTYPES, as_dtype
from ..text import tokenizer
from .huggingface import stored_dtype, write_model
from .models import open_folder, tokenizer_folder, weights_folder


@dataclass(frozen=True)
class Converted:
    """What `convert_model` wrote."""

    files: int  # number of weight files
    bytes: int
    dtype: str


def convert_model(model: str, out: Path, dtype: str | None = None, shard_size: str | None = None) -> Converted:
    """Write the model named `model`, with its tokenizer, to the new folder `out`.

    dtype        as stored; None: unchanged
    shard_size   maximum size of a weight file, such as "500MB"; None: one file
    """
    check_new_folder(out)
    folder = weights_folder(model)
    if lora.is_adapter(folder):
        raise HandgradError(f"{folder} is an adapter, not a model: merge it into its base model with handgrad merge")
    network = open_folder(folder)
    tokenizer_path = tokenizer_folder(folder)
    stored = parse_dtype(dtype) or stored_dtype(folder)
    limit = parse_size(shard_size) if shard_size is not None else None

    def fill(partial: Path) -> None:
        write_model(network, partial, stored, limit, like=folder)
        if tokenizer_path is not None:
            tokenizer.read(tokenizer_path).write(partial)
        manifest.write(partial)

    write_folder(out, fill)
    files = list(out.glob("*.safetensors"))
    return Converted(len(files), sum(file.stat().st_size for file in files), str(stored).removeprefix("torch."))


def check_new_folder(folder: Path) -> None:
    """Raise if the folder exists."""
    if folder.exists():
        raise HandgradError(f"{folder} exists already: choose another {option('out')}")


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The dtype that --dtype names; None if it was not given."""
    return None if name is None else as_dtype(name, STORED_DTYPES, option("dtype"))


def parse_size(text: str) -> int:
    """Bytes: "500MB" → 500,000,000; "500MiB" → 524,288,000"""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise HandgradError(f"{option('shard_size')} must be a size as in 500MB or 2GB, not {text!r}")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMG".index(found[2].upper() or " "))

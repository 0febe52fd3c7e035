"""Load the model of a GGUF file: unpacked, or with its matrices packed as they are in the file."""

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..checks import check_memory
from ..errors import option
from ..gguf.file import Stored, dequantize
from ..gguf.model import read_model
from ..model.config import ModelConfig
from ..model.dtype import as_dtype
from ..model.gpt import GPT
from ..model.storage.packed import KINDS, Packed
from ..ops import packed as ops_packed
from .config_json import read_config
from .huggingface import build


def load_gguf(
    path: Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    packed: bool = False,
    rounded: bool = False,
) -> GPT:
    """Load in float32 unless another dtype is given. With `packed`, matrices stay in the types of the file, mapped from it,
    and are unpacked to `dtype` whenever they are used; with `rounded`, others are stored in bfloat16. Everything is then
    frozen."""
    computed = torch.float32 if dtype is None else as_dtype(dtype)
    config, tensors, _ = read_model(path)
    numbers = sum(prod(stored.shape) for stored in tensors.values() if not (packed and _stays_packed(stored)))
    packing = f"finetune {option('packed', True)}, generate {option('bits', 8)} or 4"
    remedy = f"free some, or keep the matrices packed ({packing})"
    check_memory((2 if rounded else 4) * numbers, f"the unpacked weights of {path} need", remedy)
    weights = {name: _weight(stored, packed, rounded) for name, stored in tensors.items()}
    model = build(read_config(config, path), weights, computed, device)
    model.source = str(path.absolute())
    return model


def gguf_config(path: Path) -> ModelConfig:
    """The configuration of the model in a GGUF file."""
    return read_config(read_model(path).config, path)


def packed_kinds(path: Path) -> dict[str, str]:
    """The types of the matrices that `load_gguf` keeps packed, by Hugging Face's names."""
    return {name: stored.kind for name, stored in read_model(path).tensors.items() if _stays_packed(stored)}


def _stays_packed(stored: Stored) -> bool:
    """Matrices of a type that we cannot unpack ourselves are unpacked at once."""
    return len(stored.shape) == 2 and stored.kind in KINDS and stored.kind != "F32"


def unpacked(stored: Stored) -> Tensor:
    """The numbers in float32, by a kernel where there is one for the type."""
    if stored.kind not in KINDS or stored.kind == "F32":
        return dequantize(stored)
    out = torch.empty(len(stored.data), stored.shape[-1])
    return ops_packed.unpack(stored.data, stored.kind, out).view(stored.shape)


def _weight(stored: Stored, packed: bool, rounded: bool) -> Tensor | Packed:
    if packed and _stays_packed(stored):
        rows, columns = stored.shape
        return Packed(stored.data, stored.kind, (rows, columns))
    found = unpacked(stored)
    return Packed.of(found, "BF16") if rounded and found.ndim == 2 else found

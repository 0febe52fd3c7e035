"""Merge an adapter into its base model on disk, and remove it again. The logits are compared before anything is written."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import lora
from ..errors import HandgradError, option
from ..files import manifest
from ..files.atomic import write_folder
from ..lora import Merged, peft_config
from ..lora.merge_record import check_same, fingerprint, merged_adapter, read_merge, write_merge
from ..model.gpt import GPT
from ..text import tokenizer
from .convert import check_new_folder, parse_dtype
from .huggingface import stored_dtype, write_model
from .models import base_of, open_folder, tokenizer_folder, weights_folder


@dataclass(frozen=True)
class MergeResult:
    base: Path  # the model that was read
    adapters: int  # number of layers with an adapter
    difference: float  # largest relative change of the logits
    untied: bool  # the head is no longer the embedding


def merge_adapter(adapter: str, model: str | None, out: Path, dtype: str | None = None) -> MergeResult:
    """Merge an adapter into its base model, or into `model`, and write the result to the new folder `out`."""
    check_new_folder(out)
    folder = _adapter_folder(adapter)
    base = weights_folder(model) if model is not None else base_of(folder)
    network, stored, merged, difference = open_merged(folder, base, dtype)
    _write(network, out, stored, base, folder, merged)
    return MergeResult(base, len(merged.adapters), difference, merged.tied and not network.config.tied)


class Opened(NamedTuple):
    network: GPT
    stored: torch.dtype  # to which the weights are rounded
    merged: Merged
    difference: float  # largest relative change of the logits


def open_merged(folder: Path, base: Path, dtype: str | None = None) -> Opened:
    """Load a base model and merge the adapter in a folder into it."""
    if merged_adapter(base) == fingerprint(folder):
        raise HandgradError(f"{base} already contains {folder}: merge it into the original model")
    network, stored = _open(base, dtype)
    lora.load(network, folder)
    tokens = _random_tokens(network)
    before = network.logits(tokens)
    merged = lora.merge(network)
    _round_weights(network, stored)
    return Opened(network, stored, merged, check_same(before, network.logits(tokens), stored))


def unmerge_adapter(adapter: str, model: str | None, out: Path, dtype: str | None = None) -> MergeResult:
    """Remove an adapter from the merged model `model`, and write the result to the new folder `out`."""
    check_new_folder(out)
    folder = _adapter_folder(adapter)
    if model is None:
        raise HandgradError(f"{option('undo', True)} needs the merged model: name it with {option('model')}")
    base = weights_folder(model)
    network, stored = _open(base, dtype)
    merged = read_merge(network, folder, base)
    tokens = _random_tokens(network)
    before = network.logits(tokens)
    lora.unmerge(network, merged)
    lora.remove(network)
    _round_weights(network, stored)
    lora.load(network, folder, load_head_copy=False)
    difference = check_same(before, network.logits(tokens), stored)
    lora.remove(network)
    _write(network, out, stored, base, folder)
    return MergeResult(base, len(merged.adapters), difference, merged.tied and not network.config.tied)


def _adapter_folder(name: str) -> Path:
    folder = weights_folder(name)
    if not lora.is_adapter(folder):
        raise HandgradError(f"{folder} is not an adapter: it has no {peft_config.CONFIG}")
    return folder


def _open(base: Path, dtype: str | None) -> tuple[GPT, torch.dtype]:
    """The model, in float32 (float64 if stored so) to compare logits in, and the dtype to store it in."""
    before = stored_dtype(base)
    network = open_folder(base, torch.float64 if before == torch.float64 else torch.float32)
    return network, parse_dtype(dtype) or before


def _write(
    network: GPT, out: Path, stored: torch.dtype, base: Path, adapter: Path, merged: Merged | None = None
) -> None:
    """Write the model with its tokenizer and, if an adapter was merged, what is needed to remove it."""
    tokenizer_path = tokenizer_folder(adapter) or tokenizer_folder(base)

    def fill(partial: Path) -> None:
        write_model(network, partial, stored, like=base)
        if tokenizer_path is not None:
            tokenizer.read(tokenizer_path).write(partial)
        if merged is not None:
            write_merge(merged, network, adapter, partial)
        manifest.write(partial)

    write_folder(out, fill)


def _round_weights(model: GPT, stored: torch.dtype) -> None:
    """Round every weight to the dtype it is stored in."""
    for p in model.parameters():
        p.data = p.data.to(stored).to(p.dtype)


def _random_tokens(model: GPT) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.n_vocab, (2, min(32, model.config.n_context)), generator=generator)

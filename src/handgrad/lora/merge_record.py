"""The file beside a merged model that makes `merge --undo` possible, and the check of a merge."""

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import HandgradError, MissingError, option
from ..files.reading import open_regular
from ..files.tensors import read_headers, read_tensors
from ..gguf.file import is_gguf
from ..model.gpt import GPT
from ..tolerances import merge_tolerance
from . import peft
from .injection import adapters_of, remove
from .merging import Merged

FILE = "handgrad-merge.safetensors"


def write_merge(record: Merged, merged: GPT, adapter: Path, folder: Path) -> None:
    """Record what the weights do not tell: which adapter was merged, DoRA's column norms, and whether the head was tied."""
    untied = record.tied and not merged.config.tied
    metadata = {"format": "pt", "tied": "true" if untied else "false", "adapter": fingerprint(adapter)}
    save_file({name: norms.contiguous() for name, norms in record.norms.items()}, folder / FILE, metadata=metadata)


def merged_adapter(folder: Path) -> str | None:
    """The fingerprint of the adapter that was merged into the model in a folder."""
    if is_gguf(folder):
        return None
    try:
        read_headers(folder / FILE)
    except MissingError:
        return None
    with safe_open(folder / FILE, "pt") as opened:
        return (opened.metadata() or {}).get("adapter")


def fingerprint(adapter: Path) -> str:
    """SHA-256 of the adapter's tensors."""
    with open_regular(adapter / peft.TENSORS) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_merge(model: GPT, adapter: Path, merged: Path) -> Merged:
    """What was merged into `model`, from the adapter's files and the file that `write_merge` wrote. The model does not
    change."""
    file = merged / FILE
    try:
        norms = read_tensors(file)
    except MissingError:
        raise HandgradError(f"{merged} has no {FILE}: no adapter was merged into it by handgrad merge") from None
    with safe_open(file, "pt") as opened:
        facts = opened.metadata() or {}
    if facts.get("adapter") != fingerprint(adapter):
        raise HandgradError(f"{adapter} is not the adapter that was merged into {merged}: give that one")
    tied = model.config.tied or facts.get("tied") == "true"
    before = {p: (p.requires_grad, p.grad) for p in model.parameters()}
    peft.load(model, adapter, load_head_copy=False)
    config, adapters = model.adapter, adapters_of(model)
    remove(model)
    for p, (trained, grad) in before.items():
        p.requires_grad_(trained)
        p.grad = grad
    replaced = [*config.modules_to_save, *([] if config.bias == "none" else ["biases"])]
    if replaced:
        raise HandgradError(
            f"{adapter} replaced {', '.join(replaced)} completely, and the original is not stored: this merge"
            " cannot be undone"
        )
    if config.dora and set(norms) != set(adapters):
        raise HandgradError(f"{file} lacks column norms, without which a DoRA magnitude cannot be undone")
    return Merged(config, adapters, norms, tied)


def check_same(before: Tensor, after: Tensor, stored: torch.dtype) -> float:
    """The relative change of the logits. Raises if it is larger than rounding of the stored weights explains."""
    difference = ((after - before).abs().max() / before.abs().max()).item()
    allowed = merge_tolerance(stored)
    if not difference <= allowed:
        raise HandgradError(
            f"the logits differ by {difference:.1e} (at most {allowed:.1e} is rounding): nothing was written; the model is"
            " not the one the adapter was made for, or its weights are stored with too little precision"
            f" ({option('dtype', 'float32')})"
        )
    return difference

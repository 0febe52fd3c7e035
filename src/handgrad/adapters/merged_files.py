"""What a merged model's directory remembers, and the comparison that a merge has to stand."""

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import HandgradError, MissingError
from ..files.reading import open_regular
from ..files.tensors import read_tensors
from ..model.gpt import GPT
from ..tolerances import merge_tolerance
from . import peft
from .injection import adapters_of, remove
from .merging import Merged

FILE = "handgrad-merge.safetensors"


def write_merge(taken: Merged, merged: GPT, adapter: Path, folder: Path) -> None:
    """What the weights alone do not tell: which adapter is in them, norms that DoRA divided by, and whether the head was
    the embedding."""
    untied = taken.tied and not merged.config.tied
    metadata = {"format": "pt", "tied": "true" if untied else "false", "adapter": fingerprint(adapter)}
    save_file({name: norms.contiguous() for name, norms in taken.norms.items()}, folder / FILE, metadata=metadata)


def fingerprint(adapter: Path) -> str:
    with open_regular(adapter / peft.TENSORS) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_merge(model: GPT, adapter: Path, merged: Path) -> Merged:
    """What was merged into `model`, from the adapter's files and from what `write_merge` left beside the weights. The
    model stays as it is."""
    file = merged / FILE
    try:
        norms = read_tensors(file)
    except MissingError:
        raise HandgradError(f"{merged} has no {FILE}: it does not say that an adapter was merged into it") from None
    with safe_open(file, "pt") as opened:
        facts = opened.metadata() or {}
    if facts.get("adapter") != fingerprint(adapter):
        raise HandgradError(f"the adapter that was merged into {merged} is not the one in {adapter}")
    tied = model.config.tied or facts.get("tied") == "true"
    before = {p: (p.requires_grad, p.grad) for p in model.parameters()}
    peft.load(model, adapter, with_copies=False)
    config, adapters = model.adapter, adapters_of(model)
    assert config is not None
    remove(model)
    for p, (trained, grad) in before.items():
        p.requires_grad_(trained)
        p.grad = grad
    if config.modules_to_save:
        raise HandgradError(
            f"{adapter} replaced {', '.join(config.modules_to_save)} whole, and what was there before is not known"
        )
    if config.dora and set(norms) != set(adapters):
        raise HandgradError(f"{file} lacks norms, without which a magnitude (DoRA) cannot be taken out")
    return Merged(config, adapters, norms, tied)


def check_same(before: Tensor, after: Tensor, stored: torch.dtype) -> float:
    """How far the logits moved, relative to their size; more than the rounding of the stored weights allows is an error."""
    difference = ((after - before).abs().max() / before.abs().max()).item()
    allowed = merge_tolerance(stored)
    if not difference <= allowed:
        raise HandgradError(
            f"the logits differ by {difference:.1e} (at most {allowed:.1e} is rounding): nothing was written; the model is"
            " not the one the adapter was made for, or its weights are stored too coarsely (--dtype float32)"
        )
    return difference

"""Merge adapters into the weights, and unmerge them.

Merging an adapter of a tied head gives the head its own weight; the embedding never changes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import HandgradError
from ..model.gpt import GPT
from .config import LoRAConfig
from .injection import adapters_of, layers_of, put
from .layer import LoRA


@dataclass(frozen=True)
class Merged:
    """What `unmerge` needs to restore the adapters."""

    config: LoRAConfig
    adapters: dict[str, LoRA]  # by the name of their layer
    norms: dict[str, Tensor]  # column norms before DoRA's rescaling
    tied: bool  # whether the head was tied to the embedding


@torch.no_grad()
def merge(model: GPT) -> Merged:
    """Add every adapter to the weight of its layer and remove it; outputs stay the same up to rounding. A tied head with an
    adapter is untied first."""
    adapters = adapters_of(model)
    if model.adapter is None or not adapters:
        raise HandgradError("the model has no adapter to merge: inject or load one first")
    if model.packed:
        raise HandgradError("a packed weight cannot be changed: load the model without packed=True, base_dtype or bits")
    merged = Merged(model.adapter, adapters, {}, model.config.tied)
    if model.head.adapted:
        model.untie()
    for name, adapter in adapters.items():
        w = _sum(adapter)
        if adapter.magnitude is not None:
            merged.norms[name] = torch.linalg.vector_norm(w, dim=0)
            w *= adapter.magnitude.double() / merged.norms[name]
        adapter.base.set_effective_weight(w)
        put(model, name, adapter.base)
    _discard_gradients(model, adapters)
    model.adapter = None
    return merged


@torch.no_grad()
def unmerge(model: GPT, merged: Merged) -> None:
    """Undo `merge`, up to the rounding of the weights."""
    if adapters_of(model):
        raise HandgradError("the model has adapters: only a merged model can be unmerged")
    layers = layers_of(model)
    for name, adapter in merged.adapters.items():
        base = layers[name].plain() if name in layers else None
        if base is None or base.w.shape != adapter.base.w.shape:
            raise HandgradError(f"the adapter belongs to {name}, which this model does not have in that shape")
        w = base.effective_weight().double()
        if adapter.magnitude is not None:
            w = w * (merged.norms[name].double() / adapter.magnitude.double())
        w = w - adapter.scale * adapter.down.double() @ adapter.up.double()
        base.set_effective_weight(w)
        adapter.base = base
        put(model, name, adapter)
    if merged.tied and not model.config.tied:
        model.tie()
    _discard_gradients(model, merged.adapters)
    model.adapter = merged.config


def _discard_gradients(model: GPT, adapters: dict[str, LoRA]) -> None:
    """Discard gradients of weights that have just changed."""
    for module in (model, *adapters.values()):
        module.zero_grad()


def _sum(adapter: LoRA) -> Tensor:
    """w + scale · d u in float64, so that the merged weight is rounded once"""
    branch = adapter.scale * adapter.down.double() @ adapter.up.double()
    return adapter.base.effective_weight().double() + branch

"""Low-rank adapters.

lora.inject(model, rank=16, targets="all-linear")      beside the linear layers named; everything else is frozen
lora.save(model, "adapter")   lora.load(model, "adapter")      PEFT's files
before = lora.merge(model)    lora.unmerge(model, before)      into the weights and out again
lora.remove(model)                                     as if they had never been there
"""

from .adapters import Merged, adapters_of, apply, choose, inject, layers_of, merge, remove, unmerge
from .files import base_of, is_adapter, load, read_config, save

__all__ = [
    "Merged",
    "adapters_of",
    "apply",
    "base_of",
    "choose",
    "inject",
    "is_adapter",
    "layers_of",
    "load",
    "merge",
    "read_config",
    "remove",
    "save",
    "unmerge",
]

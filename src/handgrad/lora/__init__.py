"""Low-rank adapters: inject, train, save in PEFT's format, merge and unmerge. The public name is `hg.lora`.

    lora.inject(model, rank=16, targets="all-linear")         adapters for these layers; everything else is frozen
    lora.save(model, "adapter"), lora.load(model, "adapter")  PEFT's files
    merged = lora.merge(model); lora.unmerge(model, merged)   into the weights and out again
    lora.remove(model)                                        discard them
    attached = lora.Attachment(model, "adapter"); attached.detach()   at run time; the base is restored exactly

Import the names below, or `LoRAConfig` and the patterns from their modules, which do not import torch. The package knows
the model and its files; it knows nothing of training, text or the command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attachment import Attachment
    from .injection import adapters_of, apply, choose, inject, layers_of, remove
    from .merging import Merged, merge, unmerge
    from .peft import base_of, is_adapter, load, save
    from .peft_config import read_config

__all__ = [
    "Attachment",
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

_MODULE = dict.fromkeys(("adapters_of", "apply", "choose", "inject", "layers_of", "remove"), "injection")
_MODULE["Attachment"] = "attachment"
_MODULE |= dict.fromkeys(("Merged", "merge", "unmerge"), "merging")
_MODULE |= dict.fromkeys(("base_of", "is_adapter", "load", "save"), "peft")
_MODULE["read_config"] = "peft_config"


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the command line reads `LoRAConfig` without waiting for torch."""
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE[name]}", __name__), name)

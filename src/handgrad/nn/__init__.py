"""The bridge to PyTorch's autograd. The public name is `hg.nn`.

    hg.nn.Linear, LoRALinear, LayerNorm, RMSNorm, Attention, GatedMLP, MLP, LinearCrossEntropy     drop-in modules
    hg.nn.linear, layer_norm, rms_norm, attention, gate, activation, linear_cross_entropy          the same as functions
    hg.nn.wrap(model)          a handgrad model that trains with loss.backward()
    hg.nn.replace(network)     swap the parts of a transformers model in place; undo() swaps them back

Each function is a `torch.autograd.Function` whose backward is the hand-derived one in `ops`. This is the one package
that meets autograd: it hands gradients over and never asks for one. It knows nothing of training runs or the command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .functions import activation, gate, layer_norm, linear, rms_norm
    from .heads import attention
    from .loss import linear_cross_entropy
    from .modules import MLP, Attention, GatedMLP, LayerNorm, Linear, LinearCrossEntropy, LoRALinear, RMSNorm
    from .replacement import Replacement, replace
    from .wrapping import Wrapped, wrap

_MODULE = dict.fromkeys(("activation", "gate", "layer_norm", "linear", "rms_norm"), "functions")
_MODULE |= {"attention": "heads", "linear_cross_entropy": "loss"}
_MODULE |= dict.fromkeys(
    ("MLP", "Attention", "GatedMLP", "LayerNorm", "Linear", "LinearCrossEntropy", "LoRALinear", "RMSNorm"), "modules"
)
_MODULE |= {"Replacement": "replacement", "replace": "replacement", "Wrapped": "wrapping", "wrap": "wrapping"}

__all__ = [
    "MLP",
    "Attention",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "LoRALinear",
    "RMSNorm",
    "Replacement",
    "Wrapped",
    "activation",
    "attention",
    "gate",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "replace",
    "rms_norm",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE[name]}", __name__), name)

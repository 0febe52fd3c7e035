"""What a norm of transformers computes, found by trying it: its name does not say."""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn


class NormKind(NamedTuple):
    """What a norm of transformers computes: a centered one is LayerNorm, which may have a bias."""

    centered: bool
    offset: float  # the gain is weight + offset
    epsilon: str  # the name of the attribute
    narrow: bool  # whether the result has the input's dtype whatever the weight's

    def eps(self, module: Any) -> float:
        found: float = getattr(module, self.epsilon)
        return found


def norm_kind(module: Any) -> NormKind | None:
    """The kind that gives the same values as the module's own code; None if none does."""
    epsilon = next((x for x in ("variance_epsilon", "eps") if isinstance(getattr(module, x, None), float)), None)
    names = [name for name, p in module._parameters.items() if p is not None]
    if epsilon is None or names not in (["weight"], ["weight", "bias"]) or module.weight.ndim != 1 or module._modules:
        return None
    w = torch.linspace(-0.7, 1.9, len(module.weight))
    x = torch.linspace(-3, 5, 3 * len(w)).cos().view(3, -1) + 0.3
    twin = copy.copy(module)
    b = w.flip(0) if "bias" in names else torch.zeros_like(w)
    twin.__dict__["_parameters"] = {name: nn.Parameter(x) for name, x in zip(("weight", "bias"), (w, b), strict=True)}
    with torch.no_grad():
        expected = type(module).forward(twin, x)
        narrow = type(module).forward(twin, x.bfloat16()).dtype == torch.bfloat16
        for centered in (False, True) if "bias" not in names else (True,):
            normed = (x - x.mean(-1, keepdim=True) if centered else x).double()
            normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + getattr(module, epsilon))
            for offset in (0.0, 1.0):
                if bool(((normed * (w + offset) + b - expected).abs() <= 1e-5 * (1 + expected.abs())).all()):
                    return NormKind(centered, offset, epsilon, narrow)
    return None

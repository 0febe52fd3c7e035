"""What may be wrong in a norm: the terms of its backward pass, and what known mistakes would have made of its output."""

import torch
from torch import Tensor

from ...model.norms import Norm


def _normalized(norm: Norm, a: Tensor) -> tuple[Tensor, Tensor]:
    """ā and 1/σ of every row"""
    mean = a.mean(-1, keepdim=True) if hasattr(norm, "bias") else 0.0
    inverse = torch.rsqrt((a - mean).square().mean(-1, keepdim=True) + norm.eps)  # type: ignore[operator]
    return (a - mean) * inverse, inverse


@torch.no_grad()
def norm_mistakes(norm: Norm, a: Tensor) -> dict[str, Tensor]:
    a_bar, _ = _normalized(norm, a)
    w, b = norm.weight, getattr(norm, "bias", None)
    bias = 0.0 if b is None else b
    return {
        "the gain were left out": a_bar + bias,
        "1 were added to the gain": a_bar * (1 + w) + bias,
        "the norm were left out": a,
        **({"the bias were left out": a_bar * w} if b is not None else {}),
    }


@torch.no_grad()
def norm_terms(norm: Norm, a: Tensor, delta: Tensor, branch: str) -> dict[str, Tensor]:
    """The terms of a norm's backward pass: 1/σ · (w ∘ Δ − mean(w ∘ Δ) − ā mean(w ∘ Δ ∘ ā)); RMSNorm has no second one."""
    a_bar, inverse = _normalized(norm, a)
    g = delta * norm.weight
    direct, along = inverse * g, -inverse * a_bar * (g * a_bar).mean(-1, keepdim=True)
    terms = {"the norm's direct term": direct, "the norm's term of the variance": along}
    whole = direct + along
    if hasattr(norm, "bias"):
        terms["the norm's term of the mean"] = -inverse * g.mean(-1, keepdim=True).expand_as(g)
        whole = whole + terms["the norm's term of the mean"]
    return {f"the {branch} branch": whole, **terms}

"""RMSNorm with rms = √(mean(a²) + ε), over the last dimension.

a, Δ  (n, d)      w  (d)      1/rms  (n, 1)      or, for q/k norms,      (n, h, d_ρ)      (d_ρ)      (n, h, 1)
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Saved(NamedTuple):
    a: Tensor  # (n, d) or (n, h, d_ρ)   the input
    inv_rms: Tensor  # (n, 1) or (n, h, 1)   1/√(mean(a²) + ε), at least float32


def forward(a: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Saved]:
    """a_i = ā ∘ w with ā = a_{i−1}/rms"""
    wide = torch.promote_types(a.dtype, torch.float32)  # bfloat16 would round rms to three digits
    norm = torch.linalg.vector_norm(a, dim=-1, keepdim=True, dtype=wide)  # unlike a², needs no temporary of a's size
    inv_rms = norm.square_().div_(a.shape[-1]).add_(eps).rsqrt_()
    return (a * inv_rms).mul_(w).to(a.dtype), Saved(a, inv_rms)


def normalized(saved: Saved) -> Tensor:
    """ā = a/rms"""
    return (saved.a * saved.inv_rms).to(saved.a.dtype)


def backward(delta: Tensor, a_bar: Tensor, inv_rms: Tensor, w: Tensor) -> Tensor:
    """Δ_{i−1} = 1/rms [g − ā ∘ mean(g ∘ ā)] with g = Δ_i ∘ w and the mean over the features"""
    g = delta.to(inv_rms.dtype) * w  # at least float32: the difference can be much smaller than g
    along = (g * a_bar).mean(-1, keepdim=True)
    return g.addcmul_(a_bar, along, value=-1).mul_(inv_rms).to(delta.dtype)


def grad_w(delta: Tensor, a_bar: Tensor, into: Tensor | None) -> Tensor:
    """∂w += Σ ā ∘ Δ_i over the tokens, and over the heads of a q/k norm"""
    wide = torch.promote_types(a_bar.dtype, torch.float32)
    grad = (a_bar.to(wide) * delta).flatten(0, -2).sum(0).to(delta.dtype)
    return grad if into is None else into.add_(grad)

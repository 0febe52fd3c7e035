"""RMSNorm with rms = √(mean(a²) + ε), over the last dimension.

a, Δ  (n, d)      w  (d)      1/rms  (n, 1)      or, for q/k norms,      (n, h, d_ρ)      (d_ρ)      (n, h, 1)

`dtype` is that of the output, where it is the operand of a product in mixed precision.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import calls


class Saved(NamedTuple):
    a: Tensor  # (n, d) or (n, h, d_ρ)   the input
    inv_rms: Tensor  # (n, 1) or (n, h, 1)   1/√(mean(a²) + ε), at least float32


def forward(a: Tensor, w: Tensor, eps: float, dtype: torch.dtype | None = None) -> tuple[Tensor, Saved]:
    """a_i = ā ∘ w with ā = a_{i−1}/rms"""
    out = torch.empty_like(a, dtype=dtype)
    if _fits(a, w, operands=(out,)):
        inv_rms = a.new_empty(*a.shape[:-1], 1)
        calls.forward_rms(a.flatten(0, -2), w, eps, out.flatten(0, -2), inv_rms)
        return out, Saved(a, inv_rms)
    wide = torch.promote_types(a.dtype, torch.float32)  # bfloat16 would round rms to three digits
    norm = torch.linalg.vector_norm(a, dim=-1, keepdim=True, dtype=wide)  # unlike a², needs no temporary of a's size
    inv_rms = norm.square_().div_(a.shape[-1]).add_(eps).rsqrt_()
    inv_rms.div_(inv_rms != 0)  # 0/0 where the squares overflowed: an output of 0 would hide it
    return (a * inv_rms).mul_(w).to(out.dtype), Saved(a, inv_rms)


def normalized(saved: Saved) -> Tensor:
    """ā = a/rms"""
    return (saved.a * saved.inv_rms).to(saved.a.dtype)


def rebuild(saved: Saved, w: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """ā and the output, from the saved statistics"""
    a, inv_rms = saved
    out = torch.empty_like(a, dtype=dtype)
    if _fits(a, inv_rms, w, operands=(out,)):
        a_bar = torch.empty_like(a)
        calls.rebuild_norm(a.flatten(0, -2), None, inv_rms, w, None, a_bar.flatten(0, -2), out.flatten(0, -2))
        return a_bar, out
    a_bar = normalized(saved)
    return a_bar, (a_bar * w).to(out.dtype)


def backward(delta: Tensor, a_bar: Tensor, inv_rms: Tensor, w: Tensor) -> Tensor:
    """Δ_{i−1} = 1/rms [g − ā ∘ mean(g ∘ ā)] with g = Δ_i ∘ w and the mean over the features"""
    if delta.shape == a_bar.shape and _fits(delta, a_bar, inv_rms, w):
        out = torch.empty_like(delta)
        calls.backward_norm(delta.flatten(0, -2), a_bar.flatten(0, -2), inv_rms, w, False, out.flatten(0, -2))
        return out
    g = delta.to(inv_rms.dtype) * w  # at least float32: the difference can be much smaller than g
    along = (g * a_bar).mean(-1, keepdim=True)
    return g.addcmul_(a_bar, along, value=-1).mul_(inv_rms).to(delta.dtype)


def grad_w(delta: Tensor, a_bar: Tensor, into: Tensor | None) -> Tensor:
    """∂w += Σ ā ∘ Δ_i over the tokens, and over the heads of a q/k norm"""
    if delta.shape == a_bar.shape and _fits(delta, a_bar):
        grad = delta.new_empty(delta.shape[-1])
        calls.column_sums(delta.flatten(0, -2), a_bar.flatten(0, -2), grad)
        return grad if into is None else into.add_(grad)
    wide = torch.promote_types(a_bar.dtype, torch.float32)
    grad = (a_bar.to(wide) * delta).flatten(0, -2).sum(0).to(delta.dtype)
    return grad if into is None else into.add_(grad)


def _fits(*tensors: Tensor, operands: tuple[Tensor, ...] = ()) -> bool:
    """Whether kernels can read these: all rows have one stride, that of heads included."""
    return calls.fits(*tensors, operands=operands) and all(
        x.ndim == 2 or x.is_contiguous() for x in (*tensors, *operands)
    )

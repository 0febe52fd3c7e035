"""Section 5, equations 38 and 40–42: layer normalization with σ = √(var + ε) (R8).

a, Δ  (n, d)      w, b  (d)      μ, 1/σ  (n, 1)

`dtype` is that of the output, where it is the operand of a product in mixed precision.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import calls


class Saved(NamedTuple):
    a: Tensor  # (n, d)   the input
    mu: Tensor  # (n, 1)
    inv_sigma: Tensor  # (n, 1)   1/√(var + ε)


def forward(
    a: Tensor, w: Tensor, b: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Saved]:
    """a_i = ā diag(w) + b~ with ā = (a_{i−1} − μ)/σ   (38); b None is 0"""
    b = torch.zeros_like(w) if b is None else b
    out = torch.empty_like(a, dtype=dtype)
    if a.ndim == 2 and calls.fits(a, w, b, operands=(out,)):
        mu, inv_sigma = a.new_empty(len(a), 1), a.new_empty(len(a), 1)
        calls.forward_layer(a, w, b, eps, out, mu, inv_sigma)
        return out, Saved(a, mu, inv_sigma)
    if a.dtype == torch.bfloat16:  # with bfloat16 gains the library rounds μ and 1/σ to three digits
        w, b = w.float(), b.float()
    result, mu, inv_sigma = torch.native_layer_norm(a, w.shape, w, b, eps)
    return result.to(out.dtype), Saved(a, mu, inv_sigma)


def normalized(saved: Saved) -> Tensor:
    """ā = (a − μ)/σ   (36)"""
    a, mu, inv_sigma = saved
    return (a - mu).mul_(inv_sigma).to(a.dtype)


def affine(a_bar: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """ā diag(w) + b~: the output, cheaper to recompute than to store   (37)"""
    return torch.addcmul(b, a_bar, w)


def rebuild(saved: Saved, w: Tensor, b: Tensor | None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """ā and the output, from the saved statistics"""
    a, mu, inv_sigma = saved
    b = torch.zeros_like(w) if b is None else b
    out = torch.empty_like(a, dtype=dtype)
    if calls.fits(a, mu, inv_sigma, w, b, operands=(out,)):
        a_bar = torch.empty_like(a)
        calls.rebuild_norm(a, mu, inv_sigma, w, b, a_bar, out)
        return a_bar, out
    a_bar = normalized(saved)
    return a_bar, affine(a_bar, w, b).to(out.dtype)


def backward(delta: Tensor, a_bar: Tensor, inv_sigma: Tensor, w: Tensor) -> Tensor:
    """Δ_{i−1} = 1/σ [g − mean(g) − ā ∘ mean(g ∘ ā)] with g = Δ_i ∘ w and means over the features   (40)"""
    if delta.ndim == 2 and delta.shape == a_bar.shape and calls.fits(delta, a_bar, inv_sigma, w):
        out = torch.empty_like(delta)
        calls.backward_norm(delta, a_bar, inv_sigma, w, True, out)
        return out
    g = delta.to(inv_sigma.dtype) * w  # at least float32: g − mean(g) can be much smaller than g
    along = (g * a_bar).mean(1, keepdim=True)
    g.sub_(g.mean(1, keepdim=True)).addcmul_(a_bar, along, value=-1)
    return g.mul_(inv_sigma).to(delta.dtype)


def grad_w(delta: Tensor, a_bar: Tensor, into: Tensor | None) -> Tensor:
    """∂w += Σ_tok ā ∘ Δ_i   (41)"""
    if delta.ndim == 2 and delta.shape == a_bar.shape and calls.fits(delta, a_bar):
        grad = delta.new_empty(delta.shape[1])
        calls.column_sums(delta, a_bar, grad)
        return grad if into is None else into.add_(grad)
    wide = a_bar.float() if a_bar.dtype == torch.bfloat16 else a_bar
    grad = (wide * delta).sum(0).to(delta.dtype)
    return grad if into is None else into.add_(grad)


def grad_b(delta: Tensor, into: Tensor | None) -> Tensor:
    """∂b += Σ_tok Δ_i   (42)"""
    return delta.sum(0) if into is None else into.add_(delta.sum(0))

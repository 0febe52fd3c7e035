"""Fully connected layer.

a_{i−1}  (n, f_in)      w  (f_in, f_out)      b  (f_out)      a_i, Δ_i  (n, f_out)
"""

import torch
from torch import Tensor

from ..kernels import calls

FEW_ROWS = calls.FEW_ROWS  # products of so few rows have another kernel, limited by reading the weights
SHORT = 4 * FEW_ROWS  # rows of a short prompt: for w stored by columns that kernel is still faster than turning w first


def forward(a: Tensor, w: Tensor, b: Tensor | None, out: Tensor | None = None) -> Tensor:
    """a_i = a_{i−1} w + b~, written to `out` if that is given"""
    by_rows = w.stride(1) == 1
    if len(a) <= (FEW_ROWS if by_rows else SHORT) and out is None and calls.fits(a, w if by_rows else w.t()):
        out = a.new_empty(len(a), w.shape[1])
        for part, result in zip(torch.split(a, FEW_ROWS), torch.split(out, FEW_ROWS), strict=True):
            calls.few_rows(part, w, result)
        return out if b is None else out.add_(b)
    if calls.multiplies(a, w):
        return calls.product(a, w, out, bias=b)
    return torch.mm(a, w, out=out) if b is None else torch.addmm(b, a, w, out=out)


def backward(delta: Tensor, w: Tensor, into: Tensor | None = None) -> Tensor:
    """Δ_{i−1} = Δ_i wᵗ, or Δ_{i−1} += Δ_i wᵗ"""
    return _product(delta, w.t(), into)


def grad_w(delta: Tensor, a: Tensor, into: Tensor | None) -> Tensor:
    """∂w += a_{i−1}ᵗ Δ_i"""
    return _product(a.t(), delta, into)


def grad_b(delta: Tensor, into: Tensor | None) -> Tensor:
    """∂b += Σ_tok Δ_i"""
    return delta.sum(0) if into is None else into.add_(delta.sum(0))


def _product(x: Tensor, y: Tensor, into: Tensor | None) -> Tensor:
    """x y, added to `into` if that is given"""
    if calls.multiplies(x, y):
        return calls.product(x, y, into, add=into is not None)
    return torch.mm(x, y) if into is None else into.addmm_(x, y)

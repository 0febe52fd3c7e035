"""Fully connected layer.

a_{i−1}  (n, f_in)      w  (f_in, f_out)      b  (f_out)      a_i, Δ_i  (n, f_out)
"""

import torch
from torch import Tensor

from ..kernels import calls


def forward(a: Tensor, w: Tensor, b: Tensor | None, out: Tensor | None = None) -> Tensor:
    """a_i = a_{i−1} w + b~, written to `out` if that is given"""
    if a.shape[0] <= calls.FEW_ROWS and out is None and calls.fits(a, transposed := w.t()):
        out = a.new_empty(len(a), w.shape[1])
        calls.few_rows(a, transposed, out)
        return out if b is None else out.add_(b)
    return torch.mm(a, w, out=out) if b is None else torch.addmm(b, a, w, out=out)


def backward(delta: Tensor, w: Tensor, into: Tensor | None = None) -> Tensor:
    """Δ_{i−1} = Δ_i wᵗ, or Δ_{i−1} += Δ_i wᵗ"""
    return torch.mm(delta, w.t()) if into is None else into.addmm_(delta, w.t())


def grad_w(delta: Tensor, a: Tensor, into: Tensor | None) -> Tensor:
    """∂w += a_{i−1}ᵗ Δ_i"""
    return torch.mm(a.t(), delta) if into is None else into.addmm_(a.t(), delta)


def grad_b(delta: Tensor, into: Tensor | None) -> Tensor:
    """∂b += Σ_tok Δ_i"""
    return delta.sum(0) if into is None else into.add_(delta.sum(0))

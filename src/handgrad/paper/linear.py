"""Fully connected layer, inherited from the predecessor paper (its Section 5).

a_{i−1}  (n_T, f_in)      w  (f_in, f_out)      b  (f_out)      a_i  (n_T, f_out)
"""

from torch import Tensor

from .notation import sum_tokens, tilde_rows


def forward(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """a_i = a_{i−1} w + b~"""
    return a @ w if b is None else a @ w + tilde_rows(b, len(a))


def delta_prev(delta: Tensor, w: Tensor) -> Tensor:
    """Δ_{i−1} = Δ_i wᵗ"""
    return delta @ w.t()


def grad_w(delta: Tensor, a: Tensor) -> Tensor:
    """∂w = a_{i−1}ᵗ Δ_i"""
    return a.t() @ delta


def grad_b(delta: Tensor) -> Tensor:
    """∂b = Σ_tok Δ_i"""
    return sum_tokens(delta)

"""Section 5: layer normalization. Equations 36–38 forward, 40–42 backward.

    a_{i−1}  (n_T, d)      w, b  (d)      μ, σ  (n_T)      ā  (n_T, d)

The paper has no ε (R8). With σ = √(var + ε) used both in ā and in 1/σ, its equation 40 is exact for every ε.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .notation import sum_tokens, tilde_columns, tilde_rows


class Forward(NamedTuple):
    mu: Tensor  # (n_T,)
    sigma: Tensor  # (n_T,)
    a_bar: Tensor  # (n_T, d)
    a: Tensor  # (n_T, d)


def forward(a: Tensor, w: Tensor, b: Tensor, eps: float) -> Forward:
    """a_i = ā diag(w) + b~ with ā = diag(1/σ)(a_{i−1} − μ~)"""
    n_tokens, d = a.shape
    mu = a.mean(1)
    centered = a - tilde_columns(mu, d)
    sigma = torch.sqrt((centered**2).mean(1) + eps)  # population variance; ε: R8
    a_bar = torch.diag(1 / sigma) @ centered  # (36)
    return Forward(mu, sigma, a_bar, a_bar @ torch.diag(w) + tilde_rows(b, n_tokens))  # (37), (38)


def delta_prev(delta: Tensor, a_bar: Tensor, sigma: Tensor, w: Tensor) -> Tensor:
    """Δ_{i−1} = diag(1/(dσ)) [d G − 1 Σ_feat G − āᵗ ∘ (1 Σ_feat(āᵗ ∘ G))]ᵗ with G = diag(w) Δ_iᵗ ∈ (d, n_T)"""
    d = len(w)
    g = torch.diag(w) @ delta.t()
    mean_part = tilde_rows(g.sum(0), d)  # the sums are broadcast over the d rows (R19)
    spread_part = a_bar.t() * tilde_rows((a_bar.t() * g).sum(0), d)
    return torch.diag(1 / (d * sigma)) @ (d * g - mean_part - spread_part).t()  # (40)


def grad_w(delta: Tensor, a_bar: Tensor) -> Tensor:
    """∂w = diag(āᵗ Δ_i): only the diagonal, which is Σ_tok ā ∘ Δ_i"""
    return sum_tokens(a_bar * delta)  # (41)


def grad_b(delta: Tensor) -> Tensor:
    """∂b = Σ_tok Δ_i"""
    return sum_tokens(delta)  # (42)

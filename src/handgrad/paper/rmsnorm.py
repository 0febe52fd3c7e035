"""RMSNorm: LayerNorm without mean and offset. Not in the paper; same notation.

    a_{i−1}  (n_T, d)      w  (d)      rms  (n_T)      ā  (n_T, d)

A q/k norm is the same norm over the d_ρ features of each head of q, and of k, with one w (d_ρ) for all heads; or over all
heads side by side, with a w (n_h d_ρ). In some models the gain is 1 + w.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .notation import row_dot, sum_tokens, tilde_columns


class Forward(NamedTuple):
    rms: Tensor  # (n_T,)
    a_bar: Tensor  # (n_T, d)
    a: Tensor  # (n_T, d)


def forward(a: Tensor, w: Tensor, eps: float) -> Forward:
    """a_i = ā diag(w) with ā = diag(1/rms) a_{i−1} and rms = √(mean_feat(a∘a) + ε)"""
    rms = torch.sqrt((a * a).mean(1) + eps)
    a_bar = torch.diag(1 / rms) @ a
    return Forward(rms, a_bar, a_bar @ torch.diag(w))


def delta_prev(delta: Tensor, a_bar: Tensor, rms: Tensor, w: Tensor) -> Tensor:
    """Δ_{i−1} = diag(1/rms) [G − ā ∘ ~(G ⊖ ā)/d] with G = Δ_i diag(w) ∈ (n_T, d)"""
    d = len(w)
    g = delta @ torch.diag(w)
    return torch.diag(1 / rms) @ (g - a_bar * tilde_columns(row_dot(g, a_bar) / d, d))


def grad_w(delta: Tensor, a_bar: Tensor) -> Tensor:
    """∂w = Σ_tok ā ∘ Δ_i"""
    return sum_tokens(a_bar * delta)


def gain(w: Tensor, offset: float = 1.0) -> Tensor:
    """1 + w, which takes the place of w above; ∂w is the gradient of the gain"""
    return offset + w


def forward_heads(q: Sequence[Tensor], w: Tensor, eps: float) -> list[Forward]:
    """The q/k norm: each head (n_T, d_ρ) has its own rms, and all heads share w (d_ρ)"""
    return [forward(q_h, w, eps) for q_h in q]


def delta_prev_heads(deltas: Sequence[Tensor], heads: Sequence[Forward], w: Tensor) -> list[Tensor]:
    """Δ^h_{i−1}, head by head"""
    return [delta_prev(delta, f.a_bar, f.rms, w) for delta, f in zip(deltas, heads, strict=True)]


def grad_w_heads(deltas: Sequence[Tensor], heads: Sequence[Forward]) -> Tensor:
    """∂w = Σ_h Σ_tok ā^h ∘ Δ^h_i"""
    return torch.stack([grad_w(delta, f.a_bar) for delta, f in zip(deltas, heads, strict=True)]).sum(0)


def forward_joint(q: Sequence[Tensor], w: Tensor, eps: float) -> tuple[list[Tensor], Forward]:
    """A q/k norm of all heads together: one rms of the n_h d_ρ features of a token, w (n_h d_ρ). The heads, and the norm"""
    f = forward(torch.cat(tuple(q), 1), w, eps)
    return list(torch.split(f.a, [q_h.shape[1] for q_h in q], 1)), f


def delta_prev_joint(deltas: Sequence[Tensor], f: Forward, w: Tensor) -> list[Tensor]:
    """Δ^h_{i−1}: every head's depends on all heads"""
    delta = delta_prev(torch.cat(tuple(deltas), 1), f.a_bar, f.rms, w)
    return list(torch.split(delta, [d.shape[1] for d in deltas], 1))

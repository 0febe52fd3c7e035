"""Grouped queries: several query heads share one key head and one value head. And the sliding window, a second mask.

    q^i  (n_T, d_ρ)   i = 0 … n_h − 1         k^g  (n_T, d_ρ), v^g  (n_T, d_h)   g = 0 … n_kv − 1
    a^i, Δ^i  (n_T, d_h)                      ρ^i, Δ_raw^i  (n_T, n_T)

n_kv divides n_h. The paper has n_kv = n_h and no window; this layer is beyond it. With n_kv = 1 it is called multi-query
attention.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .attention import delta_causal, scale
from .notation import softmax


class Forward(NamedTuple):
    rho: Tensor
    a: Tensor


def group(i: int, n_heads: int, n_kv: int) -> int:
    """g(i) = ⌊i n_kv/n_h⌋: neighboring query heads share a key head"""
    return i // (n_heads // n_kv)


def mask(scaled: Tensor, window: int | None) -> Tensor:
    """−∞ where key β is after query t or, with a window, β ≤ t − window: a query sees `window` keys, its own included"""
    n = len(scaled)
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    return scaled.masked_fill(~visible, -math.inf)


def forward(q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], window: int | None = None) -> list[Forward]:
    """a^i = ρ^i v^g(i) with ρ^i = softmax(mask(q^i (k^g(i))ᵗ/√d_ρ))"""
    heads = []
    for i, q_i in enumerate(q):
        g = group(i, len(q), len(k))
        rho = softmax(mask(scale(q_i @ k[g].t(), q_i.shape[1]), window))
        heads.append(Forward(rho, rho @ v[g]))
    return heads


def delta_raw(deltas: Sequence[Tensor], v: Sequence[Tensor], heads: Sequence[Forward], d_rho: int) -> list[Tensor]:
    """Δ_raw^i = [Δ_ρ^i − ~(Δ_ρ^i ⊖ ρ^i)] ∘ ρ^i/√d_ρ with Δ_ρ^i = Δ^i (v^g(i))ᵗ, as in (25) and (28)"""
    return [
        scale(delta_causal(delta @ v[group(i, len(heads), len(v))].t(), head.rho), d_rho)
        for i, (delta, head) in enumerate(zip(deltas, heads, strict=True))
    ]


def delta_q(delta_raws: Sequence[Tensor], k: Sequence[Tensor]) -> list[Tensor]:
    """The error signal of q^i: Δ_raw^i k^g(i)"""
    return [delta @ k[group(i, len(delta_raws), len(k))] for i, delta in enumerate(delta_raws)]


def delta_k(delta_raws: Sequence[Tensor], q: Sequence[Tensor], n_kv: int) -> list[Tensor]:
    """The error signal of k^g: the sum of (Δ_raw^i)ᵗ q^i over its group"""
    return sum_over_group([delta.t() @ q_i for delta, q_i in zip(delta_raws, q, strict=True)], n_kv)


def delta_v(deltas: Sequence[Tensor], heads: Sequence[Forward], n_kv: int) -> list[Tensor]:
    """The error signal of v^g: the sum of (ρ^i)ᵗ Δ^i over its group"""
    return sum_over_group([head.rho.t() @ delta for delta, head in zip(deltas, heads, strict=True)], n_kv)


def sum_over_group(x: Sequence[Tensor], n_kv: int) -> list[Tensor]:
    """Σ x^i over the query heads i with g(i) = g, for each g"""
    sums = [torch.zeros_like(x[0]) for _ in range(n_kv)]
    for i, x_i in enumerate(x):
        sums[group(i, len(x), n_kv)] += x_i
    return sums

"""Other scores than the paper's: a scale other than 1/√d_ρ, a cap, and a sink. For one head, as Section 3 has it.

    q, k  (n_T, d_ρ)    v, a, Δ  (n_T, d_h)    raw, scaled, capped, ρ and their Δ  (n_T, n_T)    ρ_sink  (n_T)

A sink is a learned score b, one number for each head, of a key that every query sees and whose value is 0. The paper has
none of the three; this is beyond it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .attention import delta_causal, mask
from .notation import row_dot, softmax


class Forward(NamedTuple):
    scaled: Tensor
    rho: Tensor
    rho_sink: Tensor | None
    a: Tensor


class Backward(NamedTuple):
    delta_causal: Tensor  # of what the softmax reads, which is capped
    delta_raw: Tensor  # of q kᵗ
    delta_q: Tensor
    delta_k: Tensor
    delta_v: Tensor
    grad_b: Tensor | None


def scale(raw: Tensor, sigma: float) -> Tensor:
    """s = σ q kᵗ; the backward pass multiplies by σ too"""
    return sigma * raw


def cap(s: Tensor, c: float) -> Tensor:
    """s' = c tanh(s/c), which is s where |s| ≪ c, and never beyond ±c"""
    return c * torch.tanh(s / c)


def delta_scaled(delta_capped: Tensor, s: Tensor, c: float) -> Tensor:
    """Δ_s = Δ_s' ∘ (1 − tanh²(s/c)) = Δ_s' ∘ (1 − (s'/c)²)"""
    return delta_capped * (1 - torch.tanh(s / c) ** 2)


def softmax_with_sink(s: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of n_T scores and b: ρ (n_T, n_T), whose rows sum to 1 − ρ_sink, and ρ_sink (n_T)"""
    rho = softmax(torch.cat([s, b.expand(len(s), 1)], 1))
    return rho[:, :-1], rho[:, -1]


def grad_sink(delta: Tensor, a: Tensor, rho_sink: Tensor) -> Tensor:
    """∂b = −Σ_tok ρ_sink ∘ (Δ ⊖ a): (25) of the sink's column, whose Δ_ρ is 0"""
    return -(rho_sink * row_dot(delta, a)).sum()


def forward(q: Tensor, k: Tensor, v: Tensor, sigma: float, c: float | None = None, b: Tensor | None = None) -> Forward:
    """a = softmax(mask(c tanh(σ q kᵗ/c)), b) v"""
    scaled = scale(q @ k.t(), sigma)
    seen = mask(scaled if c is None else cap(scaled, c))
    rho, rho_sink = (softmax(seen), None) if b is None else softmax_with_sink(seen, b)
    return Forward(scaled, rho, rho_sink, rho @ v)


def backward(
    delta: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Forward, scores: tuple[float, float | None]
) -> Backward:
    """Δ → the error signals of q, k and v, and ∂b; `scores` are σ and c. ρ is already 0 where the mask is."""
    sigma, c = scores
    causal = delta_causal(delta @ v.t(), saved.rho)
    raw = scale(causal if c is None else delta_scaled(causal, saved.scaled, c), sigma)
    of_sink = None if saved.rho_sink is None else grad_sink(delta, saved.a, saved.rho_sink)
    return Backward(causal, raw, raw @ k, raw.t() @ q, saved.rho.t() @ delta, of_sink)

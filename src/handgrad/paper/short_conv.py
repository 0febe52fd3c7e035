"""The short causal convolution with gates: y = C ∘ conv(B ∘ x), with [B | C | x] = a_2 w_2 (+ b_2). Not in the paper: the
layer that LFM2 has in place of attention in most of its blocks.

    B, C, x, z, c, y, Δ  (n_T, d)      w  (L, d): w_j multiplies the token j before      b  (d)

One sequence, one token and one tap at a time: a token before the first does not exist, so a sequence never reads another.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .notation import sum_tokens


class Forward(NamedTuple):
    z: Tensor  # (n_T, d)
    c: Tensor  # (n_T, d)
    y: Tensor  # (n_T, d), the input a_3 of w_3


def conv(z: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """c(t) = Σ_j w_j ∘ z(t − j) + b over the taps j = 0 … L − 1 with t − j ≥ 0"""
    c = torch.zeros_like(z)
    for t in range(len(z)):
        for j in range(min(len(w), t + 1)):
            c[t] += w[j] * z[t - j]
        if b is not None:
            c[t] += b
    return c


def forward(b_gate: Tensor, c_gate: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Forward:
    """z = B ∘ x,  c = conv(z),  y = C ∘ c"""
    z = b_gate * x
    c = conv(z, w, b)
    return Forward(z, c, c_gate * c)


def continued(state: Tensor, z: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """c of new tokens z (m, d) behind earlier ones, of which the last L − 1 rows of z are needed: state (L − 1, d),
    with zeros for those that do not exist"""
    return conv(torch.cat([state, z]), w, b)[len(w) - 1 :]


def delta_c(delta_y: Tensor, c_gate: Tensor) -> Tensor:
    """Δ_c = Δ_y ∘ C"""
    return delta_y * c_gate


def delta_c_gate(delta_y: Tensor, c: Tensor) -> Tensor:
    """Δ_C = Δ_y ∘ c"""
    return delta_y * c


def delta_z(delta: Tensor, w: Tensor) -> Tensor:
    """Δ_z(t) = Σ_j w_j ∘ Δ_c(t + j) over the taps with t + j < n_T: the convolution in the other direction"""
    signal = torch.zeros_like(delta)
    for t in range(len(delta)):
        for j in range(min(len(w), len(delta) - t)):
            signal[t] += w[j] * delta[t + j]
    return signal


def delta_b_gate(signal: Tensor, x: Tensor) -> Tensor:
    """Δ_B = Δ_z ∘ x"""
    return signal * x


def delta_x(signal: Tensor, b_gate: Tensor) -> Tensor:
    """Δ_x = Δ_z ∘ B"""
    return signal * b_gate


def grad_w(delta: Tensor, z: Tensor, taps: int) -> Tensor:
    """∂w_j = Σ_t z(t − j) ∘ Δ_c(t) over the tokens with t − j ≥ 0"""
    grad = z.new_zeros(taps, z.shape[1])
    for t in range(len(z)):
        for j in range(min(taps, t + 1)):
            grad[j] += z[t - j] * delta[t]
    return grad


def grad_b(delta: Tensor) -> Tensor:
    """∂b = Σ_tok Δ_c"""
    return sum_tokens(delta)

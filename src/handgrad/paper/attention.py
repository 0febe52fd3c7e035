"""Section 3: one head of causal self-attention (Table 1), and Section 4: many heads.

a_{i−1}     (n_T, d)
w_q, w_k    (d, d_ρ)    b_q, b_k  (d_ρ)      d_ρ need not equal d_h, and may differ from head to head
w_v         (d, d_h)    b_v       (d_h)      (R7: eq. 17 prints w_v ∈ R^{d_h})
q, k        (n_T, d_ρ)  v, a_i^h  (n_T, d_h)
raw, scaled, causal, rho and their Δ   (n_T, n_T)
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import linear
from .notation import row_dot, softmax, sum_tokens, tilde_columns


class Head(NamedTuple):
    """The parameters of one head. b_k has no effect (19) and may be None."""

    w_q: Tensor
    b_q: Tensor
    w_k: Tensor
    b_k: Tensor | None
    w_v: Tensor
    b_v: Tensor


class Forward(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    raw: Tensor
    scaled: Tensor
    causal: Tensor
    rho: Tensor
    a: Tensor


class Backward(NamedTuple):
    delta_rho: Tensor
    delta_causal: Tensor
    delta_scaled: Tensor
    delta_raw: Tensor
    delta_v: Tensor  # the three terminal branches, each (n_T, d)
    delta_q: Tensor
    delta_k: Tensor
    delta: Tensor  # their sum: Δ^h_{i−1}
    grads: Head


def scale(raw: Tensor, d_rho: int) -> Tensor:
    """ρ_scaled = ρ_raw / √d_ρ, with the d_ρ of this head; the backward pass divides by it too"""
    return raw / math.sqrt(d_rho)  # (12), (28)


def mask(scaled: Tensor) -> Tensor:
    """−∞ above the diagonal. The 0/1 product printed as (13) leaves exp(0) = 1 on every future token (R1)."""
    future = torch.ones_like(scaled, dtype=torch.bool).triu(1)
    return scaled.masked_fill(future, -math.inf)  # (13)


def forward(a: Tensor, head: Head, causal: bool = True) -> Forward:
    """a_i^h = softmax(mask(q kᵗ / √d_ρ)) v   (18)"""
    v = linear.forward(a, head.w_v, head.b_v)  # (4)
    q = linear.forward(a, head.w_q, head.b_q)  # (9.a)
    k = linear.forward(a, head.w_k, head.b_k)  # (9.b)
    raw = q @ k.t()  # (10)
    scaled = scale(raw, q.shape[1])  # (12)
    masked = mask(scaled) if causal else scaled  # (13)
    rho = softmax(masked)  # (15)
    return Forward(q, k, v, raw, scaled, masked, rho, rho @ v)  # (16)


def delta_causal(delta_rho: Tensor, rho: Tensor) -> Tensor:
    """Δ_causal = [Δ_ρ − ~(Δ_ρ ⊖ ρ)] ∘ ρ with Δ_ρ = Δ_i^h vᵗ. Each row sums to 0 (26)."""
    return (delta_rho - tilde_columns(row_dot(delta_rho, rho), rho.shape[1])) * rho  # (25)


def backward(delta: Tensor, a: Tensor, head: Head, saved: Forward) -> Backward:
    """Δ_i^h (n_T, d_h) → Δ^h_{i−1} (n_T, d) and the gradients of the head's parameters"""
    q, k, v, rho = saved.q, saved.k, saved.v, saved.rho

    # values:  Δ·da = (Δ vᵗ)·dρ + (ρᵗ Δ)·dv
    delta_v = rho.t() @ delta @ head.w_v.t()  # (22)
    grad_w_v = (rho @ a).t() @ delta  # (23)
    grad_b_v = sum_tokens(delta)  # (24), by (21)

    # attention weights: softmax, mask, scale. ρ is already 0 where the mask is, so Δ_scaled = Δ_causal (R2).
    delta_rho = delta @ v.t()
    d_causal = delta_causal(delta_rho, rho)  # (25)
    delta_scaled = d_causal  # (27)
    delta_raw = scale(delta_scaled, q.shape[1])  # (28)

    # queries and keys:  Δ_raw·d(q kᵗ) = (Δ_raw k)·dq + (Δ_rawᵗ q)·dk
    delta_q = delta_raw @ k @ head.w_q.t()  # (30.a)
    delta_k = delta_raw.t() @ q @ head.w_k.t()  # (30.b)
    grad_w_q = a.t() @ delta_raw @ k  # (31.a)
    grad_w_k = (delta_raw @ a).t() @ q  # (31.b)
    grad_b_q = sum_tokens(delta_raw @ k)  # (32.a)
    grad_b_k = None if head.b_k is None else torch.zeros_like(head.b_k)  # (32.b): exactly 0, by (29); R32

    return Backward(
        delta_rho, d_causal, delta_scaled, delta_raw, delta_v, delta_q, delta_k,
        delta_v + delta_q + delta_k,  # (33)
        Head(grad_w_q, grad_b_q, grad_w_k, grad_b_k, grad_w_v, grad_b_v),
    )  # fmt: skip


# ── many heads ──────────────────────────────────────────────────────────────────────────────────────────────────────


class ManyForward(NamedTuple):
    heads: list[Forward]
    a: Tensor  # (n_T, Σ_h d_h)


class ManyBackward(NamedTuple):
    heads: list[Backward]
    delta: Tensor  # (n_T, d)


def forward_heads(a: Tensor, heads: list[Head], causal: bool = True) -> ManyForward:
    """a_i = concat_columns[a_i^1 … a_i^{n_h}]: independent heads on the same input"""
    outs = [forward(a, head, causal) for head in heads]
    return ManyForward(outs, torch.cat([out.a for out in outs], 1))  # (34)


def slice_heads(delta: Tensor, heads: list[Head]) -> list[Tensor]:
    """Δ_i split into the columns of each head, Δ_i^h ∈ (n_T, d_h)"""
    return list(torch.split(delta, [head.w_v.shape[1] for head in heads], 1))


def backward_heads(delta: Tensor, a: Tensor, heads: list[Head], saved: ManyForward) -> ManyBackward:
    """Δ_{i−1} = Σ_h Δ^h_{i−1}"""
    slices = slice_heads(delta, heads)
    backs = [backward(d, a, head, f) for d, head, f in zip(slices, heads, saved.heads, strict=True)]
    return ManyBackward(backs, torch.stack([back.delta for back in backs]).sum(0))  # (35)

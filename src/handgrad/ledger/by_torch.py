"""One head of attention in torch's own functions: what the checks of `paper.attention` compare with."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import attention
from ..paper.attention import Head


def project(a: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (n_T, d_ρ) and v (n_T, d_h)"""
    return (
        F.linear(a, head.w_q.t(), head.b_q),
        F.linear(a, head.w_k.t(), head.b_k),
        F.linear(a, head.w_v.t(), head.b_v),
    )


def future(n: int) -> Tensor:
    """True above the diagonal. (n, n)"""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def masked(scores: Tensor) -> Tensor:
    return scores.masked_fill(future(len(scores)), -math.inf)


def head_forward(a: Tensor, head: Head) -> attention.Forward:
    """Everything that `attention.backward` needs from the forward pass."""
    q, k, v = project(a, head)
    raw = q @ k.t()
    scaled = raw / math.sqrt(q.shape[1])
    scores = masked(scaled)
    rho = F.softmax(scores, 1)
    return attention.Forward(q, k, v, raw, scaled, scores, rho, rho @ v)


def head_output(a_q: Tensor, a_k: Tensor, a_v: Tensor, head: Head) -> Tensor:
    """The head's output. The input is passed three times, so that each of its three uses can be differentiated alone."""
    q, k, v = project(a_q, head)[0], project(a_k, head)[1], project(a_v, head)[2]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

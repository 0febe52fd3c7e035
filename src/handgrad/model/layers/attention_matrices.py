"""The heads with ρ, Δ_ρ, Δ_causal and Δ_raw as matrices (equations 14 and 22–30), so that an observer can replace any of
them.

Slower than `ops/attention.py`, which never forms these matrices, and equal to it. Tensors have the shapes of a trace:
q (h, n, d_ρ), k (h_kv, n, d_ρ), v (h_kv, n, d_h), maps (h, n, n), 0 between sequences.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..passes.arguments import Pass


class Saved(NamedTuple):
    """What `backward` needs, as replaced."""

    q: Tensor
    k: Tensor
    v: Tensor
    softmax: Tensor  # ρ before an observer replaced it: the derivative of the softmax is taken there
    rho: Tensor
    a: Tensor  # (n, h, d_h)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, run: Pass) -> Saved:
    """q, k, v (n, h, d) → a_3"""
    q, k, v = (run.at(name, x.transpose(0, 1)) for name, x in zip("qkv", (q, k, v), strict=True))
    softmax = _softmax(q, k, _hidden(run.lengths, causal, window, q.device))
    rho = run.at("rho", softmax)
    return Saved(q, k, v, softmax, rho, (rho @ _per_query(v, rho)).transpose(0, 1).to(v.dtype))


def backward(delta_3: Tensor, saved: Saved, into: tuple[Tensor, Tensor, Tensor], run: Pass) -> None:
    """Δ_3 (n, h d_h) → Δ_q, Δ_k, Δ_v, written into the buffers (n, h, d)"""
    q, k, v, softmax, rho, _ = saved
    delta = delta_3.view(len(delta_3), len(q), -1).transpose(0, 1).to(rho.dtype)  # (h, n, d_h)
    delta_v = run.at("delta_v", _per_key(rho.mT @ delta, v))  # (22)
    delta_rho = run.at("delta_rho", delta @ _per_query(v, rho).mT)
    correction = (delta_rho * softmax).sum(2, keepdim=True)
    causal = run.at("delta_causal", (delta_rho - correction) * softmax)  # (25)
    raw = run.at("delta_raw", causal / math.sqrt(q.shape[2]))  # (28)
    delta_q = run.at("delta_q", raw @ _per_query(k, raw))
    delta_k = run.at("delta_k", _per_key(raw.mT @ q.to(raw.dtype), k))  # (30)
    for buffer, x in zip(into, (delta_q, delta_k, delta_v), strict=True):
        buffer.copy_(x.transpose(0, 1))


def _hidden(lengths: tuple[int, ...], causal: bool, window: int | None, device: torch.device) -> Tensor:
    """(n, n) True where a query must not see a key."""
    n = sum(lengths)
    sequence = torch.repeat_interleave(torch.tensor(lengths, device=device))
    visible = sequence[:, None] == sequence
    distance = torch.arange(n, device=device)[:, None] - torch.arange(n, device=device)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance < window
    return ~visible


def _softmax(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    """ρ = softmax(mask(q kᵗ/√d_ρ)) (h, n, n)   (14)"""
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    scores = wide @ _per_query(k, wide).mT / math.sqrt(q.shape[2])
    return torch.softmax(scores.masked_fill_(hidden, -math.inf), 2)


def _per_query(x: Tensor, like: Tensor) -> Tensor:
    """Keys or values (h_kv, n, w) → (h, n, w): each head of queries with the keys that it reads"""
    return x.repeat_interleave(len(like) // len(x), 0).to(like.dtype)


def _per_key(x: Tensor, like: Tensor) -> Tensor:
    """Signals per head of queries (h, n, w) → (h_kv, n, w), summed over the heads that share keys and values"""
    return x.view(len(like), -1, *x.shape[1:]).sum(1)

"""The heads with ρ, Δ_ρ, Δ_causal and Δ_raw as matrices (equations 14 and 22–30), so that an observer can replace any of
them. A score of a head's sink, which has no key, is one more column of the softmax, left out of ρ.

Slower than `ops/attention.py`, which never forms these matrices, and equal to it. Tensors have the shapes of a trace:
q (h, n, d_ρ), k (h_kv, n, d_ρ), v (h_kv, n, d_h), maps (h, n, n), 0 between sequences.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.calls import Scores
from ...ops.attention import scores_of
from ..passes.arguments import Pass


class Saved(NamedTuple):
    """What `backward` needs, as replaced."""

    q: Tensor
    k: Tensor
    v: Tensor
    softmax: Tensor  # ρ before an observer replaced it: the derivative of the softmax is taken there
    rho: Tensor
    a: Tensor  # (n, h, d_h)
    slope: Tensor | float  # of Δ_raw from Δ_causal: σ, or with a cap σ (1 − tanh²)
    rho_sink: Tensor | None  # (h, n, 1) the sink's column of the softmax


def forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None, run: Pass) -> Saved:
    """q, k, v (n, h, d) → a_3"""
    q, k, v = (run.at(name, x.transpose(0, 1)) for name, x in zip("qkv", (q, k, v), strict=True))
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    found = scores_of(wide, _per_query(k, wide), scores)  # (12)
    slope: Tensor | float = scores.factor(q.shape[2])
    if scores.cap is not None:
        slope = slope * (1 - (found / scores.cap).square())
    found = found.masked_fill_(_hidden(run.lengths, scores, q.device), -math.inf)
    if sinks is not None:
        column = sinks.detach().to(found.dtype)[:, None, None].expand(-1, found.shape[1], 1)
        found = torch.cat([found, column], 2)
    softmax, rho_sink = torch.softmax(found, 2), None  # (14)
    if sinks is not None:
        softmax, rho_sink = softmax[..., :-1], softmax[..., -1:]
    rho = run.at("rho", softmax)
    a = (rho @ _per_query(v, rho)).transpose(0, 1).to(v.dtype)
    return Saved(q, k, v, softmax, rho, a, slope, rho_sink)


def backward(delta_3: Tensor, saved: Saved, into: tuple[Tensor, Tensor, Tensor], run: Pass) -> Tensor | None:
    """Δ_3 (n, h d_h) → Δ_q, Δ_k, Δ_v, written into the buffers (n, h, d), and what each row adds to ∂sink (n, h)"""
    q, k, v, softmax, rho, _, slope, rho_sink = saved
    delta = delta_3.view(len(delta_3), len(q), -1).transpose(0, 1).to(rho.dtype)  # (h, n, d_h)
    delta_v = run.at("delta_v", _per_key(rho.mT @ delta, v))  # (22)
    delta_rho = run.at("delta_rho", delta @ _per_query(v, rho).mT)
    correction = (delta_rho * softmax).sum(2, keepdim=True)
    causal = run.at("delta_causal", (delta_rho - correction) * softmax)  # (25)
    raw = run.at("delta_raw", causal * slope)  # (28)
    delta_q = run.at("delta_q", raw @ _per_query(k, raw))
    delta_k = run.at("delta_k", _per_key(raw.mT @ q.to(raw.dtype), k))  # (30)
    for buffer, x in zip(into, (delta_q, delta_k, delta_v), strict=True):
        buffer.copy_(x.transpose(0, 1))
    return None if rho_sink is None else -(rho_sink * correction)[..., 0].T


def _hidden(lengths: tuple[int, ...], scores: Scores, device: torch.device) -> Tensor:
    """(n, n) True where a query must not see a key."""
    n = sum(lengths)
    sequence = torch.repeat_interleave(torch.tensor(lengths, device=device))
    visible = sequence[:, None] == sequence
    distance = torch.arange(n, device=device)[:, None] - torch.arange(n, device=device)
    if scores.causal:
        visible &= distance >= 0
    if scores.window is not None:
        visible &= distance < scores.window
    return ~visible


def _per_query(x: Tensor, like: Tensor) -> Tensor:
    """Keys or values (h_kv, n, w) → (h, n, w): each head of queries with the keys that it reads"""
    return x.repeat_interleave(len(like) // len(x), 0).to(like.dtype)


def _per_key(x: Tensor, like: Tensor) -> Tensor:
    """Signals per head of queries (h, n, w) → (h_kv, n, w), summed over the heads that share keys and values"""
    return x.view(len(like), -1, *x.shape[1:]).sum(1)

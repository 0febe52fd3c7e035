"""Beyond the paper: grouped queries, L-gqa-*, and sliding windows, L-window-*."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import attention, grouped_query
from ..proof.oracles import relative_error
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, gradient_error, shortfall


class _Inputs(NamedTuple):
    q: Tensor  # (n_h, n_T, d_ρ)
    k: Tensor  # (n_kv, n_T, d_ρ)
    v: Tensor  # (n_kv, n_T, d_h)
    delta: Tensor  # (n_h, n_T, d_h)   upstream


def _inputs(rng: RandomInputs, n_kv: int, repeat: int) -> _Inputs:
    n, d_rho, d_h = rng.size(4, 9), rng.size(2, 6), rng.size(2, 6)
    n_heads = n_kv * repeat
    return _Inputs(*(rng.matrix(h, n, w) for h, w in ((n_heads, d_rho), (n_kv, d_rho), (n_kv, d_h), (n_heads, d_h))))


def _grouped(rng: RandomInputs) -> _Inputs:
    """At least two groups of at least two heads: with fewer, every assignment of heads to groups is the same."""
    return _inputs(rng, rng.size(2, 3), rng.size(2, 3))


def _by_torch(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """All heads at once, (n_h, n_T, d_h)"""
    t = torch.arange(q.shape[1])
    distance = t[:, None] - t
    visible = (distance >= 0) & (distance < (window or len(t)))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], visible, enable_gqa=True)[0]


def _forward(x: _Inputs, window: int | None = None) -> list[grouped_query.Forward]:
    return grouped_query.forward(x.q.unbind(), x.k.unbind(), x.v.unbind(), window)


class _ErrorSignals(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def _signals(x: _Inputs, window: int | None = None) -> _ErrorSignals:
    """The error signals of all q, k and v"""
    heads = _forward(x, window)
    raw = grouped_query.delta_raw(x.delta.unbind(), x.v.unbind(), heads, x.q.shape[2])
    return _ErrorSignals(
        torch.stack(grouped_query.delta_q(raw, x.k.unbind())),
        torch.stack(grouped_query.delta_k(raw, x.q.unbind(), len(x.k))),
        torch.stack(grouped_query.delta_v(x.delta.unbind(), heads, len(x.v))),
    )


@check("L-gqa-fwd", BEYOND, "", IDENTITY)
def grouped_queries(rng: RandomInputs) -> float:
    """a^i = softmax(mask(q^i (k^g)ᵗ/√d_ρ)) v^g ∈ (n_T, d_h) with g = ⌊i n_kv/n_h⌋: neighboring query heads share k and v"""
    x = _grouped(rng)
    return relative_error(torch.stack([head.a for head in _forward(x)]), _by_torch(x.q, x.k, x.v))


@check("L-gqa-bwd", BEYOND, "", AUTOGRAD)
def grouped_queries_backward(rng: RandomInputs) -> float:
    """Δ of q^i ∈ (n_T, d_ρ) is Δ_raw^i k^g: each query head has its own"""
    x = _grouped(rng)
    return gradient_error(_signals(x).q, lambda q: _by_torch(q, x.k, x.v), x.q, x.delta, rng)


@check("L-gqa-sum", BEYOND, "", AUTOGRAD)
def grouped_keys_and_values(rng: RandomInputs) -> float:
    """Δ of k^g ∈ (n_T, d_ρ) is Σ_i (Δ_raw^i)ᵗ q^i, and Δ of v^g ∈ (n_T, d_h) is Σ_i (ρ^i)ᵗ Δ^i, over the query heads of
    the group"""
    x = _grouped(rng)
    ours = _signals(x)
    return max(
        gradient_error(ours.k, lambda k: _by_torch(x.q, k, x.v), x.k, x.delta, rng),
        gradient_error(ours.v, lambda v: _by_torch(x.q, x.k, v), x.v, x.delta, rng),
    )


@check("L-gqa-heads", BEYOND, "", IDENTITY)
def groups_of_one(rng: RandomInputs) -> float:
    """With n_kv = n_h the outputs and error signals are those of the paper's heads"""
    n, d, n_heads, d_rho, d_h = (rng.size(2, 6) for _ in range(5))
    a, deltas = rng.matrix(n, d), rng.matrix(n_heads, n, d_h)
    heads = [rng.head(d, d_rho, d_h) for _ in range(n_heads)]
    saved = [attention.forward(a, head) for head in heads]
    q, k, v = (torch.stack([getattr(f, name) for f in saved]) for name in "qkv")
    x = _Inputs(q, k, v, deltas)
    ours, errors = _signals(x), []
    for i, (head, f, out) in enumerate(zip(heads, saved, _forward(x), strict=True)):
        back = attention.backward(deltas[i], a, head, f)
        errors += [
            relative_error(out.a, f.a),
            relative_error(ours.q[i] @ head.w_q.t(), back.delta_q),
            relative_error(ours.k[i] @ head.w_k.t(), back.delta_k),
            relative_error(ours.v[i] @ head.w_v.t(), back.delta_v),
        ]
    return max(errors)


@check("L-window-fwd", BEYOND, "", IDENTITY)
def sliding_window(rng: RandomInputs) -> float:
    """With a window of w keys ρ_tβ = 0 for β ≤ t − w: each row of ρ has min(t, w) entries (t from 1), w = 1 gives a = v, and
    w ≥ n_T changes nothing"""
    x = _inputs(rng, 1, 1)
    n = x.q.shape[1]
    causal = _by_torch(x.q, x.k, x.v)
    errors = [
        relative_error(_forward(x, 1)[0].a, x.v[0]),
        relative_error(_forward(x, n)[0].a, causal[0]),
    ]
    for window in range(2, n):
        head = _forward(x, window)[0]
        seen = torch.arange(1, n + 1).clamp(max=window)
        errors += [
            relative_error(head.a, _by_torch(x.q, x.k, x.v, window)[0]),
            float(((head.rho > 0).sum(1) != seen).sum()),
            shortfall(relative_error(head.a, causal[0]), 1e-6),
        ]
    return max(errors)


@check("L-window-bwd", BEYOND, "", AUTOGRAD)
def sliding_window_backward(rng: RandomInputs) -> float:
    """Δ of q, k and v with a window: the formulas of the causal mask, with the ρ of the window"""
    x = _inputs(rng, 1, 1)
    window = rng.size(2, x.q.shape[1] - 1)
    ours = _signals(x, window)
    return max(
        gradient_error(ours.q, lambda q: _by_torch(q, x.k, x.v, window), x.q, x.delta, rng),
        gradient_error(ours.k, lambda k: _by_torch(x.q, k, x.v, window), x.k, x.delta, rng),
        gradient_error(ours.v, lambda v: _by_torch(x.q, x.k, v, window), x.v, x.delta, rng),
    )

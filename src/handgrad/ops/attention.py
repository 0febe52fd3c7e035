"""Sections 3 and 4, equations 18 and 22–35: causal self-attention of all heads, in tiles.

    q, k  (n, h, d_ρ)      v, a, Δ  (n, h, d_h)      lse  (h, n)  log-sum-exp of each row of scores

No n×n matrix is kept: the backward pass rebuilds ρ = exp(q kᵗ/√d_ρ − lse) one tile of rows at a time, over the
columns a causal row can see, so memory is linear in the tokens. `lengths` tells where the packed sequences end.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 128  # of a tile
TILE = 1 << 20  # entries of a tile, over all heads taken at once: what a core's cache holds


class Saved(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    lse: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], causal: bool) -> tuple[Tensor, Saved]:
    """a^h = softmax(mask(q kᵗ/√d_ρ)) v for every head and every sequence   (18), (34)"""
    n, n_heads, d_h = v.shape
    a = v.new_empty(n, n_heads, d_h)
    lse = torch.empty(n_heads, n, dtype=_wide(v.dtype), device=v.device)
    kernel = _forward_by_library if v.device.type == "cpu" and d_h == q.shape[2] else _forward_in_tiles
    for rows, count in _equal_runs(lengths):
        queries, keys, values = (_by_head(x[rows], count) for x in (q, k, v))
        out, row_lse = kernel(queries, keys, values, causal)
        _by_head(a[rows], count).copy_(out)
        lse[:, rows].view(n_heads, count, -1).copy_(row_lse.transpose(0, 1))
    return a, Saved(q, k, v, a, lse)


def backward(delta: Tensor, saved: Saved, lengths: tuple[int, ...], causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Δ (n, h, d_h) → the error signals of q, k and v: Δ_raw k, Δ_rawᵗ q and ρᵗ Δ, in the shapes of q, k and v"""
    q, k, v, a, lse = saved
    out = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    # (Δ vᵗ) ⊖ ρ = Δ ⊖ a: the softmax correction of (25) needs only the output and its error signal
    correction = (delta * a).sum(2).t().to(lse.dtype)
    for rows, count in _equal_runs(lengths):
        queries, keys, values, errors = (_stack(x[rows], count, lse.dtype) for x in (q, k, v, delta))
        shift, norm = (_stack(x[:, rows].t()[..., None], count, lse.dtype)[..., 0] for x in (correction, lse))
        grads = _backward_in_tiles(queries, keys, values, errors, shift, norm, causal)
        for target, grad in zip(out, grads, strict=True):
            _by_head(target[rows], count).copy_(grad.view(count, -1, *grad.shape[1:]))
    return out[0], out[1], out[2]


def maps(delta: Tensor, saved: Saved, lengths: tuple[int, ...], causal: bool) -> tuple[Tensor, Tensor]:
    """ρ and Δ_causal of every head over the whole packed stream, (h, n, n), zero between sequences: for looking at.
    The same tiles as in the backward pass, each as large as a sequence."""
    q, k, v, a, lse = saved
    correction = (delta * a).sum(2).t().to(lse.dtype)
    rho, signal = lse.new_zeros(2, *lse.shape, lse.shape[1])
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        queries, keys, values, errors = (_stack(x[rows], 1, lse.dtype) for x in (q, k, v, delta))
        rho[:, rows, rows] = rho_tile(queries, keys, lse[:, rows], 0, causal)
        signal[:, rows, rows] = causal_signal_tile(errors, values, correction[:, rows], rho[:, rows, rows])
        start += length
    return rho, signal


# ── one tile ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rho_tile(q: Tensor, k: Tensor, lse: Tensor, first: int, causal: bool) -> Tensor:
    """ρ = exp(q kᵗ/√d_ρ − lse) for the queries from row `first` on; 0 above the diagonal (R1). (g, rows, columns)"""
    scores = torch.baddbmm(lse[..., None], q, k.transpose(1, 2), beta=-1, alpha=1 / math.sqrt(q.shape[2]))
    if causal:
        scores[:, :, first:].masked_fill_(_future(q.shape[1], k.shape[1] - first, q.device), -math.inf)
    return scores.exp_()


def causal_signal_tile(delta: Tensor, v: Tensor, correction: Tensor, rho: Tensor) -> Tensor:
    """Δ_causal = [Δ vᵗ − ~(Δ ⊖ a)] ∘ ρ   (25)"""
    return torch.baddbmm(correction[..., None], delta, v.transpose(1, 2), beta=-1).mul_(rho)


def _backward_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, delta: Tensor, correction: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(g, T, width) each, g = sequences × heads. Each tile of queries sees the columns up to its own end."""
    g, n, _ = q.shape
    scale = 1 / math.sqrt(q.shape[2])
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    at_once = max(1, TILE // (min(n, ROWS) * n))
    for start in range(0, g, at_once):
        s = slice(start, start + at_once)
        for i in range(0, n, ROWS):
            e = min(i + ROWS, n)
            seen = e if causal else n
            queries, keys, values, errors = q[s, i:e], k[s, :seen], v[s, :seen], delta[s, i:e]
            rho = rho_tile(queries, keys, lse[s, i:e], i, causal)
            grad_v[s, :seen].baddbmm_(rho.transpose(1, 2), errors)  # ρᵗ Δ
            signal = causal_signal_tile(errors, values, correction[s, i:e], rho)  # (25)
            torch.baddbmm(grad_q[s, i:e], signal, keys, beta=0, alpha=scale, out=grad_q[s, i:e])  # Δ_raw k
            grad_k[s, :seen].baddbmm_(signal.transpose(1, 2), queries, alpha=scale)  # Δ_rawᵗ q
    return grad_q, grad_k, grad_v


def _forward_by_library(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's forward kernel for the CPU, which also returns the log-sum-exp. (B, h, T, w) → (B, h, T, w), (B, h, T)"""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _forward_in_tiles(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The same with matrix products alone, for any device and for d_ρ ≠ d_h."""
    batch, n_heads, n, _ = q.shape
    wide = _wide(v.dtype)
    q, k, v = (x.flatten(0, 1).to(wide) for x in (q, k, v))
    out, lse = torch.empty_like(v), torch.empty(q.shape[:2], dtype=wide, device=v.device)
    zero = lse.new_zeros(1, 1)
    for i in range(0, n, ROWS):
        e = min(i + ROWS, n)
        seen = e if causal else n
        scores = torch.baddbmm(zero[..., None], q[:, i:e], k[:, :seen].transpose(1, 2), alpha=1 / math.sqrt(q.shape[2]))
        if causal:
            scores[:, :, i:].masked_fill_(_future(e - i, seen - i, q.device), -math.inf)
        lse[:, i:e] = torch.logsumexp(scores, 2)
        out[:, i:e] = torch.bmm(scores.sub_(lse[:, i:e, None]).exp_(), v[:, :seen])
    return out.view(batch, n_heads, n, -1), lse.view(batch, n_heads, n)


# ── packing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _equal_runs(lengths: tuple[int, ...]) -> Iterator[tuple[slice, int]]:
    """Neighbouring sequences of one length are taken together: the rows they fill, and how many they are."""
    start = i = 0
    while i < len(lengths):
        count = 1
        while i + count < len(lengths) and lengths[i + count] == lengths[i]:
            count += 1
        yield slice(start, start + count * lengths[i]), count
        start += count * lengths[i]
        i += count


def _by_head(x: Tensor, count: int) -> Tensor:
    """(count · T, h, w) → (count, h, T, w), a view"""
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2)


def _stack(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """(count · T, h, w) → (count · h, T, w), contiguous and wide"""
    return _by_head(x, count).to(dtype).reshape(-1, len(x) // count, x.shape[2])


def _future(rows: int, columns: int, device: torch.device) -> Tensor:
    """True above the diagonal"""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).triu_(1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Scores and their log-sum-exp are kept at least in float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

"""Gradients per example: norms and inner products from a and Δ, without forming the gradients of a large matrix.

    a  (n, f_in)      Δ  (n, f_out)      the rows of all examples, end to end; `lengths` are the examples' numbers of rows
    ∂w_i = a_iᵗ Δ_i  (f_in, f_out)       of example i, from its rows

Two ways lead to the same numbers, and `forming` says which is cheaper. Gram matrices,
⟨∂w_i, ∂w_j⟩ = (a_i a_jᵗ) · (Δ_i Δ_jᵗ), cost n_i n_j (f_in + f_out) multiply-adds; forming every ∂w_i, of which only one
exists at a time, costs as much as ∂w itself. Results are in float64, (B) or (B, B) for B examples.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import linear

TOUCH = 24  # multiply-adds in the time that a formed gradient's entry needs to be read for its norm and added to ∂w


def forming(lengths: Sequence[int], f_in: int, f_out: int, with_grad: bool) -> bool:
    """Whether forming the examples' gradients costs less than Gram matrices. With the gradient of the batch (`with_grad`)
    a formed one replaces its share of that product; without, its product comes on top."""
    gram = sum(n * n for n in lengths) * (f_in + f_out)
    formed = len(lengths) * TOUCH * f_in * f_out
    return formed + (0 if with_grad else sum(lengths) * f_in * f_out) < gram


def formed(a: Tensor, delta: Tensor, lengths: Sequence[int], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """Yield ∂w_i = a_iᵗ Δ_i of each example, in this dtype, or in at least float32."""
    for a_i, delta_i in zip(torch.split(a, list(lengths)), torch.split(delta, list(lengths)), strict=True):
        yield linear.grad_w(delta_i, a_i, None, dtype or _wide_dtype(a))


def grams(x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """x_i x_iᵗ (n_i, n_i) of each example, in at least float32"""
    return [torch.mm(x_i, x_i.t()) for x_i in torch.split(_wide(x), list(lengths))]


def squares(grams_a: Sequence[Tensor], grams_delta: Sequence[Tensor]) -> Tensor:
    """‖∂w_i‖² = (a_i a_iᵗ) · (Δ_i Δ_iᵗ)   (B); rounding cannot make it negative"""
    return torch.stack([dot(x, y) for x, y in zip(grams_a, grams_delta, strict=True)]).clamp_(min=0)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """x · y, the Frobenius product of two tensors of one shape"""
    x, y = _wide(x), _wide(y)
    return torch.dot(x.reshape(-1), y.reshape(-1)).double()


def products(a: Tensor, delta: Tensor, lengths: Sequence[int]) -> Tensor:
    """⟨∂w_i, ∂w_j⟩ of all pairs   (B, B)"""
    f = a.shape[1] * delta.shape[1]
    if len(a) * f + len(lengths) ** 2 * f < len(a) ** 2 * (a.shape[1] + delta.shape[1]):
        flat = torch.stack([grad.reshape(-1) for grad in formed(a, delta, lengths)])
        return inner(flat, flat)
    a, delta = _wide(a), _wide(delta)
    rows = []
    for a_i, delta_i in zip(torch.split(a, list(lengths)), torch.split(delta, list(lengths)), strict=True):
        along = torch.linalg.vecdot(torch.mm(a_i, a.t()), torch.mm(delta_i, delta.t()), dim=0)  # (n)
        rows.append(sums(along.double(), lengths))
    return torch.stack(rows)


def sums(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Σ_tok x_i of each example: (n, f) → (B, f), (n) → (B), in at least float32"""
    dtype = _wide_dtype(x)
    return torch.stack([x_i.sum(0, dtype=dtype) for x_i in torch.split(x, list(lengths))])


def row_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """ℓ(t) = log Σ exp a_12(t) − a_12(t)[target] of every row: (n, V) → (n)"""
    wide = _wide(logits)
    return torch.logsumexp(wide, 1) - wide.gather(1, targets[:, None])[:, 0]


def inner(x: Tensor, y: Tensor) -> Tensor:
    """⟨x_i, y_j⟩ of gradients that are rows: (B, f), (B', f) → (B, B')"""
    return torch.mm(_wide(x), _wide(y).t()).double()


def products_with(a: Tensor, delta: Tensor, q: Tensor, lengths: Sequence[int]) -> Tensor:
    """⟨∂w_i, Q_k⟩ of given matrices q (K, f_in, f_out)   (B, K). For one matrix (a_i Q) · Δ_i, as cheap as ∂w itself; for
    several, each ∂w_i is formed once."""
    if len(q) == 1:
        wide = _wide(delta)
        along = torch.linalg.vecdot(linear.forward(a, q[0], None, dtype=wide.dtype), wide, dim=1)
        return sums(along.double(), lengths)[:, None]
    flat = q.flatten(1)
    return torch.cat([inner(grad.reshape(1, -1), flat) for grad in formed(a, delta, lengths)])


# ── embeddings, and a head that shares their matrix ─────────────────────────────────────────────────────────────────


def table_squares(delta: Tensor, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """‖ohe(ids_i)ᵗ Δ_i‖²: rows of equal ids are added first   (B)"""
    found = []
    for delta_i, ids_i in zip(torch.split(delta, list(lengths)), torch.split(ids, list(lengths)), strict=True):
        rows, where = torch.unique(ids_i, return_inverse=True)
        added = delta_i.new_zeros(len(rows), delta.shape[1]).index_add_(0, where, delta_i)
        found.append(dot(added, added))
    return torch.stack(found)


def table_products(delta: Tensor, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """⟨ohe(ids_i)ᵗ Δ_i, ohe(ids_j)ᵗ Δ_j⟩ of all pairs   (B, B)"""
    same = (ids[:, None] == ids[None, :]) * torch.mm(_wide(delta), _wide(delta).t()).double()
    return sums(sums(same, lengths).t(), lengths)


def table_head(delta_1: Tensor, a_11: Tensor, delta_12: Tensor) -> Tensor:
    """⟨E, H⟩ = (Δ_12[:, ids])ᵗ · (Δ_1 a_11ᵗ): E of the embedding (n rows), H of a tied logits layer (m rows), which has
    kept the columns `delta_12` (m, n) of the embedding's ids"""
    return dot(torch.mm(_wide(a_11), _wide(delta_1).t()), delta_12)


def table_head_products(
    delta_1: Tensor, ids: Tensor, lengths: Sequence[int], a_11: Tensor, delta_12: Tensor, counts: Sequence[int]
) -> Tensor:
    """⟨E_i, H_j⟩ of all pairs, from all rows of Δ_12 (m, V)   (B, B)"""
    met = _wide(delta_12)[:, ids] * torch.mm(_wide(a_11), _wide(delta_1).t())  # (m, n)
    return sums(sums(met.double(), counts).t(), lengths)


def _wide(x: Tensor) -> Tensor:
    """In at least float32: sums in bfloat16 have three digits."""
    return x.to(_wide_dtype(x))


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)

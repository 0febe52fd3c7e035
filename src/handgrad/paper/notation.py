"""The paper's notation as functions: one-hot rows, products, broadcasts and the row-wise softmax (Appendix A and B)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def ohe(ids: Tensor, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """One-hot rows: row t holds a single 1, in column ids[t]. Ids count from 0 (R10). (n_T,) → (n_T, n)"""
    if ids.is_floating_point() or ((ids < 0) | (ids >= n)).any():
        raise IndexError(f"ids must be integers from 0 to {n - 1}")
    return F.one_hot(ids, n).to(dtype)


def frobenius(a: Tensor, b: Tensor) -> Tensor:
    """A·B = Σ_ij A_ij B_ij, one number."""
    return (a * b).sum()


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """A ⊖ B: the dot product of each row of A with the same row of B. (n, m), (n, m) → (n,)"""
    return (a * b).sum(1)


def tilde_rows(b: Tensor, n: int) -> Tensor:
    """b~ of a feature vector: the same row for each of n tokens. (d,) → (n, d)"""
    return b.expand(n, -1)


def tilde_columns(c: Tensor, m: int) -> Tensor:
    """~c of one number per token: the same value across m columns. (n,) → (n, m)                          (50)"""
    return c[:, None].expand(-1, m)


def sum_tokens(a: Tensor) -> Tensor:
    """Σ_tok: down the rows, one number per feature. (n, d) → (d,)"""
    return a.sum(0)


def softmax(s: Tensor) -> Tensor:
    """Row-wise softmax, shifted by each row's maximum, which does not change it (54) and prevents overflow."""
    e = torch.exp(s - s.max(1, keepdim=True).values)
    return e / e.sum(1, keepdim=True)

"""The box at the end of Section 3: append one token, with the keys and values of the earlier ones cached.

    k_cache  (n_T, d_ρ)      v_cache  (n_T, d_h)      a_next  (d)  the new token's row of a_{i−1}

Each layer's cached rows stay valid because in a causal network a later token never changes an earlier row (R33).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .attention import Head, scale
from .notation import softmax


class Cache(NamedTuple):
    k: Tensor
    v: Tensor


class Step(NamedTuple):
    rho: Tensor  # (n_T + 1,)  the new last row of ρ
    a: Tensor  # (d_h,)        the new last row of a_i^h (R12: printed as a matrix)
    cache: Cache


def empty(head: Head) -> Cache:
    """The cache before the first token."""
    return Cache(head.w_k.new_zeros(0, head.w_k.shape[1]), head.w_v.new_zeros(0, head.w_v.shape[1]))


def append(a_next: Tensor, head: Head, cache: Cache) -> Step:
    """Compute only q, k and v of the new token: n(d_ρ + d_h) multiply-adds instead of n²(d_ρ + d_h)."""
    q = a_next @ head.w_q + head.b_q
    k = a_next @ head.w_k + (0 if head.b_k is None else head.b_k)
    v = a_next @ head.w_v + head.b_v
    k_cache = torch.cat([cache.k, k[None]])  # k_cache ← [k_cache ⊕ k(t_next)]
    v_cache = torch.cat([cache.v, v[None]])  # v_cache ← [v_cache ⊕ v(t_next)]
    rho = softmax(scale(q[None] @ k_cache.t(), len(q)))[0]  # 1/√d_ρ is missing in print (R4)
    return Step(rho, rho @ v_cache, Cache(k_cache, v_cache))

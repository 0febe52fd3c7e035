"""Section 2: embeddings, as a product with one-hot rows. Equations 1–3.

a_{i−1}  ids            (n_T,)
w_emb    one row per id (n_V, d)      n_V = n_vocab for tokens, n_context for positions
"""

from torch import Tensor

from .notation import ohe


def forward(ids: Tensor, w_emb: Tensor) -> Tensor:
    """a_i = ohe(a_{i−1}) w_emb ∈ (n_T, d)"""
    return ohe(ids, len(w_emb), w_emb.dtype) @ w_emb  # (2)


def grad_w(delta: Tensor, ids: Tensor, n_rows: int) -> Tensor:
    """∂w_emb = ohe(a_{i−1})ᵗ Δ_i ∈ (n_V, d): a token that occurs twice gets the sum of both rows of Δ_i."""
    return ohe(ids, n_rows, delta.dtype).t() @ delta  # (3)


def delta_one_hot(delta: Tensor, w_emb: Tensor) -> Tensor:
    """Δ_{i−1} = Δ_i w_embᵗ ∈ (n_T, n_V): the error signal of the one-hot input, if it were continuous."""
    return delta @ w_emb.t()


def forward_scaled(ids: Tensor, w_emb: Tensor, s: float) -> Tensor:
    """a_i = s ohe(a_{i−1}) w_emb, in models that multiply embeddings"""
    return s * forward(ids, w_emb)


def grad_w_scaled(delta: Tensor, ids: Tensor, n_rows: int, s: float) -> Tensor:
    """∂w_emb = s ohe(a_{i−1})ᵗ Δ_i"""
    return s * grad_w(delta, ids, n_rows)

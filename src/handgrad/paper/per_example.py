"""Gradients per example: their inner products from a and Δ, without forming them. Not in the paper, in its notation.

    a_i  (n_i, f_in)      Δ_i  (n_i, f_out)      the rows of example i; its gradient is ∂w_i = a_iᵗ Δ_i

A function `product_…` returns ⟨∂w_i, ∂w_j⟩ of one parameter, one number; with j = i it is ‖∂w_i‖².
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .notation import frobenius, ohe, sum_tokens


def batch_loss(losses: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """L = Σ_i (m_i/M) L_i, with the mean loss L_i of an example over its m_i targets, M of all"""
    return torch.stack([m / sum(counts) * loss for m, loss in zip(counts, losses, strict=True)]).sum()


def grad_w(a_i: Tensor, delta_i: Tensor, count: int, total: int) -> Tensor:
    """∂L_i/∂w = (M/m_i) a_iᵗ Δ_i, from the rows of the batch's Δ = ∂L/∂a"""
    return total / count * a_i.t() @ delta_i


def product_w(a_i: Tensor, delta_i: Tensor, a_j: Tensor, delta_j: Tensor) -> Tensor:
    """⟨a_iᵗ Δ_i, a_jᵗ Δ_j⟩ = (a_i a_jᵗ) · (Δ_i Δ_jᵗ), two matrices (n_i, n_j)"""
    return frobenius(a_i @ a_j.t(), delta_i @ delta_j.t())


def product_b(delta_i: Tensor, delta_j: Tensor) -> Tensor:
    """⟨Σ_tok Δ_i, Σ_tok Δ_j⟩"""
    return sum_tokens(delta_i) @ sum_tokens(delta_j)


def product_gain(delta_i: Tensor, a_bar_i: Tensor, delta_j: Tensor, a_bar_j: Tensor) -> Tensor:
    """⟨Σ_tok ā_i ∘ Δ_i, Σ_tok ā_j ∘ Δ_j⟩, of a norm's gain"""
    return sum_tokens(a_bar_i * delta_i) @ sum_tokens(a_bar_j * delta_j)


def product_table(ids_i: Tensor, delta_i: Tensor, ids_j: Tensor, delta_j: Tensor, n_vocab: int) -> Tensor:
    """An embedding's input is ohe(ids): (ohe(ids_i) ohe(ids_j)ᵗ) · (Δ_i Δ_jᵗ), where the first is 1 where ids are equal"""
    return product_w(ohe(ids_i, n_vocab), delta_i, ohe(ids_j, n_vocab), delta_j)


def product_table_head(ids_i: Tensor, delta_1_i: Tensor, a_11_j: Tensor, delta_12_j: Tensor) -> Tensor:
    """⟨ohe(ids_i)ᵗ Δ_1i, (a_11jᵗ Δ_12j)ᵗ⟩ = (ohe(ids_i) Δ_12jᵗ) · (Δ_1i a_11jᵗ): the two uses of a tied matrix meet"""
    return frobenius(ohe(ids_i, delta_12_j.shape[1]) @ delta_12_j.t(), delta_1_i @ a_11_j.t())


def product_tied(
    ids: tuple[Tensor, Tensor], delta_1: tuple[Tensor, Tensor], a_11: tuple[Tensor, Tensor], delta_12: tuple[Tensor, Tensor]
) -> Tensor:  # fmt: skip
    """⟨E_i + H_i, E_j + H_j⟩ of a tied matrix, with E of the embedding and H of the logits layer: four terms"""
    (ids_i, ids_j), (e_i, e_j), (a_i, a_j), (d_i, d_j) = ids, delta_1, a_11, delta_12
    own = product_table(ids_i, e_i, ids_j, e_j, d_i.shape[1]) + product_w(a_i, d_i, a_j, d_j)
    return own + product_table_head(ids_i, e_i, a_j, d_j) + product_table_head(ids_j, e_j, a_i, d_i)


def product_d(a: tuple[Tensor, Tensor], delta: tuple[Tensor, Tensor], u: Tensor, scale: float) -> Tensor:
    """∂d_i = a_iᵗ g_i with g_i = scale · Δ_i uᵗ (n_i, r): (a_i a_jᵗ) · (g_i g_jᵗ)"""
    return product_w(a[0], scale * delta[0] @ u.t(), a[1], scale * delta[1] @ u.t())


def product_u(a: tuple[Tensor, Tensor], delta: tuple[Tensor, Tensor], d: Tensor, scale: float) -> Tensor:
    """∂u_i = scale · h_iᵗ Δ_i with h_i = a_i d (n_i, r): scale² (h_i h_jᵗ) · (Δ_i Δ_jᵗ)"""
    return scale**2 * product_w(a[0] @ d, delta[0], a[1] @ d, delta[1])


def product_m(delta: tuple[Tensor, Tensor], z: tuple[Tensor, Tensor], c: Tensor) -> Tensor:
    """∂m_i = Σ_tok (Δ_i ∘ z_i) diag(1/c), DoRA's magnitude"""
    return (sum_tokens(delta[0] * z[0]) / c) @ (sum_tokens(delta[1] * z[1]) / c)


def product_with(a_i: Tensor, delta_i: Tensor, q: Tensor) -> Tensor:
    """⟨∂w_i, Q⟩ with a given Q (f_in, f_out): (a_i Q) · Δ_i"""
    return frobenius(a_i @ q, delta_i)

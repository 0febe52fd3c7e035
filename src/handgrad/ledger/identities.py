"""Appendix A: matrix identities, checked on rectangular matrices, for which they hold too.

A Frobenius product may cancel almost completely, so its error is relative to the size of the terms.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..paper import attention, notation
from ..proof.oracles import relative_error
from .check import IDENTITY, RandomInputs, check


def _four(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A with the shape of BCD, all four rectangular"""
    n, m, r, f = (rng.size(2, 8) for _ in range(4))
    return rng.matrix(n, f), rng.matrix(n, m), rng.matrix(m, r), rng.matrix(r, f)


def _three(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor]:
    n, m = rng.size(2, 8), rng.size(2, 8)
    return rng.matrix(n, m), rng.matrix(n, m), rng.matrix(n, m)


def _mixing_error(causal: bool, rng: RandomInputs) -> float:
    """Rows of a head's output against their sums over all tokens, or over the tokens before them."""
    d = rng.size(1, 8)
    f = attention.forward(rng.matrix(rng.size(2, 8), d), rng.head(d, rng.size(1, 8), rng.size(1, 8)), causal)
    n = len(f.v)
    mixed = [
        sum((f.rho[t, j] * f.v[j] for j in range(t + 1 if causal else n)), torch.zeros_like(f.v[0])) for t in range(n)
    ]
    return relative_error(f.a, torch.stack(mixed))


check(
    "P-linmix",
    12,
    "47",
    IDENTITY,
    "row t of ρa mixes all rows of a: Σ_j ρ_tj a(j); here with the weights and the values of a head without a mask",
)(partial(_mixing_error, False))
check(
    "P-linmix-causal",
    12,
    "48",
    IDENTITY,
    "with a triangular ρ, row t of ρv mixes only the rows 1 … t, which is (5.a)–(5.d)",
)(partial(_mixing_error, True))


def _trace_error(cycled: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], rng: RandomInputs) -> float:
    """Both A·(BCD) and its cycled form must be Tr(AᵗBCD)."""
    a, b, c, d = _four(rng)
    expected, size = torch.trace(a.t() @ b @ c @ d), (a.norm() * (b @ c @ d).norm()).item()
    return max(relative_error(x, expected, size) for x in (notation.frobenius(a, b @ c @ d), cycled(a, b, c, d)))


check("P-frob-D", 12, "", IDENTITY, "A·(BCD) = [(BC)ᵗA]·D, both Tr(AᵗBCD)")(
    partial(_trace_error, lambda a, b, c, d: notation.frobenius((b @ c).t() @ a, d))
)
check("P-frob-C", 12, "", IDENTITY, "A·(BCD) = (BᵗADᵗ)·C, both Tr(AᵗBCD)")(
    partial(_trace_error, lambda a, b, c, d: notation.frobenius(b.t() @ a @ d.t(), c))
)
check("P-frob-B", 12, "", IDENTITY, "A·(BCD) = [A(CD)ᵗ]·B, both Tr(AᵗBCD)")(
    partial(_trace_error, lambda a, b, c, d: notation.frobenius(a @ (c @ d).t(), b))
)


@check("P-frob-T", 12, "49", IDENTITY)
def frobenius_transposed(rng: RandomInputs) -> float:
    """A·Bᵗ = Aᵗ·B, both Tr(AB)"""
    n, m = rng.size(2, 8), rng.size(2, 8)
    a, b = rng.matrix(n, m), rng.matrix(m, n)
    expected, size = torch.trace(a @ b), (a.norm() * b.norm()).item()
    sides = notation.frobenius(a, b.t()), notation.frobenius(a.t(), b)
    return max(relative_error(side, expected, size) for side in sides)


@check("P-had-frob", 12, "", IDENTITY)
def hadamard_inside_frobenius(rng: RandomInputs) -> float:
    """A·(B∘C) = (A∘B)·C, both Σ_ij A_ij B_ij C_ij"""
    a, b, c = _three(rng)
    expected, size = torch.einsum("ij,ij,ij->", a, b, c), (a.norm() * (b * c).norm()).item()
    sides = notation.frobenius(a, b * c), notation.frobenius(a * b, c)
    return max(relative_error(side, expected, size) for side in sides)


@check("P-bcast-ftdot", 12, "50", IDENTITY)
def broadcast_row_products(rng: RandomInputs) -> float:
    """~(A⊖B) repeats a_i·b_i along row i, and is the product (A∘B)J with a matrix of ones"""
    a, b, _ = _three(rng)
    n, m = a.shape
    ours = notation.tilde_columns(notation.row_dot(a, b), m)
    entries = torch.stack([torch.dot(a[i], b[i]) for i in range(n) for _ in range(m)]).view(n, m)
    product = (a * b) @ torch.ones(m, m, dtype=a.dtype)
    size = (a * b).abs().sum(1).max().item()
    return max(relative_error(ours, entries, size), relative_error(ours, product, size))


@check("P-potpourri", 12, "51", IDENTITY)
def broadcast_moves_across(rng: RandomInputs) -> float:
    """(A∘B)·~(B⊖C) = [~(A⊖B)∘B]·C, both Σ_i (a_i·b_i)(b_i·c_i)"""
    a, b, c = _three(rng)
    m = a.shape[1]
    left = notation.frobenius(a * b, notation.tilde_columns(notation.row_dot(b, c), m))
    right = notation.frobenius(notation.tilde_columns(notation.row_dot(a, b), m) * b, c)
    expected = torch.einsum("ij,ij,ik,ik->", a, b, b, c)
    size = torch.einsum("ij,ij,ik,ik->", a.abs(), b.abs(), b.abs(), c.abs()).item()
    return max(relative_error(left, expected, size), relative_error(right, expected, size))


@check("P-sumrows", 12, "52", IDENTITY)
def sum_of_the_rows_of_a_product(rng: RandomInputs) -> float:
    """Σ_rows AB = a↕ B, where a↕ holds the sums of the columns of A"""
    n, m, f = rng.size(2, 8), rng.size(2, 8), rng.size(1, 8)
    a, b = rng.matrix(n, m), rng.matrix(m, f)
    expected = torch.einsum("ik,kj->j", a, b)
    size = (a.abs() @ b.abs()).sum(0).max().item()
    sides = notation.sum_tokens(a @ b), notation.sum_tokens(a) @ b
    return max(relative_error(side, expected, size) for side in sides)

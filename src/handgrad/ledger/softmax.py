"""Appendix B: the row-wise softmax is invariant to a shift of each row and commutes with permutations."""

import torch
from torch import Tensor

from ..paper import attention, notation
from ..proof.oracles import relative_error
from .check import IDENTITY, RandomInputs, check, shortfall


def _shift(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor]:
    """G (n, n), H (n, f) and b (f), with λ_1 = h_1·b = 1 and λ_2 = h_2·b = −1 so that the shifts are not all equal"""
    n, f = rng.size(3, 8), rng.size(1, 8)
    g, h, b = rng.matrix(n, n), rng.matrix(n, f), rng.matrix(f)
    h[0], h[1] = b / b.dot(b), -b / b.dot(b)
    return g, h, b


@check("D-shift-setup", 13, "53", IDENTITY)
def scores_with_a_key_bias(rng: RandomInputs) -> float:
    """q kᵗ = G + H b~ᵗ with G = (a w_q + b_q~)(a w_k)ᵗ, H = a w_q + b_q~ and b = b_k"""
    n, d, d_rho = rng.size(2, 8), rng.size(1, 8), rng.size(1, 8)
    a, w_q, w_k, b_q, b_k = rng.matrix(n, d), rng.matrix(d, d_rho), rng.matrix(d, d_rho), *rng.matrix(2, d_rho)
    head = attention.Head(w_q, b_q, w_k, b_k, rng.matrix(d, 1), rng.matrix(1))
    f, bare = attention.forward(a, head), attention.forward(a, head._replace(b_k=None))
    h = torch.addmm(b_q, a, w_q)
    g = h @ (a @ w_k).t()
    shift = h @ notation.tilde_rows(b_k, n).t()
    size = (g.abs() + shift.abs()).max().item()
    return max(relative_error(f.q, h), relative_error(bare.raw, g, size), relative_error(f.raw, bare.raw + shift, size))


@check("P-shift-rows", 13, "", IDENTITY)
def shift_is_constant_along_a_row(rng: RandomInputs) -> float:
    """H b~ᵗ has constant rows: row i is λ_i = h_i·b"""
    g, h, b = _shift(rng)
    shift = h @ notation.tilde_rows(b, len(g)).t()
    lambdas = torch.mv(h, b)
    size = (h.abs() @ b.abs()).max().item()
    return max(
        relative_error(shift, notation.tilde_columns(lambdas, len(g)), size),
        relative_error(shift, lambdas.outer(torch.ones_like(lambdas)), size),
        shift.std(1).max().item() / size,
    )


@check("P-softmax-shift", 13, "54", IDENTITY)
def softmax_ignores_a_shift_of_its_rows(rng: RandomInputs) -> tuple[float, str]:
    """softmax(G + H b~ᵗ) = softmax G; shifting the columns instead changes it"""
    g, h, b = _shift(rng)
    shift = h @ notation.tilde_rows(b, len(g)).t()
    expected = torch.softmax(g, 1)
    error = relative_error(notation.softmax(g + shift), expected)
    # λ_1 − λ_2 = 2, so one of the first two columns changes by a factor of e or more
    moved = (notation.softmax(g + shift.t()).log() - expected.log()).abs().max().item()
    return error + shortfall(moved, 0.999), f"shifted columns change log ρ by {moved:.2f}"


@check("P-softmax-rows", 13, "55.a", IDENTITY)
def softmax_commutes_with_permuted_rows(rng: RandomInputs) -> float:
    """softmax(P A) = P softmax A"""
    n, d = rng.size(2, 8), rng.size(2, 8)
    a, p = rng.matrix(n, d), rng.permutation(n)
    expected = p @ torch.softmax(a, 1)
    return max(relative_error(notation.softmax(p @ a), expected), relative_error(p @ notation.softmax(a), expected))


@check("P-softmax-cols", 13, "55.b", IDENTITY)
def softmax_commutes_with_permuted_columns(rng: RandomInputs) -> float:
    """softmax(B P) = softmax(B) P; with (55.a), softmax(P S Pᵗ) = P softmax(S) Pᵗ"""
    n, d = rng.size(2, 8), rng.size(2, 8)
    b, s, p = rng.matrix(d, n), rng.matrix(n, n), rng.permutation(n)
    columns = torch.softmax(b, 1) @ p
    both = p @ torch.softmax(s, 1) @ p.t()
    return max(
        relative_error(notation.softmax(b @ p), columns),
        relative_error(notation.softmax(b) @ p, columns),
        relative_error(notation.softmax(p @ s @ p.t()), both),
        relative_error(p @ notation.softmax(s) @ p.t(), both),
    )

"""Section 6, equations 43–46: the low-rank branch, bracketed so that d·u is never formed.

    a  (n, f_in)      d  (f_in, r)  down      u  (r, f_out)  up      Δ  (n, f_out)
    h = scale · a d  (n, r)                   g = scale · Δ uᵗ  (n, r)

These are the terms of the branch; the frozen layer adds its own part of Δ (R3). With dropout the branch reads
ã = mask ∘ a instead of a. With a magnitude (DoRA) the sum of both paths, z, is rescaled column by column:
y = z ∘ m/c + b, and every formula here takes Δ ∘ m/c for Δ.
"""

import torch
from torch import Tensor

from . import linear


def project(a: Tensor, d: Tensor, scale: float) -> Tensor:
    """h = a (scale · d), which is an operand of further products"""
    return _product(a, d * scale, dtype=a.dtype)


def branch(a: Tensor, d: Tensor, u: Tensor, scale: float) -> linear.Branch:
    """h and u: the product that is added to that of the frozen layer, in the same pass over its result   (43)"""
    return project(a, d, scale), u


def forward(a: Tensor, d: Tensor, u: Tensor, scale: float, into: Tensor) -> Tensor:
    """a_i += h u, added to the frozen layer's output; returns h for the backward pass   (43)"""
    h = project(a, d, scale)
    _product(h, u, into)
    return h


def upstream(delta: Tensor, u: Tensor, scale: float) -> Tensor:
    """g = scale · Δ uᵗ: the error signal of h, used by `backward` and `grad_d`"""
    return _product(delta, (u * scale).t(), dtype=delta.dtype)


def backward(g: Tensor, d: Tensor, into: Tensor, mask: Tensor | None = None) -> None:
    """Δ_{i−1} += g dᵗ   (44), times the dropout mask if given"""
    if mask is None:
        into.addmm_(g, d.t())
    else:
        into.add_(torch.mm(g, d.t()) * mask)


def grad_d(g: Tensor, a: Tensor, into: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """∂d += aᵗ g   (45)"""
    return _product(a.t(), g, into, dtype)


def grad_u(delta: Tensor, h: Tensor, into: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """∂u += hᵗ Δ   (46)"""
    return _product(h.t(), delta, into, dtype)


def _product(x: Tensor, y: Tensor, into: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x y, added to `into` if that is given; in mixed precision the result has its own dtype."""
    if torch.bfloat16 in (x.dtype, y.dtype):
        return linear.product(x, y, into, dtype, add=into is not None)
    return torch.mm(x, y) if into is None else into.addmm_(x, y)


# ── dropout and magnitude ───────────────────────────────────────────────────────────────────────────────────────────


def mask(like: Tensor, dropout: float, seed: int) -> Tensor:
    """0 with probability `dropout`, else 1/(1 − dropout), which preserves the mean; determined by the seed. In float32 at
    least: both passes of a layer must have the same factor, whatever the dtypes of their tensors."""
    generator = torch.Generator(like.device).manual_seed(seed)
    drawn = torch.empty_like(like).bernoulli_(1 - dropout, generator=generator)
    return drawn.to(torch.promote_types(like.dtype, torch.float32)).div_(1 - dropout)


def masked(a: Tensor, mask: Tensor | None) -> Tensor:
    """ã = mask ∘ a, rounded once to the dtype of a"""
    return a if mask is None else (a * mask).to(a.dtype)


def column_norms(w: Tensor, d: Tensor, u: Tensor, scale: float) -> Tensor:
    """c_j = ‖(w + scale · d u)_{:, j}‖   (f_out)"""
    norms: Tensor = torch.linalg.vector_norm(torch.addmm(w.to(d.dtype), d, u, alpha=scale), dim=0)
    return norms


def grad_m(delta: Tensor, z: Tensor, c: Tensor, into: Tensor | None) -> Tensor:
    """∂m += Σ_tok Δ ∘ z / c   (f_out)"""
    wide = delta.float() if delta.dtype == torch.bfloat16 else delta  # bfloat16 would round every product
    grad = torch.linalg.vecdot(wide, z.to(wide.dtype), dim=0).div_(c).to(c.dtype)  # in mixed precision Δ is narrower
    return grad if into is None else into.add_(grad)

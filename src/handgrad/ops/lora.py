"""Section 6, equations 43–46: the low-rank branch, bracketed so that d·u is never formed.

    a  (n, f_in)      d  (f_in, r)  down      u  (r, f_out)  up      Δ  (n, f_out)
    h = a d  (n, r)                           g = scale · Δ uᵗ  (n, r)

These are the branch's own terms. The frozen layer beside it carries its part of Δ as ever (R3).
"""

import torch
from torch import Tensor


def forward(a: Tensor, d: Tensor, u: Tensor, scale: float, into: Tensor) -> Tensor:
    """a_i += scale · (a d) u, added to what the frozen layer gave; returns h = a d for the way back   (43)"""
    h = torch.mm(a, d)
    into.addmm_(h, u, alpha=scale)
    return h


def upstream(delta: Tensor, u: Tensor, scale: float) -> Tensor:
    """g = scale · Δ uᵗ: the error signal of h, shared by the next two"""
    return torch.mm(delta, u.t()).mul_(scale)


def backward(g: Tensor, d: Tensor, into: Tensor) -> None:
    """Δ_{i−1} += g dᵗ   (44)"""
    into.addmm_(g, d.t())


def grad_d(g: Tensor, a: Tensor, into: Tensor | None) -> Tensor:
    """∂d += aᵗ g   (45)"""
    return torch.mm(a.t(), g) if into is None else into.addmm_(a.t(), g)


def grad_u(delta: Tensor, h: Tensor, scale: float, into: Tensor | None) -> Tensor:
    """∂u += scale · hᵗ Δ   (46)"""
    h = h * scale
    return torch.mm(h.t(), delta) if into is None else into.addmm_(h.t(), delta)

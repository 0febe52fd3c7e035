"""Section 6: low-rank adaptation. Equations 43–46.

    a_{i−1}  (n_T, f_in)      d  (f_in, r)  down      u  (r, f_out)  up      scale  one number

The paper's factor α is called `scale` here: with its "usually α = r" it would multiply the branch by r, whereas in the
common convention scale = α/r (or α/√r), so that α = r means a factor of 1 (R11).
These are the formulas of the branch only. With a frozen layer, both paths carry the error signal (R3): see
`transformer.py`, where Δ_11 = Δ_12 w_11ᵗ + scale Δ_12 (d u)ᵗ.
"""

from torch import Tensor


def forward(a: Tensor, d: Tensor, u: Tensor, scale: float) -> Tensor:
    """a_i = scale · a_{i−1} d u"""
    return scale * a @ d @ u  # (43)


def delta_prev(delta: Tensor, d: Tensor, u: Tensor, scale: float) -> Tensor:
    """Δ_{i−1} = scale · Δ_i (d u)ᵗ"""
    return scale * delta @ (d @ u).t()  # (44)


def grad_d(delta: Tensor, a: Tensor, u: Tensor, scale: float) -> Tensor:
    """∂d = scale · a_{i−1}ᵗ Δ_i uᵗ"""
    return scale * a.t() @ delta @ u.t()  # (45)


def grad_u(delta: Tensor, a: Tensor, d: Tensor, scale: float) -> Tensor:
    """∂u = scale · (a_{i−1} d)ᵗ Δ_i"""
    return scale * (a @ d).t() @ delta  # (46)


# Not in the paper, in its notation: dropout on the input of the branch, and DoRA, which gives each column of z, the sum
# of frozen layer and branch, a trained magnitude: a_i = z diag(m/c) + b~.


def delta_prev_dropped(delta: Tensor, d: Tensor, u: Tensor, scale: float, mask: Tensor) -> Tensor:
    """The branch reads mask ∘ a_{i−1}, so Δ_{i−1} = mask ∘ scale · Δ_i (d u)ᵗ"""
    return mask * (scale * delta @ (d @ u).t())


def column_norms(w: Tensor, d: Tensor, u: Tensor, scale: float) -> Tensor:
    """c_j = √(Σ_i (w + scale · d u)_{ij}²)"""
    return (w + scale * d @ u).square().sum(0).sqrt()


def forward_magnitude(z: Tensor, m: Tensor, c: Tensor) -> Tensor:
    """a_i = z diag(m/c)"""
    return z @ (m / c).diag()


def delta_z(delta: Tensor, m: Tensor, c: Tensor) -> Tensor:
    """Δ_z = Δ_i diag(m/c), with c held constant"""
    return delta @ (m / c).diag()


def grad_m(delta: Tensor, z: Tensor, c: Tensor) -> Tensor:
    """∂m = Σ_tok (Δ_i ∘ z) diag(1/c)"""
    return (delta * z).sum(0) / c

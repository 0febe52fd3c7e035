"""Layers that the paper does not have: checks L-<layer>-<what>, reported beside the paper's own.

A layer has at least a check of its forward pass (L-<layer>-fwd) and one of its backward pass (L-<layer>-bwd).
"""

from torch import Tensor

from ...paper import activation
from ..oracles import relative_error
from ..reference import ACTIVATIONS
from .check import AUTOGRAD, BEYOND, IDENTITY, Lab, check
from .head_backward import gradient_error

# ── squared ReLU ────────────────────────────────────────────────────────────────────────────────────────────────────


def _draw_activation(lab: Lab) -> tuple[Tensor, Tensor]:
    """a (n_T, f) with an entry at 0, where a kink would be, and an upstream Δ (n_T, f)"""
    n, f = lab.size(3, 8), lab.size(2, 8)
    a, delta = 3 * lab.matrix(n, f), lab.matrix(n, f)
    a[0, 0] = 0.0
    a[1, 1] = a[1, 1].abs() + 0.1  # both sides of 0 occur in every draw
    a[2, 1] = -a[2, 1].abs() - 0.1
    return a, delta


@check("L-relu2-fwd", BEYOND, "", IDENTITY)
def squared_relu(lab: Lab) -> float:
    """a_8 = max(a_7, 0)² ∈ (n_T, 4d)"""
    a, _ = _draw_activation(lab)
    return relative_error(activation.g(a, "relu2"), ACTIVATIONS["relu2"](a))


@check("L-relu2-bwd", BEYOND, "", AUTOGRAD)
def squared_relu_backward(lab: Lab) -> float:
    """Δ_7 = 2 Δ_8∘max(a_7, 0) ∈ (n_T, 4d); the slope is continuous, so finite differences agree at a_7 = 0 too"""
    a, delta = _draw_activation(lab)
    return gradient_error(activation.delta_prev(delta, a, "relu2"), ACTIVATIONS["relu2"], a, delta, lab)

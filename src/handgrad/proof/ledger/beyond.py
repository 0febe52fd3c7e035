"""Layers that the paper does not have: checks L-<layer>-<what>, reported next to the paper's.

A layer has at least a check of its forward pass (L-<layer>-fwd) and one of its backward pass (L-<layer>-bwd).
"""

from torch import Tensor

from ...paper import activation
from ..oracles import relative_error
from ..reference import ACTIVATIONS
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, gradient_error

# ── squared ReLU ────────────────────────────────────────────────────────────────────────────────────────────────────


def _activation_inputs(rng: RandomInputs) -> tuple[Tensor, Tensor]:
    """a (n_T, f) with an entry at 0, where a kink would be, and an upstream Δ (n_T, f)"""
    n, f = rng.size(3, 8), rng.size(2, 8)
    a, delta = 3 * rng.matrix(n, f), rng.matrix(n, f)
    a[0, 0] = 0.0
    a[1, 1] = a[1, 1].abs() + 0.1  # both sides of 0 occur in every sample
    a[2, 1] = -a[2, 1].abs() - 0.1
    return a, delta


@check("L-relu2-fwd", BEYOND, "", IDENTITY)
def squared_relu(rng: RandomInputs) -> float:
    """a_8 = max(a_7, 0)² ∈ (n_T, 4d)"""
    a, _ = _activation_inputs(rng)
    return relative_error(activation.g(a, "relu2"), ACTIVATIONS["relu2"](a))


@check("L-relu2-bwd", BEYOND, "", AUTOGRAD)
def squared_relu_backward(rng: RandomInputs) -> float:
    """Δ_7 = 2 Δ_8∘max(a_7, 0) ∈ (n_T, 4d); the slope is continuous, so finite differences agree at a_7 = 0 too"""
    a, delta = _activation_inputs(rng)
    return gradient_error(activation.delta_prev(delta, a, "relu2"), ACTIVATIONS["relu2"], a, delta, rng)

"""Beyond the paper: the gated feed-forward, L-silu-* and L-gate-*."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..paper import gated, linear
from ..proof.oracles import relative_error
from ..proof.reference import ACTIVATIONS
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, gradient_error, mismatch

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": ACTIVATIONS["gelu"],
    "gelu_tanh": ACTIVATIONS["gelu_tanh"],
}


def _inputs(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and an upstream Δ (n_T, f)"""
    n, f = rng.size(3, 8), rng.size(2, 8)
    return 3 * rng.matrix(n, f), rng.matrix(n, f), rng.matrix(n, f)


@check("L-silu-fwd", BEYOND, "", IDENTITY)
def silu(rng: RandomInputs) -> float:
    """g(x) = x σ(x) with σ(x) = 1/(1 + e^(−x))"""
    x, _, _ = _inputs(rng)
    return max(relative_error(gated.g(x, "silu"), F.silu(x)), relative_error(gated.g(x, "silu"), x / (1 + (-x).exp())))


@check("L-silu-bwd", BEYOND, "", AUTOGRAD)
def silu_backward(rng: RandomInputs) -> float:
    """Δ∘g'(x) with g'(x) = σ(x)(1 + x(1 − σ(x)))"""
    x, _, delta = _inputs(rng)
    return gradient_error(delta * gated.g_prime(x, "silu"), F.silu, x, delta, rng)


@check("L-gate-fwd", BEYOND, "", IDENTITY)
def gated_forward(rng: RandomInputs) -> float:
    """a_8 = g(gate)∘up ∈ (n_T, f) for SiLU, GELU and its tanh form"""
    gate, up, _ = _inputs(rng)
    errors = [mismatch((set(gated.NAMES), set(GATES)))]
    errors += [relative_error(gated.forward(gate, up, name), g(gate) * up) for name, g in GATES.items()]
    return max(errors)


@check("L-gate-bwd", BEYOND, "", AUTOGRAD)
def gated_backward(rng: RandomInputs) -> float:
    """Δ_gate = Δ_8∘up∘g'(gate) and Δ_up = Δ_8∘g(gate) ∈ (n_T, f) for SiLU, GELU and its tanh form"""
    gate, up, delta = _inputs(rng)
    errors = []
    for name, g in GATES.items():
        d_gate, d_up = gated.delta_gate(delta, gate, up, name), gated.delta_up(delta, gate, name)
        errors.append(gradient_error(d_gate, lambda x, g=g: g(x) * up, gate, delta, rng))  # type: ignore[misc]
        errors.append(gradient_error(d_up, lambda x, g=g: g(gate) * x, up, delta, rng))  # type: ignore[misc]
    return max(errors)


@check("L-gate-branches", BEYOND, "", AUTOGRAD)
def gated_branches(rng: RandomInputs) -> float:
    """Δ_6 = Δ_gate w_gateᵗ + Δ_up w_upᵗ ∈ (n_T, d): a_6 enters both branches; ∂w_gate = a_6ᵗ Δ_gate, ∂w_up = a_6ᵗ Δ_up"""
    n, d, f = rng.size(3, 6), rng.size(2, 6), rng.size(2, 8)
    a, w_gate, w_up, delta = rng.matrix(n, d), rng.matrix(d, f), rng.matrix(d, f), rng.matrix(n, f)
    gate, up = linear.forward(a, w_gate, None), linear.forward(a, w_up, None)
    errors = []
    for name, g in GATES.items():
        d_gate, d_up = gated.delta_gate(delta, gate, up, name), gated.delta_up(delta, gate, name)

        def network(a: Tensor, w_gate: Tensor, w_up: Tensor, g: Callable[[Tensor], Tensor] = g) -> Tensor:
            return g(F.linear(a, w_gate.t())) * F.linear(a, w_up.t())

        errors += [
            gradient_error(
                gated.delta_prev(d_gate, d_up, w_gate, w_up), lambda x: network(x, w_gate, w_up), a, delta, rng
            ),
            gradient_error(linear.grad_w(d_gate, a), lambda x: network(a, x, w_up), w_gate, delta, rng),
            gradient_error(linear.grad_w(d_up, a), lambda x: network(a, w_gate, x), w_up, delta, rng),
        ]
    return max(errors)

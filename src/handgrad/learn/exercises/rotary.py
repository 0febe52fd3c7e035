"""Exercise: rotary positions."""

import torch
from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper import rotary
from ..exercise import Case, Exercise, Line


def case(label: str, x: Tensor, positions: Tensor, theta: Tensor, delta: Tensor) -> Case:
    name = "delta_prev"
    return Case(
        label, (delta, positions, theta), lambda x: rotary.forward(x, positions, theta, False), {name: x}, delta,
        mistakes={name: {
            "it were rotated forward, by R(t), instead of back, by R(t)ᵗ": rotary.forward(delta, positions, theta, False),
            "nothing were rotated": delta,
            "the planes were interleaved: features 2i and 2i + 1": rotary.delta_prev(delta, positions, theta, True),
            "positions counted from 1 instead of 0": rotary.delta_prev(delta, positions + 1, theta, False),
        }},
    )  # fmt: skip


def _random(rng: RandomInputs) -> Case:
    n, d_rho = rng.size(4, 6), 2 * rng.size(4, 5)
    tensors = rng.matrix(n, d_rho), torch.arange(n), rotary.frequencies(d_rho, 10_000.0)
    return case(f"random numbers, {n} tokens, {d_rho} features", *tensors, rng.matrix(n, d_rho))


EXERCISE = Exercise(
    name="rotary",
    title="rotary positions",
    text="""
    Llama tells positions apart by rotating queries and keys: plane i of the token at position t turns by the angle
    θ_i t.

        y_t = R(t) x_t                  in plane i, features (i, i + d/2):   [cos −sin; sin cos] of θ_i t

    rotation(t, theta, False) is the matrix R(t), (d, d). There are no parameters: θ is fixed.
    """,
    arguments=(
        Line("delta", "(n_T, d)", "Δ = ∂L/∂y"),
        Line("positions", "(n_T)", "t of each token, an integer"),
        Line("theta", "(d/2)", "θ"),
    ),
    returns=(Line("delta_prev", "(n_T, d)", "∂L/∂x"),),
    imports=("from handgrad.paper.rotary import rotation",),
    hints=(
        "For one token it is a product with a constant matrix, y = R x. What does Δ have to be multiplied with?",
        "With Rᵗ, and the transpose of a rotation is the rotation by the opposite angle.",
        "Token by token: torch.stack([rotation(t, theta, False).t() @ row for t, row in zip(positions.tolist(),"
        " delta)]). A check: every row of the answer is as long as the row of delta.",
    ),
    quoted=(rotary.delta_prev,),
    solution_body="return delta_prev(delta, positions, theta, False)",
    page="rotary",
    case=case,
    random=_random,
)

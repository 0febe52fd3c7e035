"""Exercise: a low-rank adapter (44)–(46)."""

from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper import lora
from ..exercise import Case, Exercise, Line


def case(label: str, a: Tensor, d: Tensor, u: Tensor, scale: float, delta: Tensor) -> Case:
    return Case(
        label, (delta, a, d, u, scale), lambda a, d, u: lora.forward(a, d, u, scale),
        {"delta_prev": a, "grad_d": d, "grad_u": u}, delta,
        scales={"scale": scale, "scale²": scale**2, "n_T": float(len(a)), "r": float(len(u))},
    )  # fmt: skip


def _random(rng: RandomInputs) -> Case:
    n, f_in, f_out, r = rng.size(4, 5), rng.size(6, 8), rng.size(9, 11), rng.size(2, 3)
    scale = 0.27 + 0.14 * rng.size(0, 3)  # no simple factor
    tensors = rng.matrix(n, f_in), rng.matrix(f_in, r), rng.matrix(r, f_out)
    return case(f"random numbers, {n} tokens, rank {r}", *tensors, scale, rng.matrix(n, f_out))


EXERCISE = Exercise(
    name="lora",
    title="low-rank adapter (LoRA)",
    text="""
    An adapter adds a small branch to a frozen layer: down to rank r, and up again.

        a_i = scale · a_{i−1} d u

    Write the gradients of the branch. r is small, so the order of the products decides how much work it is: (d u) has
    the size of the frozen matrix, a_{i−1} d has only r columns.
    """,
    arguments=(
        Line("delta", "(n_T, f_out)", "Δ_i = ∂L/∂a_i"),
        Line("a", "(n_T, f_in)", "a_{i−1}, the input"),
        Line("d", "(f_in, r)", "down"),
        Line("u", "(r, f_out)", "up"),
        Line("scale", "", "one number", "float"),
    ),
    returns=(
        Line("delta_prev", "(n_T, f_in)", "Δ_{i−1}, the part that comes through the branch"),
        Line("grad_d", "(f_in, r)", "∂d"),
        Line("grad_u", "(r, f_out)", "∂u"),
    ),
    imports=(),
    hints=(
        "Two fully connected layers in a row, without offsets: apply the answer of `linear` twice.",
        "The error signal between the two is Δ uᵗ, with r columns. What comes in there is a d.",
        "∂u = scale · (a d)ᵗ Δ, ∂d = scale · aᵗ (Δ uᵗ), Δ_{i−1} = scale · (Δ uᵗ) dᵗ.",
    ),
    quoted=(lora.delta_prev, lora.grad_d, lora.grad_u),
    solution_body="return delta_prev(delta, d, u, scale), grad_d(delta, a, u, scale), grad_u(delta, a, d, scale)",
    page="lora",
    case=case,
    random=_random,
)

"""Exercise: the fully connected layer."""

from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper import linear
from ..exercise import Case, Exercise, Line


def case(label: str, a: Tensor, w: Tensor, b: Tensor, delta: Tensor) -> Case:
    n, f_in, f_out = len(a), *w.shape
    return Case(
        label, (delta, a, w), linear.forward, {"delta_prev": a, "grad_w": w, "grad_b": b}, delta,
        unsummed={"grad_w": a[:, :, None] * delta[:, None, :], "grad_b": delta} if n * f_in * f_out < 1e6 else {},
        scales={"n_T": float(n), "f_in": float(f_in), "f_out": float(f_out)},
    )  # fmt: skip


def _random(rng: RandomInputs) -> Case:
    n, f_in, f_out = rng.size(3, 5), rng.size(6, 8), rng.size(9, 11)
    tensors = rng.matrix(n, f_in), rng.matrix(f_in, f_out), rng.matrix(f_out), rng.matrix(n, f_out)
    return case(f"random numbers, {n} tokens, {f_in} → {f_out} features", *tensors)


EXERCISE = Exercise(
    name="linear",
    title="fully connected layer",
    text="""
    Every token is multiplied by the same matrix:

        a_i = a_{i−1} w + b~            b~: the same row b for each token

    Three things went in, so three gradients come out: of the input, which the layer below needs, and of both
    parameters, which the optimizer needs.
    """,
    arguments=(
        Line("delta", "(n_T, f_out)", "Δ_i = ∂L/∂a_i"),
        Line("a", "(n_T, f_in)", "a_{i−1}, the input"),
        Line("w", "(f_in, f_out)", "the weights"),
    ),
    returns=(
        Line("delta_prev", "(n_T, f_in)", "Δ_{i−1} = ∂L/∂a_{i−1}"),
        Line("grad_w", "(f_in, f_out)", "∂w"),
        Line("grad_b", "(f_out)", "∂b"),
    ),
    imports=("from handgrad.paper.notation import sum_tokens",),
    hints=(
        "A gradient has the shape of what it belongs to. Only one product of delta and w has the shape of a, and"
        " only one product of a and delta has the shape of w.",
        "The differential: Δ·da_i = Δ·(da w) + Δ·(a dw) + Δ·db~. Bring each to the form (…)·da, (…)·dw, (…)·db, with"
        " A·(B C) = (A Cᵗ)·B = (Bᵗ A)·C.",
        "Δ_{i−1} = Δ_i wᵗ and ∂w = a_{i−1}ᵗ Δ_i. b was used once for every token, so its gradient is the sum over"
        " the tokens.",
    ),
    quoted=(linear.delta_prev, linear.grad_w, linear.grad_b),
    solution_body="return delta_prev(delta, w), grad_w(delta, a), grad_b(delta)",
    page="linear",
    case=case,
    random=_random,
)

"""Exercise: RMSNorm, the norm of Llama."""

import torch
from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper import rmsnorm
from ..exercise import Case, Exercise, Line

EPS = 1e-5


def case(label: str, a: Tensor, w: Tensor, delta: Tensor, eps: float = EPS) -> Case:
    made = rmsnorm.forward(a, w, eps)
    n, d = a.shape
    a_bar, rms = made.a_bar, made.rms[:, None]
    g = delta * w
    part = a_bar * (g * a_bar).mean(1, keepdim=True)
    return Case(
        label, (delta, a_bar, made.rms, w), lambda a, w: rmsnorm.forward(a, w, eps).a, {"delta_prev": a, "grad_w": w}, delta,
        terms={"delta_prev": {
            "the direct term, Δ_i diag(w) / rms": g / rms,
            "the term of rms, −ā ∘ ~(G ⊖ ā) / (d rms)": -part / rms,
        }},
        mistakes={
            "delta_prev": {
                "1/rms were left out": g - part,
                "w were left out": rmsnorm.delta_prev(delta, a_bar, made.rms, torch.ones_like(w)),
                "the mean of G were taken away, as in LayerNorm": (g - g.mean(1, keepdim=True) - part) / rms,
                "G ⊖ ā were not divided by d": (g - d * part) / rms,
            },
            "grad_w": {"ā were left out": delta.sum(0), "w were a factor in it": w * (a_bar * delta).sum(0)},
        },
        unsummed={"grad_w": a_bar * delta},
        scales={"d": float(d), "n_T": float(n)},
    )  # fmt: skip


def _random(rng: RandomInputs) -> Case:
    n, d = rng.size(3, 5), rng.size(7, 11)
    return case(
        f"random numbers, {n} tokens, {d} features", 2 * rng.matrix(n, d) + 1, 1 + 0.5 * rng.matrix(d), rng.matrix(n, d)
    )


EXERCISE = Exercise(
    name="rmsnorm",
    title="RMSNorm",
    text="""
    Llama's norm leaves out the mean and the offset:

        ā   = a_{i−1} / rms             rms = √(mean of a_{i−1}² + ε), one number per token
        a_i = ā diag(w)
    """,
    arguments=(
        Line("delta", "(n_T, d)", "Δ_i = ∂L/∂a_i"),
        Line("a_bar", "(n_T, d)", "ā"),
        Line("rms", "(n_T)", "rms"),
        Line("w", "(d)", "the gain"),
    ),
    returns=(
        Line("delta_prev", "(n_T, d)", "Δ_{i−1} = ∂L/∂a_{i−1}"),
        Line("grad_w", "(d)", "∂w"),
    ),
    imports=("from handgrad.paper.notation import row_dot, sum_tokens, tilde_columns",),
    hints=(
        "It is LayerNorm without one of its two corrections. Which one belongs to the mean?",
        "d(a/rms) = da/rms − a d(rms)/rms², and d(rms) = (a · da)/(d rms), with the product over the features of the"
        " token.",
        "For each row: Δ_{i−1} = [G − ā · (G · ā)/d] / rms with G = Δ_i diag(w).",
    ),
    quoted=(rmsnorm.delta_prev, rmsnorm.grad_w),
    solution_body="return delta_prev(delta, a_bar, rms, w), grad_w(delta, a_bar)",
    page="rmsnorm",
    case=case,
    random=_random,
)

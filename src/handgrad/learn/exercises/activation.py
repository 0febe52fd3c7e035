"""Exercise: the derivative of GELU."""

import math

import torch
from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper import activation
from ..exercise import Case, Exercise, Line

GELU = "gelu_tanh"


def case(label: str, x: Tensor, delta: Tensor) -> Case:
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    t = torch.tanh(u)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    name = "delta_prev"
    return Case(
        label, (delta, x), lambda x: activation.g(x, GELU), {name: x}, delta,
        terms={name: {
            "Δ ∘ (1 + tanh u)/2": delta * (1 + t) / 2,
            "Δ ∘ x/2 (1 − tanh² u) u', the derivative inside tanh": delta * x / 2 * (1 - t * t) * slope,
        }},
        mistakes={name: {
            "it were multiplied by g instead of g'": delta * activation.g(x, GELU),
            "delta were left out": activation.g_prime(x, GELU),
            "u' were left out (the chain rule inside tanh)": delta * ((1 + t) / 2 + x / 2 * (1 - t * t)),
            "the 3 in the derivative of x³ were left out": delta * ((1 + t) / 2 + x / 2 * (1 - t * t)
                * math.sqrt(2 / math.pi) * (1 + 0.044715 * x * x)),
            "the activation were the other GELU, x Φ(x)": delta * activation.g_prime(x, "gelu"),
            "the activation were ReLU": delta * activation.g_prime(x, "relu"),
        }},
        scales={"√(2/π)": math.sqrt(2 / math.pi)},
    )  # fmt: skip


def _random(rng: RandomInputs) -> Case:
    n, f = rng.size(3, 5), rng.size(7, 11)
    return case(f"random numbers, {n} × {f}", 2 * rng.matrix(n, f), rng.matrix(n, f))


EXERCISE = Exercise(
    name="activation",
    title="activation (GELU)",
    text="""
    The activation works on every number separately. GPT-2's is the tanh form of GELU:

        g(x) = x/2 (1 + tanh u)         u = √(2/π) (x + 0.044715 x³)

    You need g', its derivative.
    """,
    arguments=(
        Line("delta", "(n_T, f)", "Δ_i = ∂L/∂g(x)"),
        Line("x", "(n_T, f)", "a_{i−1}, the input"),
    ),
    returns=(Line("delta_prev", "(n_T, f)", "Δ_{i−1} = ∂L/∂x"),),
    imports=("import math",),
    hints=(
        "Each output depends on one input only, so Δ_{i−1} = Δ_i ∘ g'(x): the rest is the derivative of a function"
        " of one number.",
        "x stands in g twice, outside and inside tanh. Product rule: g' = (1 + tanh u)/2 + x/2 · (tanh u)'.",
        "Chain rule: (tanh u)' = (1 − tanh² u) u', with u' = √(2/π) (1 + 3 · 0.044715 x²).",
    ),
    quoted=(activation._inner,),
    solution_body="""\
t = torch.tanh(_inner(x))
slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
return delta * ((1 + t) / 2 + x / 2 * (1 - t * t) * slope)""",
    page="activation",
    case=case,
    random=_random,
)

"""Exercise: layer normalization (40)–(42)."""

import torch
from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper import layernorm
from ..exercise import Case, Exercise, Line

EPS = 1e-5


def case(label: str, a: Tensor, w: Tensor, b: Tensor, delta: Tensor, eps: float = EPS) -> Case:
    made = layernorm.forward(a, w, b, eps)
    n, d = a.shape
    a_bar, sigma = made.a_bar, made.sigma[:, None]
    g = delta * w
    mean, spread = g.mean(1, keepdim=True), a_bar * (g * a_bar).mean(1, keepdim=True)
    return Case(
        label, (delta, a_bar, made.sigma, w), lambda a, w, b: layernorm.forward(a, w, b, eps).a,
        {"delta_prev": a, "grad_w": w, "grad_b": b}, delta,
        terms={"delta_prev": {
            "the direct term, Δ_i diag(w) / σ": g / sigma,
            "the term of the mean, −Σ_feat G / (d σ)": (-mean / sigma).expand_as(a),
            "the term of σ, −ā ∘ Σ_feat(ā ∘ G) / (d σ)": -spread / sigma,
        }},
        mistakes={
            "delta_prev": {
                "1/σ were left out": g - mean - spread,
                "w were left out": layernorm.delta_prev(delta, a_bar, made.sigma, torch.ones_like(w)),
                "μ and σ were constants, as if they did not depend on the input and w were left out": delta / sigma,
                "the sums went over the tokens instead of the features":
                    (g - g.mean(0) - a_bar * (g * a_bar).mean(0)) / sigma,
                "the sums were not divided by d": (g - d * mean - d * spread) / sigma,
            },
            "grad_w": {"ā were left out": delta.sum(0), "w were a factor in it": w * (a_bar * delta).sum(0)},
            "grad_b": {"w were a factor in it": w * delta.sum(0)},
        },
        unsummed={"grad_w": a_bar * delta, "grad_b": delta},
        scales={"d": float(d), "n_T": float(n)},
    )  # fmt: skip


def _random(rng: RandomInputs) -> Case:
    n, d = rng.size(3, 5), rng.size(7, 11)
    return case(
        f"random numbers, {n} tokens, {d} features", 2 * rng.matrix(n, d) + 1, 1 + 0.5 * rng.matrix(d), rng.matrix(d),
        rng.matrix(n, d),
    )  # fmt: skip


EXERCISE = Exercise(
    name="layernorm",
    title="layer normalization",
    text="""
    Each token is shifted and scaled to mean 0 and mean square 1 over its d features, then gets a learned gain and
    offset:

        ā   = (a_{i−1} − μ) / σ         μ, σ: mean and deviation of the row, one number per token
        a_i = ā diag(w) + b~            σ = √(mean of (a_{i−1} − μ)² + ε)

    μ and σ depend on the input too: moving one feature moves all the others of its token. That is what makes this
    backward pass the most interesting of the small ones. You are given ā and σ, as the forward pass saved them; no ε
    is needed.
    """,
    arguments=(
        Line("delta", "(n_T, d)", "Δ_i = ∂L/∂a_i"),
        Line("a_bar", "(n_T, d)", "ā"),
        Line("sigma", "(n_T)", "σ"),
        Line("w", "(d)", "the gain"),
    ),
    returns=(
        Line("delta_prev", "(n_T, d)", "Δ_{i−1} = ∂L/∂a_{i−1}"),
        Line("grad_w", "(d)", "∂w"),
        Line("grad_b", "(d)", "∂b"),
    ),
    imports=("from handgrad.paper.notation import row_dot, sum_tokens, tilde_columns, tilde_rows",),
    hints=(
        "Begin with the parameters: a_i = ā diag(w) + b~ is linear in both, and each was used once per token. Then"
        " let G = Δ_i diag(w) be the error signal of ā.",
        "If μ and σ were constants, the answer would be G / σ. Now take away what a common shift of the row (through"
        " μ) and a common scaling (through σ) would contribute: ā does not notice either.",
        "For each row: Δ_{i−1} = [G − mean(G) − ā · mean(ā ∘ G)] / σ, with means over the d features. Checks: every"
        " row of the answer sums to 0, and so does its product with ā, nearly.",
    ),
    quoted=(layernorm.delta_prev, layernorm.grad_w, layernorm.grad_b),
    solution_body="return delta_prev(delta, a_bar, sigma, w), grad_w(delta, a_bar), grad_b(delta)",
    page="layernorm",
    case=case,
    random=_random,
)

"""Exercise: the backward pass of a row-wise softmax (25)."""

from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper.attention import delta_causal
from ...paper.notation import row_dot, softmax, tilde_columns
from ..exercise import Case, Exercise, Line


def case(label: str, scores: Tensor, delta_rho: Tensor) -> Case:
    rho = softmax(scores)
    mean = tilde_columns(row_dot(delta_rho, rho), rho.shape[1])
    name = "delta_scores"
    return Case(
        label, (delta_rho, rho), softmax, {name: scores}, delta_rho,
        terms={name: {"the first term, Δ_ρ ∘ ρ": delta_rho * rho, "the second term, −~(Δ_ρ ⊖ ρ) ∘ ρ": -mean * rho}},
        mistakes={name: {
            "the last factor, ∘ ρ, were left out": delta_rho - mean,
            "the sum Δ_ρ ⊖ ρ went down the columns instead of along the rows": (
                delta_rho - (delta_rho * rho).sum(0, keepdim=True)) * rho,
            "the sum were over Δ_ρ alone, not over Δ_ρ ∘ ρ": (delta_rho - delta_rho.sum(1, keepdim=True)) * rho,
        }},
        scales={"the number of columns": float(rho.shape[1])},
    )  # fmt: skip


def _random(rng: RandomInputs) -> Case:
    n, m = rng.size(3, 6), rng.size(7, 9)
    return case(f"random numbers, {n} × {m}", 2 * rng.matrix(n, m), rng.matrix(n, m))


EXERCISE = Exercise(
    name="softmax",
    title="softmax of the scores",
    text="""
    A softmax turns each row of scores s into positive weights that sum to 1:

        ρ_tj = exp(s_tj) / Σ_k exp(s_tk)

    In attention, row t of ρ says how much token t reads of every token j. You are given Δ_ρ, the error signal of ρ.
    Raising one score raises its own weight and lowers all others of the row, so each entry of the answer needs its
    whole row.
    """,
    arguments=(
        Line("delta_rho", "(n, m)", "Δ_ρ = ∂L/∂ρ"),
        Line("rho", "(n, m)", "ρ, the output of the softmax"),
    ),
    returns=(Line("delta_scores", "(n, m)", "∂L/∂s"),),
    imports=("from handgrad.paper.notation import row_dot, tilde_columns",),
    hints=(
        "Differentiate one entry: ∂ρ_tk/∂s_tj = ρ_tk (1 − ρ_tj) if k = j, and −ρ_tk ρ_tj otherwise.",
        "Sum over k: ∂L/∂s_tj = Σ_k Δ_tk ∂ρ_tk/∂s_tj = ρ_tj (Δ_tj − Σ_k Δ_tk ρ_tk). The sum is one number per row.",
        "row_dot(delta_rho, rho) is that number for every row, (n,); tilde_columns(c, m) repeats it across the"
        " columns. A check without a formula: every row of the answer sums to 0.",
    ),
    quoted=(delta_causal,),
    solution_body="return delta_causal(delta_rho, rho)",
    page="attention",
    case=case,
    random=_random,
)

"""Exercise: one head of attention (22)–(33)."""

import math

from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper import attention
from ...paper.attention import Head
from ..exercise import Case, Exercise, Line


def case(label: str, a: Tensor, head: Head, delta: Tensor) -> Case:
    saved = attention.forward(a, head)
    right = attention.backward(delta, a, head, saved)
    root = math.sqrt(saved.q.shape[1])
    scores = right.delta_q + right.delta_k
    softmax_alone = attention.scale(right.delta_rho * saved.rho, saved.q.shape[1])
    unsoftened = softmax_alone @ saved.k @ head.w_q.t() + softmax_alone.t() @ saved.q @ head.w_k.t()
    fields = [f"grads.{name}" for name in Head._fields]
    return Case(
        label, (delta, a, head, saved), lambda a, *weights: attention.forward(a, Head(*weights)).a,
        {"delta_prev": a, **{f"grads.{name}": x for name, x in head._asdict().items()}}, delta,
        terms={"delta_prev": {
            "the branch of the values, ρᵗ Δ w_vᵗ": right.delta_v,
            "the branch of the queries, Δ_raw k w_qᵗ": right.delta_q,
            "the branch of the keys, Δ_rawᵗ q w_kᵗ": right.delta_k,
            "the branches of queries and keys": scores,
        }},
        mistakes={
            "delta_prev": {
                "the scores were not divided by √d_ρ": right.delta_v + root * scores,
                "the scores were divided by d_ρ": right.delta_v + scores / root,
                "the softmax's second term, −~(Δ_ρ ⊖ ρ) ∘ ρ, were left out": right.delta_v + unsoftened,
                "ρ were not transposed in the branch of the values":
                    saved.rho @ delta @ head.w_v.t() + scores,
                "Δ_raw were not transposed in the branch of the keys":
                    right.delta_v + right.delta_q + right.delta_raw @ saved.q @ head.w_k.t(),
            },
            "grads.w_q": {"the softmax's second term were left out": a.t() @ softmax_alone @ saved.k},
            "grads.w_k": {
                "Δ_raw were not transposed": a.t() @ right.delta_raw @ saved.q,
                "the softmax's second term were left out": a.t() @ softmax_alone.t() @ saved.q,
            },
            "grads.w_v": {"ρ were left out": a.t() @ delta, "ρ were not transposed": a.t() @ saved.rho @ delta},
            "grads.b_v": {"ρ were not transposed": (saved.rho @ delta).sum(0)},
        },
        unsummed={"grads.b_q": right.delta_raw @ saved.k, "grads.b_v": delta},
        scales={"√d_ρ": root, "d_ρ": root * root, "n_T": float(len(a))},
        returns=["delta_prev", ["grads", *fields]],
    )  # fmt: skip


def _random(rng: RandomInputs) -> Case:
    n, d, d_rho, d_h = rng.size(5, 6), rng.size(7, 8), rng.size(3, 4), rng.size(9, 10)
    return case(f"random numbers, {n} tokens", rng.matrix(n, d), rng.head(d, d_rho, d_h), rng.matrix(n, d_h))


EXERCISE = Exercise(
    name="attention",
    title="one head of attention",
    text="""
    The heart of the transformer, as the paper's Table 1 has it:

        q = a w_q + b_q~      k = a w_k + b_k~      v = a w_v + b_v~
        raw = q kᵗ      scaled = raw / √d_ρ      causal = scaled, −∞ above the diagonal
        ρ = softmax(causal)      a_i = ρ v

    `saved` holds q, k, v and rho of the forward pass, `head` the parameters. The input is read three times, so three
    branches send an error signal back. delta_causal is the answer of the first exercise, and scale(x, d_rho) divides
    by √d_ρ.
    """,
    arguments=(
        Line("delta", "(n_T, d_h)", "Δ_i = ∂L/∂a_i"),
        Line("a", "(n_T, d)", "a_{i−1}, the input"),
        Line("head", "", "parameters w_q, b_q, w_k, b_k, w_v, b_v", "Head"),
        Line("saved", "", "q, k, v, rho (and raw, scaled, causal, a) of the forward pass", "Forward"),
    ),
    returns=(
        Line("delta_prev", "(n_T, d)", "Δ_{i−1}, the sum of three branches"),
        Line("grads", "", "Head(w_q, b_q, w_k, b_k, w_v, b_v): their gradients", "Head"),
    ),
    imports=(
        "from handgrad.paper.attention import Backward, Forward, Head, delta_causal, scale",
        "from handgrad.paper.notation import sum_tokens",
    ),
    hints=(
        "Begin with a_i = ρ v, a product of two matrices that both depend on the input: the error signal of v is ρᵗ"
        " Δ, that of ρ is Δ vᵗ.",
        "From Δ_ρ through the softmax (delta_causal), then the division by √d_ρ: that is Δ_raw. ρ is 0 above the"
        " diagonal, so the mask needs nothing. raw = q kᵗ is a product again: q gets Δ_raw k, and k gets Δ_rawᵗ q.",
        "Each of q, k, v is a fully connected layer of a: its error signal times wᵗ goes back, aᵗ times it is ∂w,"
        " and its sum over the tokens is ∂b. ∂b_k is exactly 0: adding the same to all keys shifts whole rows of"
        " scores, which the softmax ignores.",
    ),
    quoted=(attention.backward,),
    solution_body="""\
made = attention_backward(delta, a, head, saved)
return made.delta, made.grads""",
    page="attention",
    case=case,
    random=_random,
    stub="""\
q, k, v, rho = saved.q, saved.k, saved.v, saved.rho

delta_prev = ...
grads = Head(w_q=..., b_q=..., w_k=..., b_k=..., w_v=..., b_v=...)
return delta_prev, grads""",
)

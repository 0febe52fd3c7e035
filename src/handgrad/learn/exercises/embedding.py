"""Exercise: the gradient of an embedding table (3)."""

import torch
from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper import embedding
from ..exercise import Case, Exercise, Line


def case(label: str, ids: Tensor, w_emb: Tensor, delta: Tensor) -> Case:
    last = torch.zeros_like(w_emb)
    last[ids] = delta
    counts = torch.bincount(ids, minlength=len(w_emb)).clamp(min=1).double()[:, None]
    return Case(
        label, (delta, ids, len(w_emb)), lambda w: embedding.forward(ids, w), {"grad_w": w_emb}, delta,
        mistakes={"grad_w": {
            "a token that occurs several times got one row of Δ instead of the sum": last,
            "a token that occurs several times got the mean instead of the sum":
                embedding.grad_w(delta, ids, len(w_emb)) / counts,
        }},
        scales={"n_T": float(len(ids))},
    )  # fmt: skip


def _random(rng: RandomInputs) -> Case:
    n, n_vocab, d = rng.size(6, 8), rng.size(9, 12), rng.size(3, 5)
    ids = rng.ids(n, n_vocab)
    ids[n // 2] = ids[0]  # one token occurs twice
    return case(f"random numbers, {n} tokens, {n_vocab} ids", ids, rng.matrix(n_vocab, d), rng.matrix(n, d))


EXERCISE = Exercise(
    name="embedding",
    title="embedding table",
    text="""
    Each token looks up its row of a table:

        a_i[t] = w_emb[ids[t]]

    As a matrix product it is ohe(ids) w_emb, where row t of ohe(ids) is 1 at ids[t] and 0 elsewhere. Ids are no
    numbers to differentiate, so the only gradient is that of the table.
    """,
    arguments=(
        Line("delta", "(n_T, d)", "Δ_i = ∂L/∂a_i"),
        Line("ids", "(n_T)", "the id of each token"),
        Line("n_rows", "", "number of rows of the table", "int"),
    ),
    returns=(Line("grad_w", "(n_rows, d)", "∂w_emb"),),
    imports=("from handgrad.paper.notation import ohe",),
    hints=(
        "Row v of the table was copied to every place t with ids[t] = v. What happens to the gradient of something"
        " that was used several times?",
        "Add row t of delta to row ids[t] of the answer, for every t; rows of ids that do not occur stay 0."
        " grad_w[ids] = delta would keep only the last of several.",
        "As a product: ohe(ids, n_rows)ᵗ delta. torch's index_add_ does the same without the matrix of ones and zeros.",
    ),
    quoted=(embedding.grad_w,),
    solution_body="return grad_w(delta, ids, n_rows)",
    page="embedding",
    case=case,
    random=_random,
)

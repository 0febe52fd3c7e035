"""Exercise: the error signal of the logits, through softmax and cross-entropy."""

import torch
from torch import Tensor

from ...ledger.check import RandomInputs
from ...paper import loss
from ...paper.notation import ohe, softmax
from ..exercise import Case, Exercise, Line


def case(label: str, a_12: Tensor, targets: Tensor) -> Case:
    y_pred = softmax(a_12)
    y_gt = loss.y_gt(targets, a_12.shape[1], a_12.dtype)
    name, rows = "delta_12", (targets != loss.NO_TARGET).double()[:, None]
    n = rows.sum().item()
    return Case(
        label, (y_pred, targets), lambda a_12: loss.forward(a_12, targets) / n, {name: a_12}, None,
        terms={name: {"y_pred/n, on the rows that have a target": rows * y_pred / n, "−y_gt/n": -y_gt / n}},
        mistakes={name: {
            "the rows without a target were not 0": (y_pred - y_gt) / n,
            "the rows without a target had the target 0": (y_pred - ohe(targets.clamp(min=0), a_12.shape[1])) / n,
            "the target were one id too far": rows * (y_pred - y_gt.roll(1, 1)) / n,
            "the softmax were differentiated twice": rows * (y_pred - y_gt) * y_pred * (1 - y_pred) / n,
            "all rows were counted, also those without a target": rows * (y_pred - y_gt) / len(targets),
        }},
        scales={"the number of targets": n, "n_T": float(len(targets))},
    )  # fmt: skip


def _random(rng: RandomInputs) -> Case:
    n, n_vocab = rng.size(5, 7), rng.size(8, 11)
    targets = torch.cat([rng.ids(n - 2, n_vocab), torch.tensor([loss.NO_TARGET] * 2)]).roll(rng.size(0, 1))
    return case(f"random numbers, {n} × {n_vocab}", 2 * rng.matrix(n, n_vocab), targets)


EXERCISE = Exercise(
    name="loss",
    title="softmax with cross-entropy",
    text="""
    The logits a_12 give each token of the vocabulary a probability, and the loss is the mean of the surprises at the
    right tokens:

        y_pred = softmax(a_12)          L = − 1/n Σ_t log y_pred[t, targets[t]]

    The sum runs over the n rows that have a target. A row without one has targets[t] = NO_TARGET (−100) and adds
    nothing. Here the backward pass begins: there is no Δ to start from.
    """,
    arguments=(
        Line("y_pred", "(n_T, n_vocab)", "the probabilities"),
        Line("targets", "(n_T)", "the id of each next token, or NO_TARGET"),
    ),
    returns=(Line("delta_12", "(n_T, n_vocab)", "Δ_12 = ∂L/∂a_12"),),
    imports=(
        "from handgrad.paper.loss import NO_TARGET",
        "from handgrad.paper.notation import ohe, row_dot, tilde_columns",
    ),
    hints=(
        "For one row with target j, the surprise is −a_j + log Σ_k exp(a_k). Differentiate both parts with respect to a_k.",
        "The first part gives −1 at the target and 0 elsewhere, the second y_pred. Together: y_pred − y_gt, where"
        " y_gt is 1 at the target. L is a mean, so every row is divided by n, the number of targets.",
        "ohe(ids, n_vocab) makes the one-hot rows, but it refuses −100: replace it by 0 first (targets.clamp(min=0))"
        " and multiply those rows by 0 afterwards. A check: every row of the answer sums to 0.",
    ),
    quoted=(loss.y_gt, loss.delta_logits),
    solution_body="n = (targets != NO_TARGET).sum()\nreturn delta_logits(y_pred, targets) / n",
    page="loss",
    case=case,
    random=_random,
)

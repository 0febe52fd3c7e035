"""The balance loss that a model of transformers adds to its loss where `output_router_logits` is True.

    c E Σ_e f_e P_e      f_e = tokens that chose expert e / n,      P_e = Σ p_e / n

over the n rows of all mixtures together: a token counts once in each block. Padding counts nowhere. Its error signal goes to
the scores of the routers: c (E/n) p ∘ (f − ⟨p, f⟩).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import HandgradError
from ...model.gpt import GPT
from ...model.inspect.trace import record_pass
from ...ops import experts
from .batch import AuditBatch


class Balance(NamedTuple):
    """The loss of one batch."""

    coefficient: float
    tokens: Tensor  # (E), of all blocks
    p: Tensor  # (E), summed over all rows
    rows: int

    @property
    def value(self) -> float:
        return self.coefficient * experts.balance(self.tokens, self.p, self.rows).item()

    def signal(self, scores: Tensor) -> Tensor:
        """What it adds to the error signal of these scores."""
        return self.coefficient * experts.delta_balance(scores, self.tokens, self.rows)

    def added(self, scores: Tensor) -> Tensor:
        """The scores, to which autograd sends back the derivative of this loss besides that of what they are used for."""
        f, share = self.tokens / self.rows, self.coefficient * len(self.tokens) / self.rows
        return _WithLoss.apply(scores, share * (torch.softmax(scores, 1) @ f).sum())  # type: ignore[no-any-return,no-untyped-call]


class _WithLoss(torch.autograd.Function):
    """Return the first input; in the backward pass the second is differentiated as a loss beside it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        return delta, delta.new_ones(())


def balance_of(model: GPT, batch: AuditBatch, coefficient: float) -> Balance | None:
    """The balance loss of a batch; None if the model adds none."""
    if not coefficient or model.config.n_experts is None:
        return None
    if not batch.complete:
        raise HandgradError(
            "a sequence of the batch has no target, but its tokens count in the balance loss of the routers: leave the"
            " sequence out"
        )
    scores: list[Tensor] = []
    chosen: list[Tensor] = []

    def record(name: str, x: Tensor) -> None:
        if name.endswith((".a_scores", ".chosen")):
            (scores if x.is_floating_point() else chosen).append(x.clone())

    for ids, targets in batch.sequences():
        record_pass(model, ids, targets, n_targets=batch.n_targets, record=record)
    model.zero_grad()
    return _of(coefficient, zip(scores, chosen, strict=True))


def _of(coefficient: float, mixtures: Iterable[tuple[Tensor, Tensor]]) -> Balance:
    """From the scores (n, E) and the chosen experts (n, k) of several mixtures."""
    scores, chosen = (torch.cat(x) for x in zip(*mixtures, strict=True))
    tokens = experts.tokens_of_experts(chosen, scores.shape[1], torch.float64)
    return Balance(coefficient, tokens, torch.softmax(scores, 1).sum(0), len(scores))


def balance_mistakes(
    right: Balance, mixtures: list[tuple[Tensor, Tensor]], padded: list[tuple[Tensor | None, Tensor]]
) -> dict[str, float]:
    """What known mistakes would have made of the loss; `padded` are the scores and chosen experts with padding."""
    found = {
        "the balance loss were left out": 0.0,
        "the balance loss were added twice": 2 * right.value,
        f"the balance loss were not multiplied by {right.coefficient:g}": right.value / right.coefficient,
        "the balance losses of the blocks were added": sum(_of(right.coefficient, [x]).value for x in mixtures),
    }
    every = [(scores, chosen) for scores, chosen in padded if scores is not None]
    if len(every) == len(mixtures):
        found["padding counted in the balance loss"] = _of(right.coefficient, every).value
    return found


def edits(model: GPT, balance: Balance, scores: dict[str, Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Edits of a pass that add the signals of the balance loss; `scores` holds what the pass has recorded."""

    def add(block: str) -> Callable[[Tensor], Tensor]:
        return lambda delta: delta + balance.signal(scores[f"{block}.a_scores"])

    sparse = (i for i in range(model.config.n_blocks) if model.config.sparse_block(i))
    return {f"blocks.{i}.delta_scores": add(f"blocks.{i}") for i in sparse}

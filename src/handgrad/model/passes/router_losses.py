"""The losses of a mixture's routers, which training adds to the mean loss of the text.

    balance   E Σ_e f_e P_e        f_e: how often expert e is chosen, per row; P_e: the mean of p_e, p = softmax(s)
    z-loss    the mean of lse²     lse = log Σ_e e^(s_e)

All are taken over the rows of all routers of the model together, rows without a target included, as in transformers. f and P
are of a whole batch: what is computed in several parts, calls or processes is counted before it is differentiated.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import HandgradError
from ...ops import experts
from ..config import ModelConfig

if TYPE_CHECKING:
    from .options import PassOptions


class RouterLosses:
    """The coefficients of one model, and what is counted of one batch.

    sums   Choices of every expert, Σ p_e of every expert, Σ lse² and the number of rows: (2E + 2). Sums of parts add up to
           those of the batch. None: the call that gets this object counts its own rows.
    """

    def __init__(self, config: ModelConfig, sums: Tensor | None = None):
        self.n_experts = config.n_experts or 0
        self.balance_weight, self.z_weight = config.balance_loss, config.z_loss
        self.given = sums is not None
        self.sums = torch.zeros(2 * self.n_experts + 2, dtype=torch.float64, device="cpu") if sums is None else sums
        self.counting = False
        self.used = 0  # rows of the calls so far

    def __add__(self, other: "RouterLosses") -> "RouterLosses":
        """Those of two parts of a batch together."""
        both = RouterLosses.__new__(RouterLosses)
        both.__dict__ |= {**self.__dict__, "sums": self.sums + other.sums, "given": True, "used": 0}
        return both

    def begin(self) -> None:
        """Count the rows of a pass, unless they were counted before."""
        self.counting = not self.given
        if self.counting:
            self.sums = torch.zeros_like(self.sums)

    def count(self, scores: Tensor, chosen: Tensor) -> None:
        """Add the rows of one router: scores (n, E), chosen (n, k)"""
        if self.counting:
            self.sums += experts.router_sums(scores, chosen).to(self.sums)

    def delta(self, scores: Tensor) -> Tensor:
        """Δ_s of both losses, (n, E)"""
        found = self.balance_weight * experts.delta_balance(scores, self.tokens.to(scores.device), self.rows)
        return found + self.z_weight * experts.delta_z_loss(scores, self.rows)

    @property
    def tokens(self) -> Tensor:
        """How often each expert is chosen. (E)"""
        return self.sums[: self.n_experts]

    @property
    def rows(self) -> int:
        """Rows of all routers: n for each of them."""
        return int(self.sums[-1])

    @property
    def balance(self) -> float:
        """The balance loss, without its coefficient: k if the experts are chosen equally often."""
        return experts.balance(self.tokens, self.sums[self.n_experts : -2], self.rows).item()

    @property
    def z(self) -> float:
        """The z-loss, without its coefficient."""
        return (self.sums[-2] / self.sums[-1]).item()

    @property
    def total(self) -> float:
        """What is added to the mean loss of the text."""
        return self.balance_weight * self.balance + self.z_weight * self.z


def routers_for(config: ModelConfig, n: int, one_of_several: bool, options: "PassOptions") -> RouterLosses:
    """Those of a call with n tokens; raises if it cannot know the whole batch."""
    if one_of_several and options.routers is None:
        raise HandgradError(
            "this call has a part of the targets, and the losses of the routers depend on the tokens of all calls: give"
            " routers= the sum of model.count_routers(tokens, lengths) of every call"
        )
    if options.examples is not None:
        raise HandgradError(
            "the losses of routers are of a batch, and have no part for each example: measure examples with"
            " objective=hg.MeanLoss(routers=False), or train with balance_loss=0 and z_loss=0"
        )
    found = options.routers or RouterLosses(config)
    found.used += n * sum(map(config.sparse_block, range(config.n_blocks)))
    if found.given and found.used > found.rows:
        raise HandgradError(
            f"routers were counted for {found.rows:,} rows, and {found.used:,} are computed: count every batch anew, with"
            " model.count_routers(tokens, lengths)"
        )
    return found

"""The reference's rules for the steps of a mixture of experts, in torch's own functions; see `reference.py`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.config import ModelConfig
from ..model.layers.experts import SELECTION, Experts
from ..ops.routing import Routing

if TYPE_CHECKING:
    from .reference import At, Rule

Change = Callable[[Tensor], Tensor]


class Mixture(NamedTuple):
    """What the reference has to know of a mixture besides its weights."""

    n_experts: int
    routing: Routing
    selection: Tensor | None


def mixture_of(experts: Experts) -> Mixture:
    """The choices of a block's mixture."""
    return Mixture(len(experts.experts), experts.routing, getattr(experts.router.plain(), SELECTION, None))


def _router(rule: "Rule", given: list[Tensor], at: "At") -> list[Tensor]:
    return [gates_of(given[0], _chosen(given[0], at), at.block["mixture"].routing, at.inside)]


def _experts(rule: "Rule", given: list[Tensor], at: "At") -> list[Tensor]:
    a, scores = given
    inside = at.inside or (lambda x: x)

    def expert(e: int, rows: Tensor) -> Tensor:
        gate, up, down = (at.block[f"{letter}_{e}"] for letter in ("gate", "up", "8"))
        hidden = gated(at.choices.g, inside(_affine(rows, gate)), inside(_affine(rows, up)))
        return _affine(inside(hidden), down)

    return [outputs(a, _chosen(scores, at), expert)]


def _chosen(scores: Tensor, at: "At") -> Tensor:
    return at.hook("chosen", choose(scores, at.block["mixture"]))


def _mixture(rule: "Rule", given: list[Tensor], at: "At") -> list[Tensor]:
    return [mixed(*given)]


MIXTURE_RULES = {"router": _router, "experts": _experts, "mixture": _mixture}


class RouterTerms(NamedTuple):
    """What the losses of the routers add to the mean loss: their coefficients, and what is constant in them."""

    balance: float
    z: float
    share: Tensor  # (E)   choices of each expert per row, over the rows of all routers
    rows: int

    def of_block(self, scores: Tensor) -> Tensor:
        """α E Σ_e f_e P_e + β mean(lse²), as far as they depend on one router's scores (n, E)"""
        mean = F.softmax(scores, 1).sum(0) / self.rows
        z = torch.logsumexp(scores, 1).square().sum() / self.rows
        return self.balance * len(mean) * torch.dot(self.share, mean) + self.z * z


def router_terms(config: ModelConfig, scores: list[Tensor], mixture: Mixture) -> RouterTerms:
    """The terms of a batch whose routers have these scores (n, E) each."""
    every = torch.cat(scores)
    chosen = F.one_hot(choose(every, mixture), mixture.n_experts).sum((0, 1)).to(every)
    return RouterTerms(config.balance_loss, config.z_loss, chosen / len(every), len(every))


def choose(scores: Tensor, m: Mixture) -> Tensor:
    """(n, k) experts of each token, by torch.topk as in transformers"""
    r, scores = m.routing, scores.detach()
    if r.kind == "softmax of chosen":
        return scores.topk(r.k)[1]
    if r.kind == "softmax":
        return F.softmax(scores, 1).topk(r.k)[1]
    ranked = F.sigmoid(scores) + (0 if m.selection is None else m.selection)
    groups = ranked.view(len(scores), r.groups, -1)
    best = groups.topk(min(2, groups.shape[2]), 2)[0].sum(2).topk(r.kept, sorted=False)[1]
    allowed = torch.zeros_like(groups[:, :, 0]).scatter(1, best, 1.0).bool()
    return ranked.masked_fill(~allowed.repeat_interleave(groups.shape[2], 1), -torch.inf).topk(r.k, sorted=False)[1]


def gates_of(scores: Tensor, chosen: Tensor, r: Routing, inside: Change | None = None) -> Tensor:
    """(n, k) gates of the chosen experts. `inside` changes the sums, which cancel in the backward pass."""
    if r.kind == "sigmoid":
        p = F.sigmoid(scores)
    elif inside is None:
        p = F.softmax(scores, 1)
    else:
        p = torch.exp(scores - inside(torch.logsumexp(scores, 1, keepdim=True)))
    p = p.gather(1, chosen)
    if r.normalized or r.kind == "softmax of chosen":
        total = p.sum(1, keepdim=True)
        p = p / (total if inside is None else inside(total))
    return r.scale * p


def outputs(a: Tensor, chosen: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """(n, k·d): the outputs of each token's experts side by side, from the rows of one expert after another"""
    found = a.new_zeros(*chosen.shape, a.shape[1])
    for e in torch.unique(chosen).tolist():
        where = (chosen == e).nonzero(as_tuple=True)
        found = found.index_put(where, expert(e, a[where[0]]))
    return found.flatten(1)


def mixed(gates: Tensor, y: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None) -> Tensor:
    """Σ g y + y_shared, or σ(its gate) y_shared"""
    total = torch.einsum("nk,nkd->nd", gates, y.view(*gates.shape, -1))
    if shared is None:
        return total
    return total + (shared if shared_gate is None else shared * F.sigmoid(shared_gate))


def gated(g: str, gate: Tensor, up: Tensor) -> Tensor:
    """g(gate) ∘ up, or gpt-oss's clamped form"""
    if g == "clamped":
        capped = gate.clamp(max=7)
        return (up.clamp(-7, 7) + 1) * capped * F.sigmoid(1.702 * capped)
    forms: dict[str, Change] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    return forms[g](gate) * up


def _affine(a: Tensor, pair: Any) -> Tensor:
    w, b = pair
    return F.linear(a, w.T, b)

"""The mixture of experts of the reference, in torch's own functions; see `reference.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.layers.experts import SELECTION, Experts
from ..ops.routing import Routing

Change = Callable[[Tensor], Tensor]
Weights = dict[str, Any]


class Mixture(NamedTuple):
    """What the reference has to know of a mixture besides its weights."""

    n_experts: int
    routing: Routing
    selection: Tensor | None


def mixture_of(experts: Experts) -> Mixture:
    """The choices of a block's mixture."""
    selection = getattr(experts.router.plain(), SELECTION, None)
    return Mixture(len(experts.experts), experts.routing, selection)


def reference_mixture(
    block: Weights, g: str, a: Tensor, at: Callable[[str, Tensor], Tensor], inside: Change | None = None
) -> Tensor:
    """a_6 → a_9: what the router chooses, and the shared expert"""
    m: Mixture = block["mixture"]
    inside = inside or (lambda x: x)
    scores = at("scores", affine(a, block["router"]))
    chosen = choose(scores.detach(), m)
    gates = at("gates", gates_of(scores, chosen, m.routing))
    y = at("experts", outputs(block, g, a, chosen, inside))
    if "gate" not in block:
        return mixed(gates, y)
    gate, up = (at(name, affine(a, block[name])) for name in ("gate", "up"))
    shared = at("shared", affine(at("8", gated(g, gate, up)), block["8"]))
    return mixed(gates, y, shared, *([at("shared_gate", affine(a, block["shared"]))] if "shared" in block else []))


def mixed(gates: Tensor, y: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None) -> Tensor:
    """Σ g y + y_shared, or σ(its gate) y_shared"""
    total = torch.einsum("nk,nkd->nd", gates, y.view(*gates.shape, -1))
    if shared is None:
        return total
    return total + (shared if shared_gate is None else shared * F.sigmoid(shared_gate))


def choose(scores: Tensor, m: Mixture) -> Tensor:
    """(n, k) experts of each token, by torch.topk as in transformers"""
    r = m.routing
    if r.kind == "softmax of chosen":
        return scores.topk(r.k)[1]
    if r.kind == "softmax":
        return F.softmax(scores, 1).topk(r.k)[1]
    ranked = F.sigmoid(scores) + (0 if m.selection is None else m.selection)
    groups = ranked.view(len(scores), r.groups, -1)
    best = groups.topk(min(2, groups.shape[2]), 2)[0].sum(2).topk(r.kept, sorted=False)[1]
    allowed = torch.zeros_like(groups[:, :, 0]).scatter(1, best, 1.0).bool()
    return ranked.masked_fill(~allowed.repeat_interleave(groups.shape[2], 1), -torch.inf).topk(r.k, sorted=False)[1]


def gates_of(scores: Tensor, chosen: Tensor, r: Routing) -> Tensor:
    """(n, k) gates of the chosen experts"""
    p = F.sigmoid(scores) if r.kind == "sigmoid" else F.softmax(scores, 1)
    p = p.gather(1, chosen)
    if r.normalized or r.kind == "softmax of chosen":
        p = p / p.sum(1, keepdim=True)
    return r.scale * p


def outputs(block: Weights, g: str, a: Tensor, chosen: Tensor, inside: Change) -> Tensor:
    """(n, k·d): the outputs of each token's experts side by side, from one expert's tokens after another"""
    found = a.new_zeros(*chosen.shape, a.shape[1])
    for e in range(block["mixture"].n_experts):
        where = (chosen == e).nonzero(as_tuple=True)
        if len(where[0]):
            gate, up = (inside(affine(a[where[0]], block[f"{name}_{e}"])) for name in ("gate", "up"))
            found = found.index_put(where, affine(inside(gated(g, gate, up)), block[f"8_{e}"]))
    return found.flatten(1)


def gated(g: str, gate: Tensor, up: Tensor) -> Tensor:
    """g(gate) ∘ up, or gpt-oss's clamped form"""
    if g == "clamped":
        capped = gate.clamp(max=7)
        return (up.clamp(-7, 7) + 1) * capped * F.sigmoid(1.702 * capped)
    forms: dict[str, Change] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    return forms[g](gate) * up


def affine(a: Tensor, pair: tuple[Tensor, Tensor | None]) -> Tensor:
    """a w + b"""
    w, b = pair
    return a @ w if b is None else a @ w + b

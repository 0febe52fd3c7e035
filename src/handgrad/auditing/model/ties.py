"""Tokens whose experts rounding decides: two scores are closer than the dtype resolves, and either choice is right.

Ours then takes the experts that the audited model took, so that both compute the same function.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ...model.layers.experts import SELECTION, Experts
from .batch import AuditBatch
from .expect import Bounds, Expected, expect
from .observe import Observed
from .subject import Subject


def with_their_choice(
    subject: Subject, batch: AuditBatch, seen: Observed, right: Expected, allowed: Bounds
) -> tuple[AuditBatch, Expected]:
    """The batch with the audited model's experts of such tokens, and what is right then."""
    for gates, theirs in seen.chosen.items():
        block = gates.rpartition(".")[0]
        chosen, scores = f"{block}.chosen", f"{block}.a_scores"
        mixture = subject.ours.get_submodule(f"{subject.config.table.names['blocks']}.{block.rpartition('.')[2]}").mlp
        assert isinstance(mixture, Experts)
        ours = right.chosen[chosen]
        other = (theirs[batch.rows].sort(1).values != ours.sort(1).values).any(1)
        tied = other & (_margin(mixture, right.values[scores]) <= 2 * allowed.values[scores])
        if tied.any():
            taken = theirs.clone()
            taken[batch.rows] = torch.where(tied[:, None], theirs[batch.rows], ours)
            batch = replace(batch, experts={**batch.experts, chosen: taken.view(*batch.shape, -1)})
            right = expect(subject, batch)  # whatever comes after it has other scores
    return batch, right


def _margin(mixture: Experts, scores: Tensor) -> Tensor:
    """By how much scores may change without another choice, at least. (n)"""
    r = mixture.routing
    ranked = torch.sigmoid(scores) if r.kind == "sigmoid" else scores
    ranked = ranked + getattr(mixture.router.plain(), SELECTION, 0.0)
    if r.kept == r.groups:
        return _gap(ranked, r.k)
    of_groups = ranked.view(len(ranked), r.groups, -1)
    best = of_groups.topk(2, 2)[0].sum(2)
    kept = best >= best.topk(r.kept, 1)[0][:, -1:]
    inside = of_groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    return torch.minimum(_gap(best, r.kept) / 2, _gap(inside, r.k))


def _gap(x: Tensor, k: int) -> Tensor:
    """The distance between the k-th largest and the next; ∞ if there is none."""
    if k == x.shape[1]:
        return x.new_full((len(x),), torch.inf)
    top = x.topk(k + 1, 1)[0]
    return top[:, k - 1] - top[:, k]

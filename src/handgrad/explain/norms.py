"""A norm whose backward pass computes the error signal only."""

import copy

from ..model.norms import Norm


def frozen(norm: Norm) -> Norm:
    """A copy of a norm that adds nothing to any gradient."""
    made = copy.deepcopy(norm)
    made.requires_grad_(False)
    for p in made.parameters():
        p.grad = None
    return made

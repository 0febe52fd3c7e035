"""The tolerances of numerical comparisons: the largest error allowed, and the floor of the size it is relative to."""

import torch

# Relative error of an activation, an error signal or a gradient, by the dtype in which it was computed.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}

SUM_TOLERANCE = 2e-6  # a sum of products in float32, relative to the sum of their absolute values
IDENTITY_TOLERANCE = 1e-12  # two forms of the same expression in float64
FINITE_DIFFERENCE_TOLERANCE = 1e-6  # of a smooth function
RELU_DIFFERENCE_TOLERANCE = 1e-4  # the step must be small enough not to cross a kink, so rounding is larger
MONTE_CARLO_TOLERANCE = 0.05

# A tensor much smaller than the others of its kind is what is left after cancellation, and carries the rounding error of
# the larger terms. Errors are therefore relative to at least this share of the largest tensor of the same kind.
ENTRY_FLOOR = 1e-4  # of the largest entry, when the largest errors are compared
NORM_FLOOR = 1e-2  # of the largest norm, when the norms of rounding errors are compared
DIFFERENCE_FLOOR = 1e-3  # of the largest norm, for finite differences
LOSS_FLOOR = 1e-3  # the loss itself, when it is nearly 0
GRADIENT_FLOOR = 1e-3  # a gradient of the ledger, whose inputs are of order 1


def merge_tolerance(stored: torch.dtype) -> float:
    """Relative change of the logits allowed when an adapter is merged into weights stored in this dtype."""
    return max(TOLERANCE[torch.float32], 8 * torch.finfo(stored).eps)

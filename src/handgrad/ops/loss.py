"""Section 1: softmax with cross-entropy, and Δ_12 = y_pred − y_gt. Ignored targets and 1/(number of targets) are handled
here only.
Other losses are functions of log y_pred(t)[target], with a coefficient for each row: Δ_12(t) = c_t (y_pred − y_gt).

    a_12  logits  (n, V)      targets  (n), all of them ids: the caller removes rows without a target
"""

import torch
from torch import Tensor

from ..kernels import calls

NO_TARGET = -100


def rows_with_target(targets: Tensor) -> Tensor:
    """Indices of the rows that have a target. (n) → (m)"""
    return torch.nonzero(targets != NO_TARGET).squeeze(1)


def forward(logits: Tensor, targets: Tensor) -> Tensor:
    """Σ_t ℓ(t) = −Σ_t log y_pred(t)[target]"""
    log_y_pred = torch.log_softmax(_wide(logits), 1)
    return -log_y_pred.gather(1, targets[:, None]).sum()


def forward_and_delta(logits: Tensor, targets: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Σ_t ℓ(t), and Δ_12 = weight · (y_pred − y_gt), computed in place of the logits: (n, V) exists only once"""
    wide = _wide(logits)
    if calls.fits(wide):
        losses = wide.new_empty(len(wide), dtype=torch.float64)
        calls.softmax_loss(wide, targets.contiguous(), weight, losses)
        return losses.sum(), wide.to(logits.dtype)
    target = targets[:, None]
    # log Σ exp = max − log(largest probability): one exponential per entry serves the loss and Δ
    total = torch.amax(wide, 1).double().sum() - wide.gather(1, target).double().sum()
    y_pred = torch.softmax(wide, 1, out=wide)
    total -= torch.amax(y_pred, 1).log().double().sum()
    y_pred.scatter_add_(1, target, y_pred.new_full(target.shape, -1.0))
    return total, y_pred.mul_(weight).to(logits.dtype)


def log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """log y_pred(t)[target] (n), in float64; a target that is −∞ has −∞"""
    wide = _wide(logits)
    return wide.gather(1, targets[:, None])[:, 0].double() - torch.logsumexp(wide, 1).double()


def weighted_delta(logits: Tensor, targets: Tensor, c: Tensor) -> Tensor:
    """Δ_12(t) = c_t (y_pred − y_gt), computed in place of the logits"""
    delta = forward_and_delta(_wide(logits), targets, 1.0)[1]
    return delta.mul_(c[:, None].to(delta.dtype)).to(logits.dtype)


def _wide(logits: Tensor) -> Tensor:
    """In at least float32: in bfloat16 a probability would have three digits."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

"""Section 1: softmax with cross-entropy over the next token.

a_12     logits      (n_T, n_vocab)
targets  ids         (n_T,)      NO_TARGET where a row has none: at least the last one (R5)
"""

import torch
from torch import Tensor

from .notation import ohe, row_dot, tilde_columns

NO_TARGET = -100


def next_tokens(a_0: Tensor) -> Tensor:
    """The target of position t is the id at the next position, not the id plus one (R6). The last row has none."""
    return torch.cat([a_0[1:], a_0.new_full((1,), NO_TARGET)])


def y_gt(targets: Tensor, n_vocab: int, dtype: torch.dtype) -> Tensor:
    """One-hot targets; the row of a token without a target is zero. (n_T, n_vocab)"""
    has_target = targets != NO_TARGET
    return ohe(targets.clamp(min=0), n_vocab, dtype) * tilde_columns(has_target.to(dtype), n_vocab)


def token_losses(a_12: Tensor, targets: Tensor) -> Tensor:
    """ℓ = −y_gt ⊖ log y_pred ∈ (n_T,), zero where there is no target"""
    minus_log_y_pred = torch.logsumexp(a_12, 1, keepdim=True) - a_12
    return row_dot(y_gt(targets, a_12.shape[1], a_12.dtype), minus_log_y_pred)


def forward(a_12: Tensor, targets: Tensor) -> Tensor:
    """L_seq = Σ_t ℓ(t) over the rows that have a target (R5)"""
    return token_losses(a_12, targets).sum()


def delta_logits(y_pred: Tensor, targets: Tensor) -> Tensor:
    """Δ_12 = y_pred − y_gt on the rows that have a target, 0 on the others (R5)"""
    has_target = (targets != NO_TARGET).to(y_pred.dtype)
    n_vocab = y_pred.shape[1]
    return tilde_columns(has_target, n_vocab) * (y_pred - y_gt(targets, n_vocab, y_pred.dtype))

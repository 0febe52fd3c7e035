"""What some models do with logits before the softmax: y = s a_12, or capped, y = c tanh(s a_12/c).

    a_12, y, Δ_12, Δ_y  (n_T, n_vocab)      s, c  numbers

Δ_y = softmax(y) − y_gt over the number of targets, as the paper has it for a_12.
"""

import torch
from torch import Tensor


def forward(a: Tensor, s: float, c: float | None = None) -> Tensor:
    """y = s a, or c tanh(s a/c), which is never beyond ±c"""
    return s * a if c is None else c * torch.tanh(s * a / c)


def delta_prev(delta: Tensor, y: Tensor, s: float, c: float | None = None) -> Tensor:
    """Δ_12 = s Δ_y, or s (1 − (y/c)²) ∘ Δ_y"""
    return s * delta if c is None else s * slope(y, c) * delta


def slope(y: Tensor, c: float) -> Tensor:
    """1 − (y/c)² = 1 − tanh²(s a/c), which is 0 where a logit is capped"""
    return 1 - (y / c) ** 2

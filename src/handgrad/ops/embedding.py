"""Section 2, equations 2 and 3: look up rows of the token and position tables; scatter gradients back into them.

ids, positions  (n)      w_tok  (V, d)      w_pos  (n_context, d)
"""

import torch
from torch import Tensor


def forward(ids: Tensor, positions: Tensor, w_tok: Tensor, w_pos: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """a_1 = s ohe(a_0) w_tok + ohe(positions) w_pos, which is a look-up   (2); without w_pos only its first part. s = 1 in
    the paper."""
    a_1 = w_tok.index_select(0, ids)
    if scale != 1:
        a_1.mul_(scale)
    return a_1 if w_pos is None else a_1.add_(w_pos.index_select(0, positions))


def grad_w(delta: Tensor, ids: Tensor, w: Tensor, into: Tensor | None) -> Tensor:
    """∂w += ohe(ids)ᵗ Δ_1: a row that was looked up several times gets the sum   (3)"""
    return (torch.zeros_like(w) if into is None else into).index_add_(0, ids, delta)

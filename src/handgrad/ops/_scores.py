"""Scores of attention as matrices: scale, cap and sinks, for the tiles and for single calls without kernels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.calls import Scores


def scores_of(q: Tensor, k: Tensor, of: Scores) -> Tensor:
    """q kᵗ/√d_ρ, or with the scale and the cap of a model. (…, rows, columns)"""
    scores = (q @ k.mT).mul_(of.factor(q.shape[-1]))
    return scores if of.cap is None else tanh_of_scores(scores.div_(of.cap)).mul_(of.cap)


def tanh_of_scores(x: Tensor) -> Tensor:
    """tanh of scores divided by their cap, in place. A sum that overflowed has no sign to rely on, and stays no number."""
    return x.masked_fill_(x.isinf(), math.nan).tanh_()


def with_sinks(a: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """a exp(lse − lse'), lse' = log(exp lse + exp b): what a softmax gives that has one more score, without a value. The
    shape of the sinks b is that of lse, as far as it has one."""
    joined = torch.logaddexp(lse, sinks.expand(lse.shape))
    return a * (lse - joined).exp_()[..., None].to(a.dtype), joined


def attend_with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, of: Scores, sinks: Tensor | None) -> Tensor:
    """Attention of a few new queries (b, h, t, d_ρ) to cached keys and values (b, h_kv, n, …), without kernels and without a
    backward pass. The mask is added to the scores (b, h, t, n); sinks (h, t), or as far as they differ. → (b, h, t, d_h)"""
    grouped = q.shape[1] != k.shape[1]
    if of.cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=of.scale, enable_gqa=grouped)
    dtype = at_least_float32(q.dtype)
    wide = [q.to(dtype), *(x.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))]
    scores = scores_of(wide[0], wide[1], of)
    if mask is not None:
        scores += mask
    lse = torch.logsumexp(scores, 3)
    a = scores.sub_(lse[..., None]).exp_() @ wide[2]
    if sinks is not None:
        a = with_sinks(a, lse, sinks.to(dtype))[0]
    return a.to(v.dtype)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and their log-sum-exp."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

"""Section 4: many heads on the same input."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import attention
from ..paper.attention import Head, ManyForward
from ..proof.oracles import differentiate, relative_error
from . import by_torch
from .check import AUTOGRAD, EXACT, IDENTITY, RandomInputs, check, gradient_error, mismatch, raises


def _inputs(rng: RandomInputs) -> tuple[Tensor, list[Head]]:
    """a (n_T, d) and two to four heads with different d_ρ and d_h; Σ d_h need not be d"""
    n, d = rng.size(3, 8), rng.size(2, 8)
    return rng.matrix(n, d), [rng.head(d, rng.size(1, 6), rng.size(1, 6)) for _ in range(rng.size(2, 4))]


def _equal_heads(rng: RandomInputs, n_heads: int, d_h: int) -> list[Head]:
    """n_h heads with d_ρ = d_h for d = n_h d_h, the layout of torch's multi-head attention"""
    return [rng.head(n_heads * d_h, d_h, d_h) for _ in range(n_heads)]


def _many_by_torch(a: Tensor, heads: list[Head]) -> Tensor:
    return torch.cat([by_torch.head_output(a, a, a, head) for head in heads], 1)


@check("D-heads", 6, "", EXACT)
def widths(rng: RandomInputs) -> float:
    """n_h = d/d_h must be an integer, so that the concatenated width is d; otherwise splitting Δ (n_T, d) is an error"""
    n, n_heads, d_h = rng.size(3, 8), rng.size(2, 4), rng.size(1, 3)
    heads = _equal_heads(rng, n_heads, d_h)
    d = n_heads * d_h
    out = attention.forward_heads(rng.matrix(n, d), heads)
    cut = attention.slice_heads(rng.matrix(n, d), heads)
    errors = mismatch((out.a.shape, (n, d)), ([x.shape for x in cut], [(n, d_h)] * n_heads))
    wide = d + rng.size(1, n_heads - 1)  # not divisible by n_h, so n_h heads of width ⌊d/n_h⌋ do not cover it
    too_narrow = [rng.head(wide, d_h, wide // n_heads) for _ in range(n_heads)]
    rejected = raises((RuntimeError, ValueError), lambda: attention.slice_heads(rng.matrix(n, wide), too_narrow))
    return errors + mismatch((rejected, True))


@check("D-mha-list", 6, "", EXACT)
def heads_are_independent(rng: RandomInputs) -> float:
    """the layer is a list of heads on the same input: each computes what it computes alone; changing one changes no other"""
    a, heads = _inputs(rng)
    many = attention.forward_heads(a, heads)
    alone = [attention.forward(a, head).a for head in heads]
    changed = attention.forward_heads(a, [heads[0]._replace(w_v=2 * heads[0].w_v), *heads[1:]])
    pairs = list(zip(many.heads, alone, changed.heads, strict=True))
    errors = [(torch.equal(one.a, single), True) for one, single, _ in pairs]
    errors += [(torch.equal(one.a, after.a), h > 0) for h, (one, _, after) in enumerate(pairs)]
    return mismatch((len(many.heads), len(heads)), *errors)


@check("E-mha-fwd", 6, "34", IDENTITY)
def forward(rng: RandomInputs) -> float:
    """a_i = concat_columns[a_i^1 … a_i^{n_h}] ∈ (n_T, Σ d_h): torch's multi-head attention before its projection"""
    a, unequal = _inputs(rng)
    error = relative_error(attention.forward_heads(a, unequal).a, _many_by_torch(a, unequal))

    heads = _equal_heads(rng, n_heads := rng.size(2, 4), rng.size(1, 3))
    d, n = len(heads[0].w_q), len(a)
    a = rng.matrix(n, d)
    weights = [torch.cat([w.t() for w in ws]) for ws in zip(*((h.w_q, h.w_k, h.w_v) for h in heads), strict=True)]
    biases = [b for name in ("b_q", "b_k", "b_v") for b in (getattr(h, name) for h in heads)]
    expected, _ = F.multi_head_attention_forward(
        a, a, a, d, n_heads, torch.cat(weights), torch.cat(biases), None, None, False, 0.0,
        torch.eye(d).double(), torch.zeros(d).double(),  # the identity as output projection
        attn_mask=torch.ones(n, n, dtype=torch.bool).triu(1), need_weights=False,
    )  # fmt: skip
    return max(error, relative_error(attention.forward_heads(a, heads).a, expected))


@check("E-mha-slice", 6, "", AUTOGRAD)
def slices(rng: RandomInputs) -> float:
    """Δ_i is split by columns into the Δ_i^h ∈ (n_T, d_h) of the heads: the inverse of concatenation"""
    a, heads = _inputs(rng)
    outs = [rng.matrix(len(a), head.w_v.shape[1]) for head in heads]
    delta = rng.matrix(len(a), sum(out.shape[1] for out in outs))
    expected = differentiate(lambda *x: torch.cat(x, 1), *outs, upstream=delta)
    return max(relative_error(x, y) for x, y in zip(attention.slice_heads(delta, heads), expected, strict=True))


@check("E-mha-dx", 6, "35", AUTOGRAD)
def error_signal(rng: RandomInputs) -> float:
    """Δ_{i−1} = Σ_h Δ^h_{i−1} ∈ (n_T, d), for heads of unequal widths too"""
    a, heads = _inputs(rng)
    each = [by_torch.head_forward(a, head) for head in heads]
    out = torch.cat([one.a for one in each], 1)
    delta = rng.matrix(*out.shape)
    ours = attention.backward_heads(delta, a, heads, ManyForward(each, out)).delta
    return gradient_error(ours, lambda x: _many_by_torch(x, heads), a, delta, rng)


@check("P-mha-compose", 6, "", AUTOGRAD)
def layers_stack(rng: RandomInputs) -> float:
    """with Σ d_h = d the output has the width of the input, so layers stack: three of them, forward and backward"""
    n_heads, d_h = rng.size(2, 3), rng.size(1, 3)
    layers = [_equal_heads(rng, n_heads, d_h) for _ in range(3)]
    x = rng.matrix(rng.size(3, 6), n_heads * d_h)
    inputs, saved = [x], []
    for heads in layers:
        saved.append(attention.forward_heads(inputs[-1], heads))
        inputs.append(saved[-1].a)
    delta = upstream = rng.matrix(*x.shape)
    for a, heads, forward in zip(inputs[-2::-1], layers[::-1], saved[::-1], strict=True):
        delta = attention.backward_heads(delta, a, heads, forward).delta

    def stack(x: Tensor) -> Tensor:
        for heads in layers:
            x = _many_by_torch(x, heads)
        return x

    return max(relative_error(inputs[-1], stack(x)), gradient_error(delta, stack, x, upstream, rng))

"""Section 4: many heads on the same input."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...paper import attention
from ...paper.attention import Head, ManyForward
from ..oracles import differentiate, relative_error
from .check import AUTOGRAD, EXACT, IDENTITY, Lab, check, mismatch
from .head_backward import attention_by_torch, forward_by_torch, gradient_error


def _draw(lab: Lab) -> tuple[Tensor, list[Head]]:
    """a (n_T, d) and two to four heads, each with a d_ρ and a d_h of its own; Σ d_h need not be d"""
    n, d = lab.size(3, 8), lab.size(2, 8)
    return lab.matrix(n, d), [lab.head(d, lab.size(1, 6), lab.size(1, 6)) for _ in range(lab.size(2, 4))]


def _equal_heads(lab: Lab, n_heads: int, d_h: int) -> list[Head]:
    """n_h heads with d_ρ = d_h for d = n_h d_h, the layout of torch's own multi-head attention"""
    return [lab.head(n_heads * d_h, d_h, d_h) for _ in range(n_heads)]


def _many_by_torch(a: Tensor, heads: list[Head]) -> Tensor:
    return torch.cat([attention_by_torch(a, a, a, head) for head in heads], 1)


@check("D-heads", 6, "", EXACT)
def widths(lab: Lab) -> float:
    """n_h = d/d_h must be whole: then concatenating gives back the width d; otherwise cutting Δ (n_T, d) is refused"""
    n, n_heads, d_h = lab.size(3, 8), lab.size(2, 4), lab.size(1, 3)
    heads = _equal_heads(lab, n_heads, d_h)
    d = n_heads * d_h
    out = attention.forward_heads(lab.matrix(n, d), heads)
    cut = attention.slice_heads(lab.matrix(n, d), heads)
    errors = mismatch((out.a.shape, (n, d)), ([x.shape for x in cut], [(n, d_h)] * n_heads))
    wide = d + lab.size(1, n_heads - 1)  # n_h does not divide it, so n_h heads of width ⌊d/n_h⌋ leave columns over
    misfits = [lab.head(wide, d_h, wide // n_heads) for _ in range(n_heads)]
    try:
        attention.slice_heads(lab.matrix(n, wide), misfits)
    except (RuntimeError, ValueError):
        return errors
    return errors + 1


@check("D-mha-list", 6, "", EXACT)
def heads_are_independent(lab: Lab) -> float:
    """the layer is a list of heads on the same input: each gives what it gives alone; changing one changes no other"""
    a, heads = _draw(lab)
    many = attention.forward_heads(a, heads)
    alone = [attention.forward(a, head).a for head in heads]
    changed = attention.forward_heads(a, [heads[0]._replace(w_v=2 * heads[0].w_v), *heads[1:]])
    pairs = list(zip(many.heads, alone, changed.heads, strict=True))
    errors = [(torch.equal(one.a, by_itself), True) for one, by_itself, _ in pairs]
    errors += [(torch.equal(one.a, after.a), h > 0) for h, (one, _, after) in enumerate(pairs)]
    return mismatch((len(many.heads), len(heads)), *errors)


@check("E-mha-fwd", 6, "34", IDENTITY)
def forward(lab: Lab) -> float:
    """a_i = concat_columns[a_i^1 … a_i^{n_h}] ∈ (n_T, Σ d_h): torch's own multi-head attention before its projection"""
    a, unequal = _draw(lab)
    error = relative_error(attention.forward_heads(a, unequal).a, _many_by_torch(a, unequal))

    heads = _equal_heads(lab, n_heads := lab.size(2, 4), lab.size(1, 3))
    d, n = len(heads[0].w_q), len(a)
    a = lab.matrix(n, d)
    weights = [torch.cat([w.t() for w in ws]) for ws in zip(*((h.w_q, h.w_k, h.w_v) for h in heads), strict=True)]
    biases = [b for name in ("b_q", "b_k", "b_v") for b in (getattr(h, name) for h in heads)]
    truth, _ = F.multi_head_attention_forward(
        a, a, a, d, n_heads, torch.cat(weights), torch.cat(biases), None, None, False, 0.0,
        torch.eye(d).double(), torch.zeros(d).double(),  # the projection after it: none
        attn_mask=torch.ones(n, n, dtype=torch.bool).triu(1), need_weights=False,
    )  # fmt: skip
    return max(error, relative_error(attention.forward_heads(a, heads).a, truth))


@check("E-mha-slice", 6, "", AUTOGRAD)
def slices(lab: Lab) -> float:
    """Δ_i is cut by columns into the Δ_i^h ∈ (n_T, d_h) of the heads: concatenation undone"""
    a, heads = _draw(lab)
    outs = [lab.matrix(len(a), head.w_v.shape[1]) for head in heads]
    delta = lab.matrix(len(a), sum(out.shape[1] for out in outs))
    truth = differentiate(lambda *x: torch.cat(x, 1), *outs, upstream=delta)
    return max(relative_error(x, y) for x, y in zip(attention.slice_heads(delta, heads), truth, strict=True))


@check("E-mha-dx", 6, "35", AUTOGRAD)
def error_signal(lab: Lab) -> float:
    """Δ_{i−1} = Σ_h Δ^h_{i−1} ∈ (n_T, d), for heads of unequal widths too"""
    a, heads = _draw(lab)
    each = [forward_by_torch(a, head) for head in heads]
    out = torch.cat([one.a for one in each], 1)
    delta = lab.matrix(*out.shape)
    ours = attention.backward_heads(delta, a, heads, ManyForward(each, out)).delta
    return gradient_error(ours, lambda x: _many_by_torch(x, heads), a, delta, lab)


@check("P-mha-compose", 6, "", AUTOGRAD)
def layers_stack(lab: Lab) -> float:
    """with Σ d_h = d the output has the width of the input, so layers stack: three of them, forward and backward"""
    n_heads, d_h = lab.size(2, 3), lab.size(1, 3)
    layers = [_equal_heads(lab, n_heads, d_h) for _ in range(3)]
    x = lab.matrix(lab.size(3, 6), n_heads * d_h)
    inputs, saved = [x], []
    for heads in layers:
        saved.append(attention.forward_heads(inputs[-1], heads))
        inputs.append(saved[-1].a)
    delta = upstream = lab.matrix(*x.shape)
    for a, heads, kept in zip(inputs[-2::-1], layers[::-1], saved[::-1], strict=True):
        delta = attention.backward_heads(delta, a, heads, kept).delta

    def stack(x: Tensor) -> Tensor:
        for heads in layers:
            x = _many_by_torch(x, heads)
        return x

    return max(relative_error(inputs[-1], stack(x)), gradient_error(delta, stack, x, upstream, lab))

"""Invariants that follow from the paper's formulas and are not in it: cheap, sharp tests of a whole backward pass."""

import torch
from torch import Tensor

from ...model.config import PRESETS, preset
from ...model.gpt import GPT
from ...paper import attention, layernorm, lora, loss, transformer
from ...paper.transformer import Backward
from ...plan.estimate import make_plan
from ..oracles import relative_error
from .check import AUTOGRAD, EXACT, IDENTITY, Lab, check, mismatch, unless
from .transformer import cases

INVARIANTS = 14


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def _row_sums(x: Tensor, scale: Tensor | None = None) -> float:
    """The largest row sum, relative to the largest entry."""
    return _largest(x.sum(-1)) / max(_largest(x if scale is None else scale), 1e-300)


def _deltas(b: Backward) -> list[Tensor]:
    """Every Δ of a backward pass, (n_T, …)"""
    inside = [getattr(block, f"delta_{i}") for block in b.blocks for i in range(1, 11)]
    return [*inside, b.delta_11, b.delta_12, b.delta_1, b.delta_0]


@check("X-last-dead", INVARIANTS, "", EXACT)
def last_row_is_dead(lab: Lab) -> float:
    """without a target for row n_T, that row of every Δ is exactly 0 and ∂w_pos[n_T] = 0; leaving the token out gives the
    same loss"""
    worst = 0.0
    for c in cases(lab):
        worst = max(worst, *(_largest(delta[-1]) for delta in _deltas(c.b)))
        worst = max(worst, _largest(c.b.grads.w_pos[len(c.ids) - 1]))
        shorter = transformer.forward(c.ids[:-1], c.p, c.o)
        full, short = (loss.token_losses(f.a_12, t) for f, t in ((c.f, c.targets), (shorter, c.targets[:-1])))
        worst = max(worst, 0.0 if torch.allclose(full[:-1], short, rtol=1e-12, atol=0) and full[-1] == 0 else 1.0)
        worst += unless(_largest(c.b.delta_1[:-1]), 1e-9)  # the other rows are alive
    return worst


@check("X-first-row", INVARIANTS, "", EXACT)
def first_row_of_the_causal_signal(lab: Lab) -> float:
    """row 1 of Δ_causal is exactly 0 with a causal mask: token 1 has one choice, so its query gets no gradient"""
    worst = 0.0
    for c in cases(lab):
        for block in c.b.blocks:
            worst = max(worst, *(_largest(head.delta_causal[0]) for head in block.heads))
            worst += unless(max(_largest(head.delta_causal[1:]) for head in block.heads), 1e-12)
    return worst


@check("X-ln-rowsum", INVARIANTS, "", IDENTITY)
def norm_signal_sums_to_zero(lab: Lab) -> tuple[float, str]:
    """rows of LayerNorm's Δ_{i−1} sum to 0 for any ε; Δ_{i−1} ⊖ ā = 0 only for ε = 0"""
    n, d = lab.size(2, 7), lab.size(4, 12)
    a, w, b, delta = lab.matrix(n, d), lab.matrix(d), lab.matrix(d), lab.matrix(n, d)
    along = {}
    sums = 0.0
    for eps in (0.0, 0.1):
        f = layernorm.forward(a, w, b, eps)
        out = layernorm.delta_prev(delta, f.a_bar, f.sigma, w)
        sums = max(sums, _row_sums(out))
        along[eps] = _largest((out * f.a_bar).sum(1)) / _largest(out)
    return max(sums, along[0.0]) + unless(
        along[0.1], 1e-6
    ), f"along ā: {along[0.0]:.0e} without ε, {along[0.1]:.0e} with"


@check("X-stream-rowsum", INVARIANTS, "", IDENTITY)
def stream_signal_sums_to_zero(lab: Lab) -> float:
    """hence rows of Δ_10, Δ_5 and Δ_1 sum to 0, and so do rows of ∂w_tok (untied), ∂w_pos, ∂w_3, ∂w_8 and the entries of
    ∂b_3, ∂b_8"""
    worst = 0.0
    for c in cases(lab):
        g = c.b.grads
        for block, grads in zip(c.b.blocks, g.blocks, strict=True):
            rows = [block.delta_10, block.delta_5, block.delta_1, grads.w_3, grads.w_8]
            worst = max(worst, *(_row_sums(x) for x in rows))
            worst = max(worst, _row_sums(grads.b_3, block.delta_5), _row_sums(grads.b_8, block.delta_10))
        worst = max(worst, _row_sums(g.w_pos))
        if c.p.w_11 is not None:
            worst = max(worst, _row_sums(g.w_tok))
    return worst


@check("X-logit-rowsum", INVARIANTS, "", IDENTITY)
def logit_signal_sums_to_zero(lab: Lab) -> float:
    """rows of Δ_12 and of ∂w_11 sum to 0, and so does ∂b_11: probability can only be moved"""
    worst = 0.0
    for c in cases(lab):
        worst = max(worst, _row_sums(c.b.delta_12))
        if c.b.grads.w_11 is not None and c.b.grads.b_11 is not None:
            worst = max(worst, _row_sums(c.b.grads.w_11), _row_sums(c.b.grads.b_11, c.b.delta_12))
    return worst


@check("X-bv-b3", INVARIANTS, "", IDENTITY)
def value_bias_is_redundant(lab: Lab) -> float:
    """concat_h(∂b_v) = ∂b_3 w_3ᵗ: the values' bias is redundant with that of the projection"""
    worst = 0.0
    for c in cases(lab):
        for p, g in zip(c.p.blocks, c.b.grads.blocks, strict=True):
            worst = max(
                worst, relative_error(torch.cat([head.b_v for head in g.heads]), g.b_3 @ p.w_3.t(), _largest(g.w_3))
            )
    return worst


@check("X-flash-delta", INVARIANTS, "", IDENTITY)
def correction_from_the_output(lab: Lab) -> float:
    """(Δ vᵗ) ⊖ ρ = Δ ⊖ a_i^h: the softmax correction needs only the output and its error signal"""
    n, d = lab.size(3, 7), lab.size(3, 8)
    head = lab.head(d, lab.size(1, 6), lab.size(1, 6))
    a = lab.matrix(n, d)
    f = attention.forward(a, head)
    delta = lab.matrix(*f.a.shape)
    b = attention.backward(delta, a, head, f)
    return relative_error((b.delta_rho * f.rho).sum(1), (delta * f.a).sum(1), _largest(b.delta_rho))


@check("X-renorm", INVARIANTS, "", IDENTITY)
def renormalised_triangle(lab: Lab) -> float:
    """the causal ρ is also the unmasked softmax with its upper triangle cut off and its rows brought back to sum 1"""
    n, d = lab.size(3, 7), lab.size(3, 8)
    head = lab.head(d, lab.size(1, 6), lab.size(1, 6))
    a = lab.matrix(n, d)
    lower = attention.forward(a, head, causal=False).rho.tril()
    return relative_error(attention.forward(a, head).rho, lower / lower.sum(1, keepdim=True))


@check("X-stack", INVARIANTS, "", AUTOGRAD)
def blocks_stack(lab: Lab) -> float:
    """Δ_1 of block b+1 is Δ_10 of block b, and both are what autograd finds there"""
    worst, seen = 0.0, 0
    for c in cases(lab):
        for i, (below, above) in enumerate(zip(c.b.blocks[:-1], c.b.blocks[1:], strict=True)):
            truth = c.truth.deltas[f"blocks.{i}.delta_10"]
            worst = max(worst, relative_error(below.delta_10, truth), relative_error(above.delta_1, truth))
            seen += 1
    return worst + unless(seen, 1)


@check("X-lora-init", INVARIANTS, "", EXACT)
def fresh_adapter(lab: Lab) -> float:
    """with u = 0 at the start the output is unchanged and ∂d = 0, while ∂u ≠ 0: the adapter starts to learn from u"""
    n, f_in, r, f_out = lab.size(2, 6), lab.size(2, 8), lab.size(1, 3), lab.size(2, 8)
    a, d, u, delta = lab.matrix(n, f_in), lab.matrix(f_in, r), torch.zeros(r, f_out).double(), lab.matrix(n, f_out)
    silent = _largest(lora.forward(a, d, u, 0.5)) + _largest(lora.grad_d(delta, a, u, 0.5))
    return silent + unless(_largest(lora.grad_u(delta, a, d, 0.5)), 1e-6)


@check("X-gpt2-sizes", INVARIANTS, "", EXACT)
def published_sizes(lab: Lab) -> float:
    """the tied count gives 124,439,808 · 354,823,168 · 774,030,080 · 1,557,611,200 for GPT-2 small, medium, large and XL"""
    published = {
        "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    }  # fmt: skip
    wrong = mismatch(*((make_plan(preset(name)).total, count) for name, count in published.items()))
    real = {name: sum(p.numel() for p in GPT(PRESETS[name], device="meta").parameters()) for name in published}
    return wrong + mismatch((real, published))

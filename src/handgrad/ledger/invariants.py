"""Invariants that follow from the paper's formulas but are not stated there: cheap tests of a complete backward pass."""

import torch
from torch import Tensor

from ..model.config import PRESETS, preset
from ..model.gpt import GPT
from ..paper import attention, layernorm, lora, loss, transformer
from ..paper.transformer import Backward
from ..plan.estimate import make_plan
from ..proof.oracles import relative_error
from ..tolerances import IDENTITY_TOLERANCE
from .check import AUTOGRAD, EXACT, IDENTITY, RandomInputs, check, mismatch, shortfall
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
def last_row_is_zero(rng: RandomInputs) -> float:
    """without a target for row n_T, that row of every Δ is exactly 0 and ∂w_pos[n_T] = 0; removing the token gives the
    same loss"""
    worst = 0.0
    for c in cases(rng):
        worst = max(worst, *(_largest(delta[-1]) for delta in _deltas(c.b)))
        worst = max(worst, _largest(c.b.grads.w_pos[len(c.ids) - 1]))
        shorter = transformer.forward(c.ids[:-1], c.p, c.o)
        full, short = (loss.token_losses(f.a_12, t) for f, t in ((c.f, c.targets), (shorter, c.targets[:-1])))
        equal = torch.allclose(full[:-1], short, rtol=IDENTITY_TOLERANCE, atol=0)
        worst = max(worst, 0.0 if equal and full[-1] == 0 else 1.0)
        worst += shortfall(_largest(c.b.delta_1[:-1]), 1e-9)  # the other rows are not 0
    return worst


@check("X-first-row", INVARIANTS, "", EXACT)
def first_row_of_the_causal_signal(rng: RandomInputs) -> float:
    """row 1 of Δ_causal is exactly 0 with a causal mask: token 1 sees one key only, so its query gets no gradient"""
    worst = 0.0
    for c in cases(rng):
        for block in c.b.blocks:
            worst = max(worst, *(_largest(head.delta_causal[0]) for head in block.heads))
            worst += shortfall(max(_largest(head.delta_causal[1:]) for head in block.heads), 1e-12)
    return worst


@check("X-ln-rowsum", INVARIANTS, "", IDENTITY)
def norm_signal_sums_to_zero(rng: RandomInputs) -> tuple[float, str]:
    """rows of LayerNorm's Δ_{i−1} sum to 0 for any ε; Δ_{i−1} ⊖ ā = 0 only for ε = 0"""
    n, d = rng.size(2, 7), rng.size(4, 12)
    a, w, b, delta = rng.matrix(n, d), rng.matrix(d), rng.matrix(d), rng.matrix(n, d)
    along = {}
    sums = 0.0
    for eps in (0.0, 0.1):
        f = layernorm.forward(a, w, b, eps)
        out = layernorm.delta_prev(delta, f.a_bar, f.sigma, w)
        sums = max(sums, _row_sums(out))
        along[eps] = _largest((out * f.a_bar).sum(1)) / _largest(out)
    return max(sums, along[0.0]) + shortfall(
        along[0.1], 1e-6
    ), f"along ā: {along[0.0]:.0e} without ε, {along[0.1]:.0e} with"


@check("X-stream-rowsum", INVARIANTS, "", IDENTITY)
def stream_signal_sums_to_zero(rng: RandomInputs) -> float:
    """hence rows of Δ_10, Δ_5 and Δ_1 sum to 0, and so do rows of ∂w_tok (untied), ∂w_pos, ∂w_3, ∂w_8 and the entries of
    ∂b_3, ∂b_8"""
    worst = 0.0
    for c in cases(rng):
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
def logit_signal_sums_to_zero(rng: RandomInputs) -> float:
    """rows of Δ_12 and of ∂w_11 sum to 0, and so does ∂b_11: the probabilities always sum to 1"""
    worst = 0.0
    for c in cases(rng):
        worst = max(worst, _row_sums(c.b.delta_12))
        if c.b.grads.w_11 is not None and c.b.grads.b_11 is not None:
            worst = max(worst, _row_sums(c.b.grads.w_11), _row_sums(c.b.grads.b_11, c.b.delta_12))
    return worst


@check("X-bv-b3", INVARIANTS, "", IDENTITY)
def value_bias_is_redundant(rng: RandomInputs) -> float:
    """concat_h(∂b_v) = ∂b_3 w_3ᵗ: the values' bias is redundant with that of the projection"""
    blocks = [pair for c in cases(rng) for pair in zip(c.p.blocks, c.b.grads.blocks, strict=True)]
    return max(
        relative_error(torch.cat([head.b_v for head in g.heads]), g.b_3 @ p.w_3.t(), _largest(g.w_3)) for p, g in blocks
    )


@check("X-flash-delta", INVARIANTS, "", IDENTITY)
def correction_from_the_output(rng: RandomInputs) -> float:
    """(Δ vᵗ) ⊖ ρ = Δ ⊖ a_i^h: the softmax correction needs only the output and its error signal"""
    n, d = rng.size(3, 7), rng.size(3, 8)
    head = rng.head(d, rng.size(1, 6), rng.size(1, 6))
    a = rng.matrix(n, d)
    f = attention.forward(a, head)
    delta = rng.matrix(*f.a.shape)
    b = attention.backward(delta, a, head, f)
    return relative_error((b.delta_rho * f.rho).sum(1), (delta * f.a).sum(1), _largest(b.delta_rho))


@check("X-renorm", INVARIANTS, "", IDENTITY)
def renormalized_triangle(rng: RandomInputs) -> float:
    """the causal ρ is also the unmasked softmax with its upper triangle set to 0 and its rows normalized to sum 1"""
    n, d = rng.size(3, 7), rng.size(3, 8)
    head = rng.head(d, rng.size(1, 6), rng.size(1, 6))
    a = rng.matrix(n, d)
    lower = attention.forward(a, head, causal=False).rho.tril()
    return relative_error(attention.forward(a, head).rho, lower / lower.sum(1, keepdim=True))


@check("X-stack", INVARIANTS, "", AUTOGRAD)
def blocks_stack(rng: RandomInputs) -> float:
    """Δ_1 of block b+1 is Δ_10 of block b, and both are what autograd finds there"""
    worst, seen = 0.0, 0
    for c in cases(rng):
        for i, (below, above) in enumerate(zip(c.b.blocks[:-1], c.b.blocks[1:], strict=True)):
            expected = c.expected.deltas[f"blocks.{i}.delta_10"]
            worst = max(worst, relative_error(below.delta_10, expected), relative_error(above.delta_1, expected))
            seen += 1
    return worst + shortfall(seen, 1)


@check("X-lora-init", INVARIANTS, "", EXACT)
def new_adapter(rng: RandomInputs) -> float:
    """with u = 0 at the start the output is unchanged and ∂d = 0, while ∂u ≠ 0: only u changes in the first step"""
    n, f_in, r, f_out = rng.size(2, 6), rng.size(2, 8), rng.size(1, 3), rng.size(2, 8)
    a, d, u, delta = rng.matrix(n, f_in), rng.matrix(f_in, r), torch.zeros(r, f_out).double(), rng.matrix(n, f_out)
    zeros = _largest(lora.forward(a, d, u, 0.5)) + _largest(lora.grad_d(delta, a, u, 0.5))
    return zeros + shortfall(_largest(lora.grad_u(delta, a, d, 0.5)), 1e-6)


@check("X-gpt2-sizes", INVARIANTS, "", EXACT)
def published_sizes(rng: RandomInputs) -> float:
    """the tied count gives 124,439,808 · 354,823,168 · 774,030,080 · 1,557,611,200 for GPT-2 small, medium, large and XL"""
    published = {
        "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    }  # fmt: skip
    wrong = mismatch(*((make_plan(preset(name)).total, count) for name, count in published.items()))
    real = {name: sum(p.numel() for p in GPT(PRESETS[name], device="meta").parameters()) for name in published}
    return wrong + mismatch((real, published))

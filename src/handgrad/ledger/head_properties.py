"""Section 3.1, continued: the complete head, its cost, its biases, and composed layers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import attention, linear
from ..paper.attention import Head
from ..proof.oracles import count_multiply_adds, differentiate, relative_error
from .check import COUNTED, EXACT, IDENTITY, SAMPLED, RandomInputs, check, mismatch, shortfall
from .head_forward import head_inputs, output_by_torch, tensors_of


def _unsaturated(rng: RandomInputs) -> tuple[Tensor, Head]:
    """A head far from saturation, so that every influence on its weights is measurable."""
    n, d = rng.size(5, 8), rng.size(3, 6)
    head = rng.head(d, rng.size(3, 6), rng.size(3, 6))
    return rng.matrix(n, d), head._replace(w_q=head.w_q / 2, b_q=head.b_q / 2, w_k=head.w_k / 2)


def _change(after: attention.Forward, before: attention.Forward) -> float:
    """Change of the output, relative to the largest value."""
    return relative_error(after.a, before.a, floor=before.v.abs().max().item())


@check("P-identity", 3, "", IDENTITY)
def identity_weights(rng: RandomInputs) -> float:
    """ρ = I ⇒ a_i^h = v, with a linear layer's gradients (in exact arithmetic only for n_T = 1: here the other entries of
    ρ underflow to 0)"""
    n, d_h = rng.size(3, 8), rng.size(1, 8)
    a = torch.linalg.qr(rng.matrix(n, n)).Q  # orthonormal rows: 10⁴ a aᵗ is large on the diagonal and 0 elsewhere
    large, zero = 100 * torch.eye(n).double(), torch.zeros(n).double()
    head = rng.head(n, n, d_h)._replace(w_q=large, b_q=zero, w_k=large, b_k=zero)
    f, delta = attention.forward(a, head), rng.matrix(n, d_h)
    back = attention.backward(delta, a, head, f)
    layer = differentiate(lambda a, w, b: F.linear(a, w.t(), b), a, head.w_v, head.b_v, upstream=delta)
    ours = (back.delta, back.grads.w_v, back.grads.b_v)
    zeros = max(g.abs().max().item() for g in tensors_of(back.grads)[:4])
    return max(
        (f.rho - torch.eye(n)).abs().max().item(),
        relative_error(f.a, f.v),
        zeros,
        *(relative_error(g, t) for g, t in zip(ours, layer, strict=True)),
    )


@check("D-att-sig", 3, "17", EXACT)
def signature(rng: RandomInputs) -> float:
    """Att: (n_T, d) → (n_T, d_h) with w_q, b_q, w_k, w_v, b_v and no b_k: 2d d_ρ + d_ρ + d d_h + d_h parameters"""
    a, head = head_inputs(rng)
    head = head._replace(b_k=None)
    (n, d), d_rho, d_h = a.shape, len(head.b_q), len(head.b_v)
    f = attention.forward(a, head)
    grads = attention.backward(rng.matrix(n, d_h), a, head, f).grads
    learned = sum(g.numel() for g in grads if g is not None)
    shapes = [None if g is None else tuple(g.shape) for g in grads]
    return mismatch(
        (f.a.shape, (n, d_h)),
        (learned, 2 * d * d_rho + d_rho + d * d_h + d_h),
        (shapes, [(d, d_rho), (d_rho,), (d, d_rho), None, (d, d_h), (d_h,)]),
    )


@check("E-attn-fwd", 3, "18", IDENTITY)
def complete_head(rng: RandomInputs) -> float:
    """a_i^h = softmax(mask(q kᵗ/√d_ρ)) v equals torch's causal scaled_dot_product_attention"""
    a, head = head_inputs(rng)
    f = attention.forward(a, head)
    return relative_error(f.a, output_by_torch(a, *tensors_of(head)), floor=f.v.abs().max().item())


def _counts(rng: RandomInputs, n: int, d: int, d_rho: int, d_h: int) -> tuple[int, int]:
    """The multiply-adds of one head: after its three projections, and in the projections."""
    a, head = rng.matrix(n, d), rng.head(d, d_rho, d_h)
    layers = ((head.w_q, head.b_q), (head.w_k, head.b_k), (head.w_v, head.b_v))
    projections = count_multiply_adds(lambda: [linear.forward(a, w, b) for w, b in layers])
    return count_multiply_adds(lambda: attention.forward(a, head)) - projections, projections


@check("C-qk-quad", 3, "", COUNTED)
def cost_of_the_weights(rng: RandomInputs) -> float:
    """q kᵗ costs d_ρ n_T² multiply-adds: the additional cost of a larger d_ρ, without the projections"""
    n, d, d_rho, more, d_h = (rng.size(2, 8) for _ in range(5))
    small, large = _counts(rng, n, d, d_rho, d_h)[0], _counts(rng, n, d, d_rho + more, d_h)[0]
    return abs(large - small - more * n**2)


@check("C-mix-quad", 3, "", COUNTED)
def cost_of_the_mixing(rng: RandomInputs) -> float:
    """ρ v costs d_h n_T² multiply-adds, hence n_T²(d_ρ + d_h) with q kᵗ"""
    n, d, d_rho, d_h, more = (rng.size(2, 8) for _ in range(5))
    small, large = _counts(rng, n, d, d_rho, d_h)[0], _counts(rng, n, d, d_rho, d_h + more)[0]
    return abs(large - small - more * n**2) + abs(small - n**2 * (d_rho + d_h))


@check("C-attn-quad", 3, "", COUNTED)
def cost_of_the_head(rng: RandomInputs) -> tuple[float, str]:
    """twice the tokens cost a head four times as much, except its projections: n_T d (2d_ρ + d_h), twice as much"""
    d, d_rho = rng.size(1, 8), rng.size(1, 7)
    d_h = 8 - d_rho
    quadratic, projections = zip(*(_counts(rng, n, d, d_rho, d_h) for n in (8, 16, 32, 64)), strict=True)
    linear_part = tuple(n * d * (2 * d_rho + d_h) for n in (8, 16, 32, 64))
    error = mismatch((quadratic, (512, 2048, 8192, 32768)), (projections, linear_part))
    return error, f"n_T = 8, 16, 32, 64 with d_ρ + d_h = 8: {quadratic}"


# ── biases ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@check("P-bk-impotent", 3, "19", IDENTITY)
def key_bias_has_no_effect(rng: RandomInputs) -> float:
    """b_k shifts a row of q kᵗ by one number, which softmax ignores: any b_k, or none, gives the same, masked or not"""
    a, head = head_inputs(rng)
    errors = []
    for causal in (True, False):
        f = attention.forward(a, head, causal)
        for b_k in (rng.matrix(len(head.b_q)) + 1.7, None):
            other = attention.forward(a, head._replace(b_k=b_k), causal)
            errors += [
                _change(other, f),
                relative_error(other.rho, f.rho),
                shortfall(relative_error(other.k, f.k), 1e-6),
            ]
    return max(errors)


@check("P-swap-bq", 3, "", IDENTITY)
def swapped_roles(rng: RandomInputs) -> float:
    """with ρ = softmax(k qᵗ) it is b_q that has no effect, and b_k has one"""
    a, h = _unsaturated(rng)
    b_k = rng.matrix(len(h.b_q)) / 2
    h = h._replace(b_k=b_k)
    swapped = h._replace(w_q=h.w_k, b_q=b_k, w_k=h.w_q, b_k=h.b_q)  # q and k swapped: raw is k qᵗ
    f = attention.forward(a, swapped)
    shift_q = attention.forward(a, swapped._replace(b_k=h.b_q + 1.7))
    shift_k = attention.forward(a, swapped._replace(b_q=b_k + 1.7))
    return max(
        relative_error(f.raw, attention.forward(a, h).raw.t()),
        _change(shift_q, f),
        shortfall(_change(shift_k, f), 1e-3),
    )


@check("P-bq-bv-live", 3, "", IDENTITY)
def other_biases_matter(rng: RandomInputs) -> float:
    """b_q changes the output, and b_v + s adds s to every row of it, because the weights sum to 1"""
    a, head = _unsaturated(rng)
    f = attention.forward(a, head)
    shift_q = attention.forward(a, head._replace(b_q=head.b_q + 1.7))
    s = rng.matrix(len(head.b_v)) + 1.7
    shift_v = attention.forward(a, head._replace(b_v=head.b_v + s))
    return max(shortfall(_change(shift_q, f), 1e-3), relative_error(shift_v.a, f.a + s))


# ── composed layers ─────────────────────────────────────────────────────────────────────────────────────────────────


def _square(rng: RandomInputs) -> tuple[Tensor, Head]:
    """a and a head with d_h = d, which can be applied to its own output"""
    n, d, d_rho = rng.size(3, 6), rng.size(2, 6), rng.size(2, 6)
    return rng.matrix(n, d), rng.head(d, d_rho, d)


@check("E-compose", 3, "", IDENTITY)
def composition(rng: RandomInputs) -> float:
    """a_{i+1} = Att(Att(a_{i−1})) ∈ (n_T, d): with d_h = d a head can be applied to its own output"""
    a, head = _square(rng)
    twice = attention.forward(attention.forward(a, head).a, head)
    p = tensors_of(head)
    return relative_error(twice.a, output_by_torch(output_by_torch(a, *p), *p), floor=twice.v.abs().max().item())


@check("E-third-order", 3, "20", IDENTITY)
def third_order(rng: RandomInputs) -> float:
    """a_{i+1}(t*) = Σ_α Σ_β ρ⁽ⁱ⁾_{t*α} ρ⁽ⁱ⁻¹⁾_{αβ} a_{i−1}(β) w_v² for b_v = 0: two layers combine three tokens"""
    a, head = _square(rng)
    head = head._replace(b_v=torch.zeros_like(head.b_v))
    first = attention.forward(a, head)
    second = attention.forward(first.a, head)
    n = len(a)
    triple = torch.zeros_like(a)
    for t in range(n):
        for alpha in range(n):
            for beta in range(n):
                triple[t] += second.rho[t, alpha] * first.rho[alpha, beta] * (a[beta] @ head.w_v @ head.w_v)
    matrix = second.rho @ first.rho @ a @ torch.linalg.matrix_power(head.w_v, 2)
    floor = second.v.abs().max().item()
    return max(relative_error(second.a, triple, floor), relative_error(second.a, matrix, floor))


@check("C-growth", 3, "", SAMPLED)
def growth_without_normalization(rng: RandomInputs) -> tuple[float, str]:
    """heads with standard normal w_v and ρ = 1 (one token), composed: the variance grows as d^layers, exponentially"""
    d, n_layers = 200, 10
    a = rng.matrix(1, d)
    start, head = a.var().item(), rng.head(d, 1, 1)
    variances = []
    for _ in range(n_layers):
        a = attention.forward(a, head._replace(w_v=rng.matrix(d, d), b_v=torch.zeros(d).double())).a
        variances.append(a.var().item() / start)
    rate = math.log(variances[-1]) / (n_layers * math.log(d))
    return abs(rate - 1), f"d = {d}: ×{variances[0]:.0f}, ×{variances[1]:.1e}, … ×{variances[-1]:.1e} after {n_layers}"

"""Section 6: low-rank adaptation, and the layers inherited from the predecessor paper."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import activation, linear, lora, transformer
from ..proof.oracles import differentiate, relative_error
from ..proof.reference import ACTIVATIONS
from .check import AUTOGRAD, CHECKS, EXACT, IDENTITY, RandomInputs, check, gradient_error, mismatch, shortfall


def _inputs(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor, float, Tensor]:
    """a (n_T, f_in), d (f_in, r), u (r, f_out), the scale, and an upstream Δ (n_T, f_out)"""
    n, f_in, f_out, r = rng.size(3, 8), rng.size(2, 8), rng.size(2, 8), rng.size(1, 3)
    scale = rng.size(1, 40) / 10
    return rng.matrix(n, f_in), rng.matrix(f_in, r), rng.matrix(r, f_out), scale, rng.matrix(n, f_out)


def _branch(a: Tensor, d: Tensor, u: Tensor, scale: float) -> Tensor:
    return F.linear(a, (d @ u).t() * scale)


@check("D-lora-shapes", 8, "", EXACT)
def shapes(rng: RandomInputs) -> float:
    """d ∈ (f_in, r) projects down to the rank, u ∈ (r, f_out) back up; d u ∈ (f_in, f_out) has rank r at most"""
    a, d, u, scale, delta = _inputs(rng)
    (n, f_in), (r, f_out) = a.shape, u.shape
    on_basis = lora.forward(torch.eye(f_in).double(), d, u, scale)  # the branch as one matrix
    return mismatch(
        (lora.forward(a, d, u, scale).shape, (n, f_out)),
        (lora.delta_prev(delta, d, u, scale).shape, (n, f_in)),
        (lora.grad_d(delta, a, u, scale).shape, (f_in, r)),
        (lora.grad_u(delta, a, d, scale).shape, (r, f_out)),
        (int(torch.linalg.matrix_rank(on_basis)) <= r, True),
    )


@check("N-lora-rank", 8, "", EXACT)
def number_of_parameters(rng: RandomInputs) -> tuple[float, str]:
    """r(f_in+f_out) parameters instead of f_in f_out: fewer up to r = 756 for GPT-2's logits and below 384 for d → d"""

    def trained(f_in: int, f_out: int, r: int) -> int:
        """The size of both gradients, from their formulas on the meta device."""
        a, delta = torch.empty(1, f_in, device="meta"), torch.empty(1, f_out, device="meta")
        d, u = torch.empty(f_in, r, device="meta"), torch.empty(r, f_out, device="meta")
        return lora.grad_d(delta, a, u, 1.0).numel() + lora.grad_u(delta, a, d, 1.0).numel()

    f_in, f_out, r = rng.size(2, 99), rng.size(2, 99), rng.size(1, 9)
    logits, square = 768 * 50257, 768 * 768
    at_16 = trained(768, 50257, 16)
    error = mismatch(
        (trained(f_in, f_out, r), r * (f_in + f_out)),
        (trained(768, 50257, 756) < logits < trained(768, 50257, 757), True),
        (trained(768, 768, 384), square),
    )
    return error, f"rank 16 on the logits layer trains {at_16:,} instead of {logits:,}"


@check("P-lora-frozen-add", 8, "", IDENTITY)
def added_to_a_frozen_layer(rng: RandomInputs) -> float:
    """the branch is added to the frozen layer: together they are one layer with the merged weight w + scale · d u"""
    d = rng.size(2, 8)
    p = rng.network(rng.size(3, 9), 4, d, [(2, 2)], rank=rng.size(1, 3))
    assert p.w_11 is not None and p.adapter is not None
    a = rng.matrix(rng.size(3, 8), d)
    down, up, scale = p.adapter
    ours = transformer.forward_logits(a, p)
    without = transformer.forward_logits(a, p._replace(adapter=None))
    return max(
        relative_error(ours, F.linear(a, (p.w_11 + scale * down @ up).t(), p.b_11)),
        relative_error(without, F.linear(a, p.w_11.t(), p.b_11)),
        shortfall(relative_error(ours, without), 1e-6),
    )


@check("E-lora-fwd", 8, "43", IDENTITY)
def forward(rng: RandomInputs) -> float:
    """a_i = scale · a_{i−1} d u ∈ (n_T, f_out); the paper's α is this factor itself, not α/r (R11)"""
    a, d, u, scale, _ = _inputs(rng)
    return relative_error(lora.forward(a, d, u, scale), scale * torch.linalg.multi_dot([a, d, u]), floor=1.0)


@check("E-lora-dx", 8, "44", AUTOGRAD)
def error_signal(rng: RandomInputs) -> float:
    """Δ_{i−1} = scale · Δ_i (d u)ᵗ ∈ (n_T, f_in), through the low-rank branch only"""
    a, d, u, scale, delta = _inputs(rng)
    return gradient_error(lora.delta_prev(delta, d, u, scale), lambda a: _branch(a, d, u, scale), a, delta, rng)


@check("E-lora-dd", 8, "45", AUTOGRAD)
def gradient_of_down(rng: RandomInputs) -> float:
    """∂d = scale · a_{i−1}ᵗ Δ_i uᵗ ∈ (f_in, r)"""
    a, d, u, scale, delta = _inputs(rng)
    return gradient_error(lora.grad_d(delta, a, u, scale), lambda d: _branch(a, d, u, scale), d, delta, rng)


@check("E-lora-du", 8, "46", AUTOGRAD)
def gradient_of_up(rng: RandomInputs) -> float:
    """∂u = scale · (a_{i−1} d)ᵗ Δ_i ∈ (r, f_out)"""
    a, d, u, scale, delta = _inputs(rng)
    return gradient_error(lora.grad_u(delta, a, d, scale), lambda u: _branch(a, d, u, scale), u, delta, rng)


# ── inherited layers ────────────────────────────────────────────────────────────────────────────────────────────────


@check("E-fc-fwd", 8, "", IDENTITY)
def fully_connected(rng: RandomInputs) -> float:
    """a_i = a_{i−1} w + b~ ∈ (n_T, f_out), or a_{i−1} w without a bias"""
    n, f_in, f_out = rng.size(3, 8), rng.size(2, 8), rng.size(1, 8)
    a, w, b = rng.matrix(n, f_in), rng.matrix(f_in, f_out), rng.matrix(f_out)
    return max(relative_error(linear.forward(a, w, b), F.linear(a, w.t(), b)) for b in (b, None))


@check("E-fc-bwd", 8, "", AUTOGRAD)
def fully_connected_backward(rng: RandomInputs) -> float:
    """Δ_{i−1} = Δ_i wᵗ, ∂w = a_{i−1}ᵗ Δ_i, ∂b = Σ_tok Δ_i"""
    n, f_in, f_out = rng.size(3, 8), rng.size(2, 8), rng.size(1, 8)
    a, w, b, delta = rng.matrix(n, f_in), rng.matrix(f_in, f_out), rng.matrix(f_out), rng.matrix(n, f_out)
    return max(
        gradient_error(linear.delta_prev(delta, w), lambda a: F.linear(a, w.t(), b), a, delta, rng),
        gradient_error(linear.grad_w(delta, a), lambda w: F.linear(a, w.t(), b), w, delta, rng),
        gradient_error(linear.grad_b(delta), lambda b: F.linear(a, w.t(), b), b, delta, rng),
    )


@check("E-act", 8, "Table 2", AUTOGRAD)
def activations(rng: RandomInputs) -> float:
    """a_8 = g(a_7), Δ_7 = Δ_8∘g'(a_7) for ReLU, GELU (xΦ(x), g' = Φ + xφ) and its tanh form; ReLU'(0) = 0 (R39)"""
    n, f = rng.size(3, 8), rng.size(2, 8)
    x, delta = 3 * rng.matrix(n, f), rng.matrix(n, f)
    x[0, 0] = 0.0
    errors = [mismatch((set(activation.NAMES), set(ACTIVATIONS)))]
    for name, reference in ACTIVATIONS.items():
        if f"L-{name}-bwd" in CHECKS:  # beyond the paper, with its own checks
            continue
        errors.append(relative_error(activation.g(x, name), reference(x)))
        ours = activation.delta_prev(delta, x, name)
        if name == "relu":  # finite differences would straddle the kink
            errors.append(relative_error(ours, differentiate(reference, x, upstream=delta)[0]))
        else:
            errors.append(gradient_error(ours, reference, x, delta, rng))
    return max(errors)


@check("E-skip", 8, "Table 2", AUTOGRAD)
def skip_connection(rng: RandomInputs) -> float:
    """y = x + F(x): Δ is copied to both branches, and the error signals of both are added at x"""
    n, d = rng.size(3, 8), rng.size(2, 8)
    x, w, delta = rng.matrix(n, d), rng.matrix(d, d), rng.matrix(n, d)

    def branch(x: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    forward_error = relative_error(transformer.add(x, branch(x)), x + branch(x))
    of_each = differentiate(transformer.add, x, branch(x), upstream=delta)
    copied = mismatch(*((torch.equal(sent, delta), True) for sent in of_each))
    through_branch = differentiate(branch, x, upstream=delta)[0]
    ours = transformer.add(delta, through_branch)
    return max(forward_error, copied, gradient_error(ours, lambda x: x + branch(x), x, delta, rng))

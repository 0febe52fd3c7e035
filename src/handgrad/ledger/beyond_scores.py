"""Beyond the paper: another scale of attention's scores, L-scale-*; a cap, L-cap-*; and sinks, L-sink-*."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import scores
from ..proof.oracles import relative_error
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, gradient_error, shortfall


class _Inputs(NamedTuple):
    q: Tensor  # (n_T, d_ρ)
    k: Tensor
    v: Tensor  # (n_T, d_h)
    delta: Tensor  # (n_T, d_h)   upstream
    b: Tensor  # ()   the sink


def _inputs(rng: RandomInputs) -> _Inputs:
    n, d_rho, d_h = rng.size(3, 9), rng.size(2, 6), rng.size(2, 6)
    q, k, v, delta = (rng.matrix(n, w) for w in (d_rho, d_rho, d_h, d_h))
    return _Inputs(q, k, v, delta, 1 + rng.matrix(1)[0])


def _attend(q: Tensor, k: Tensor, v: Tensor, sigma: float) -> Tensor:
    """torch's attention, causal, scaled by σ"""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=sigma)[0]


def _capped(q: Tensor, k: Tensor, v: Tensor, sigma: float, c: float) -> Tensor:
    """The weights by exponentials of capped scores, c (1 − 2/(e^(2s/c) + 1)), without a softmax or a tanh"""
    weights = torch.exp(c * (1 - 2 / (torch.exp(2 * sigma * (q @ k.t()) / c) + 1))).tril()
    return (weights @ v) / weights.sum(1, keepdim=True)


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sigma: float, b: Tensor) -> Tensor:
    """A key before all others that every query sees: a further feature gives it the score b, and its value is 0"""
    one = torch.ones(len(q), 1, dtype=q.dtype)
    wide_q, wide_k = torch.cat([q, one], 1), torch.cat([k, 0 * one], 1)
    key = torch.cat([torch.zeros_like(k[0]), b[None] / sigma])[None]
    visible = torch.ones(len(q), len(q) + 1, dtype=torch.bool).tril(1)
    keys, values = torch.cat([key, wide_k]), torch.cat([torch.zeros_like(v[:1]), v])
    return F.scaled_dot_product_attention(wide_q[None], keys[None], values[None], visible[None], scale=sigma)[0]


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _gradient_errors(x: _Inputs, back: scores.Backward, by_torch: Attend, rng: RandomInputs) -> float:
    """Of the error signals of q, k and v."""
    return max(
        gradient_error(back.delta_q, lambda q: by_torch(q, x.k, x.v), x.q, x.delta, rng),
        gradient_error(back.delta_k, lambda k: by_torch(x.q, k, x.v), x.k, x.delta, rng),
        gradient_error(back.delta_v, lambda v: by_torch(x.q, x.k, v), x.v, x.delta, rng),
    )


# ── the scale ───────────────────────────────────────────────────────────────────────────────────────────────────────

SCALES = (0.25, 1.0, 1.7)


@check("L-scale-fwd", BEYOND, "", IDENTITY)
def another_scale(rng: RandomInputs) -> float:
    """a = softmax(mask(σ q kᵗ)) v ∈ (n_T, d_h) for any σ; σ = 1/√d_ρ is the paper's"""
    x = _inputs(rng)
    own = scores.forward(x.q, x.k, x.v, x.q.shape[1] ** -0.5).a
    errors = [relative_error(own, F.scaled_dot_product_attention(x.q[None], x.k[None], x.v[None], is_causal=True)[0])]
    for sigma in SCALES:
        errors.append(relative_error(scores.forward(x.q, x.k, x.v, sigma).a, _attend(x.q, x.k, x.v, sigma)))
    return max(errors)


@check("L-scale-bwd", BEYOND, "", AUTOGRAD)
def another_scale_backward(rng: RandomInputs) -> float:
    """Δ_raw = σ Δ_causal ∈ (n_T, n_T), from which the error signals of q and k follow; Δ of v does not depend on σ"""
    x, errors = _inputs(rng), []
    for sigma in SCALES:
        f = scores.forward(x.q, x.k, x.v, sigma)
        back = scores.backward(x.delta, x.q, x.k, x.v, f, (sigma, None))
        errors.append(_gradient_errors(x, back, lambda q, k, v, sigma=sigma: _attend(q, k, v, sigma), rng))  # type: ignore[misc]
    return max(errors)


# ── the cap ─────────────────────────────────────────────────────────────────────────────────────────────────────────

CAPS = (0.5, 2.0, 30.0)


@check("L-cap-fwd", BEYOND, "", IDENTITY)
def capped_scores(rng: RandomInputs) -> float:
    """s' = c tanh(s/c) ∈ (n_T, n_T): |s'| ≤ c; s' = s − s³/(3 c²) + O(s⁵/c⁴) for small scores; a large c changes nothing"""
    x = _inputs(rng)
    errors = [relative_error(scores.forward(x.q, x.k, x.v, 0.7, 1e9).a, _attend(x.q, x.k, x.v, 0.7))]
    for c in CAPS:
        ours = scores.forward(x.q, x.k, x.v, 0.7, c).a
        small = 1e-3 * c * torch.tanh(x.q)
        errors += [
            relative_error(ours, _capped(x.q, x.k, x.v, 0.7, c)),
            shortfall(c, scores.cap(100 * c * x.q, c).abs().max().item()),
            relative_error(scores.cap(small, c), small - small**3 / (3 * c * c) + 2 * small**5 / (15 * c**4)),
        ]
    return max(errors)


@check("L-cap-bwd", BEYOND, "", AUTOGRAD)
def capped_scores_backward(rng: RandomInputs) -> float:
    """Δ_s = Δ_s' ∘ (1 − tanh²(s/c)) ∈ (n_T, n_T), and with it the error signals of q, k and v"""
    x, errors = _inputs(rng), []
    for c in CAPS:
        f = scores.forward(x.q, x.k, x.v, 0.7, c)
        back = scores.backward(x.delta, x.q, x.k, x.v, f, (0.7, c))
        errors.append(_gradient_errors(x, back, lambda q, k, v, c=c: _capped(q, k, v, 0.7, c), rng))  # type: ignore[misc]
    return max(errors)


# ── the sink ────────────────────────────────────────────────────────────────────────────────────────────────────────


@check("L-sink-fwd", BEYOND, "", IDENTITY)
def sink(rng: RandomInputs) -> float:
    """ρ = softmax of the scores and b, without the column of b: a is that of a key with the score b and the value 0; rows of
    ρ sum to 1 − ρ_sink, and b = −∞ changes nothing"""
    x = _inputs(rng)
    f = scores.forward(x.q, x.k, x.v, 0.7, None, x.b)
    assert f.rho_sink is not None
    gone = scores.forward(x.q, x.k, x.v, 0.7, None, torch.tensor(-math.inf, dtype=torch.float64))
    return max(
        relative_error(f.a, _with_sink(x.q, x.k, x.v, 0.7, x.b)),
        relative_error(f.rho.sum(1) + f.rho_sink, torch.ones(len(x.q), dtype=torch.float64)),
        relative_error(gone.a, _attend(x.q, x.k, x.v, 0.7)),
    )


@check("L-sink-lse", BEYOND, "", IDENTITY)
def sink_from_the_sum(rng: RandomInputs) -> float:
    """With lse' = log(exp lse + exp b): ρ = exp(s − lse'), ρ_sink = exp(b − lse'), and a is that without a sink times
    exp(lse − lse') ∈ (n_T)"""
    x = _inputs(rng)
    f, without = scores.forward(x.q, x.k, x.v, 0.7, None, x.b), scores.forward(x.q, x.k, x.v, 0.7)
    assert f.rho_sink is not None
    hidden = torch.ones_like(f.rho, dtype=torch.bool).triu(1)
    lse = f.scaled.masked_fill(hidden, -math.inf).logsumexp(1)
    joined = torch.logaddexp(lse, x.b.expand(len(lse)))
    return max(
        relative_error(f.rho, torch.exp(f.scaled - joined[:, None]).tril()),
        relative_error(f.rho_sink, torch.exp(x.b - joined)),
        relative_error(f.a, without.a * torch.exp(lse - joined)[:, None]),
    )


@check("L-sink-bwd", BEYOND, "", AUTOGRAD)
def sink_backward(rng: RandomInputs) -> float:
    """Δ of q, k and v with a sink: the formulas of the paper, with the ρ and the a of the sink"""
    x = _inputs(rng)
    back = scores.backward(x.delta, x.q, x.k, x.v, scores.forward(x.q, x.k, x.v, 0.7, None, x.b), (0.7, None))
    return _gradient_errors(x, back, lambda q, k, v: _with_sink(q, k, v, 0.7, x.b), rng)


@check("L-sink-grad", BEYOND, "", AUTOGRAD)
def gradient_of_the_sink(rng: RandomInputs) -> float:
    """∂b = −Σ_tok ρ_sink ∘ (Δ ⊖ a), one number for each head"""
    x = _inputs(rng)
    back = scores.backward(x.delta, x.q, x.k, x.v, scores.forward(x.q, x.k, x.v, 0.7, None, x.b), (0.7, None))
    assert back.grad_b is not None
    return gradient_error(back.grad_b, lambda b: _with_sink(x.q, x.k, x.v, 0.7, b), x.b, x.delta, rng)

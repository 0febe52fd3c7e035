"""Layers that the paper does not have: checks L-<layer>-<what>, reported next to the paper's.

A layer has at least a check of its forward pass (L-<layer>-fwd) and one of its backward pass (L-<layer>-bwd).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import activation, rmsnorm
from ..proof.oracles import relative_error
from ..proof.reference import ACTIVATIONS
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, gradient_error

# ── squared ReLU ────────────────────────────────────────────────────────────────────────────────────────────────────


def _activation_inputs(rng: RandomInputs) -> tuple[Tensor, Tensor]:
    """a (n_T, f) with an entry at 0, where a kink would be, and an upstream Δ (n_T, f)"""
    n, f = rng.size(3, 8), rng.size(2, 8)
    a, delta = 3 * rng.matrix(n, f), rng.matrix(n, f)
    a[0, 0] = 0.0
    a[1, 1] = a[1, 1].abs() + 0.1  # both sides of 0 occur in every sample
    a[2, 1] = -a[2, 1].abs() - 0.1
    return a, delta


@check("L-relu2-fwd", BEYOND, "", IDENTITY)
def squared_relu(rng: RandomInputs) -> float:
    """a_8 = max(a_7, 0)² ∈ (n_T, 4d)"""
    a, _ = _activation_inputs(rng)
    return relative_error(activation.g(a, "relu2"), ACTIVATIONS["relu2"](a))


@check("L-relu2-bwd", BEYOND, "", AUTOGRAD)
def squared_relu_backward(rng: RandomInputs) -> float:
    """Δ_7 = 2 Δ_8∘max(a_7, 0) ∈ (n_T, 4d); the slope is continuous, so finite differences agree at a_7 = 0 too"""
    a, delta = _activation_inputs(rng)
    return gradient_error(activation.delta_prev(delta, a, "relu2"), ACTIVATIONS["relu2"], a, delta, rng)


# ── RMSNorm ─────────────────────────────────────────────────────────────────────────────────────────────────────────

EPS = 1e-5
EPSILONS = (0.0, EPS, 0.1)  # the formulas are exact for every ε


def _norm_inputs(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor]:
    """a (n_T, d) whose rows do not have mean 0, w (d) and an upstream Δ (n_T, d)"""
    n, d = rng.size(2, 9), rng.size(3, 17)
    return 2 * rng.matrix(n, d) + 1, rng.matrix(d), rng.matrix(n, d)


def _rms_norm(a: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(a, w.shape, w, eps)


@check("L-rms-fwd", BEYOND, "", IDENTITY)
def rms_norm(rng: RandomInputs) -> float:
    """RMSNorm: a_i = ā diag(w) ∈ (n_T, d) with ā = diag(1/rms) a_{i−1} and rms = √(mean_feat(a∘a) + ε) ∈ (n_T)"""
    a, w, _ = _norm_inputs(rng)
    return max(relative_error(rmsnorm.forward(a, w, eps).a, _rms_norm(a, w, eps)) for eps in EPSILONS)


@check("L-rms-bwd", BEYOND, "", AUTOGRAD)
def rms_norm_backward(rng: RandomInputs) -> float:
    """Δ_{i−1} = diag(1/rms) [G − ā∘~(G⊖ā)/d] ∈ (n_T, d) with G = Δ_i diag(w)"""
    a, w, delta = _norm_inputs(rng)
    errors = []
    for eps in EPSILONS:
        f = rmsnorm.forward(a, w, eps)
        ours = rmsnorm.delta_prev(delta, f.a_bar, f.rms, w)
        errors.append(gradient_error(ours, lambda a, eps=eps: _rms_norm(a, w, eps), a, delta, rng))  # type: ignore[misc]
    return max(errors)


@check("L-rms-grad", BEYOND, "", AUTOGRAD)
def gradient_of_the_rms_gain(rng: RandomInputs) -> float:
    """∂w = Σ_tok ā∘Δ_i ∈ (d)"""
    a, w, delta = _norm_inputs(rng)
    ours = rmsnorm.grad_w(delta, rmsnorm.forward(a, w, EPS).a_bar)
    return gradient_error(ours, lambda w: _rms_norm(a, w, EPS), w, delta, rng)


# ── norms of queries and keys ───────────────────────────────────────────────────────────────────────────────────────


class _Heads(NamedTuple):
    q: Tensor  # (n_T, n_h, d_ρ)
    k: Tensor  # (n_T, n_h, d_ρ)
    gain_q: Tensor  # (d_ρ)
    gain_k: Tensor  # (d_ρ)
    delta: Tensor  # (n_h, n_T, n_T)   upstream, of ρ_raw


def _head_inputs(rng: RandomInputs) -> _Heads:
    n, h, d_rho = rng.size(2, 6), rng.size(2, 4), rng.size(2, 7)
    q, k = (2 * rng.matrix(n, h, d_rho) + 1 for _ in range(2))
    return _Heads(q, k, rng.matrix(d_rho), rng.matrix(d_rho), rng.matrix(h, n, n))


def _raw_scores(q: Tensor, k: Tensor, gain_q: Tensor, gain_k: Tensor) -> Tensor:
    """ρ_raw of all heads at once, by torch"""
    return torch.einsum("ihr,jhr->hij", _rms_norm(q, gain_q, EPS), _rms_norm(k, gain_k, EPS))


def _normed(x: _Heads) -> tuple[list[rmsnorm.Forward], list[rmsnorm.Forward]]:
    """The norms of q and of k, head by head"""
    return rmsnorm.forward_heads(x.q.unbind(1), x.gain_q, EPS), rmsnorm.forward_heads(x.k.unbind(1), x.gain_k, EPS)


def _signals(x: _Heads, q: list[rmsnorm.Forward], k: list[rmsnorm.Forward]) -> tuple[list[Tensor], list[Tensor]]:
    """Δ of the normed q and k, head by head: Δ_raw k and Δ_rawᵗ q"""
    return [d @ f.a for d, f in zip(x.delta, k, strict=True)], [d.t() @ f.a for d, f in zip(x.delta, q, strict=True)]


@check("L-qknorm-fwd", BEYOND, "", IDENTITY)
def query_and_key_norm(rng: RandomInputs) -> float:
    """q/k norm: ρ_raw^h = RMSNorm(q^h) RMSNorm(k^h)ᵗ ∈ (n_T, n_T), over d_ρ features; all heads share the two gains"""
    x = _head_inputs(rng)
    ours = torch.stack([q.a @ k.a.t() for q, k in zip(*_normed(x), strict=True)])
    return relative_error(ours, _raw_scores(x.q, x.k, x.gain_q, x.gain_k))


@check("L-qknorm-bwd", BEYOND, "", AUTOGRAD)
def query_and_key_norm_backward(rng: RandomInputs) -> float:
    """Δ of q^h and k^h ∈ (n_T, d_ρ): RMSNorm's, head by head, from Δ_raw RMSNorm(k^h) and Δ_rawᵗ RMSNorm(q^h)"""
    x = _head_inputs(rng)
    q, k = _normed(x)
    signals_q, signals_k = _signals(x, q, k)
    delta_q = torch.stack(rmsnorm.delta_prev_heads(signals_q, q, x.gain_q), 1)
    delta_k = torch.stack(rmsnorm.delta_prev_heads(signals_k, k, x.gain_k), 1)
    return max(
        gradient_error(delta_q, lambda q: _raw_scores(q, x.k, x.gain_q, x.gain_k), x.q, x.delta, rng),
        gradient_error(delta_k, lambda k: _raw_scores(x.q, k, x.gain_q, x.gain_k), x.k, x.delta, rng),
    )


@check("L-qknorm-grad", BEYOND, "", AUTOGRAD)
def gradient_of_the_query_and_key_gain(rng: RandomInputs) -> float:
    """∂w ∈ (d_ρ) of the gain of q, and of that of k: Σ_h Σ_tok ā^h∘Δ^h, over the tokens of all heads"""
    x = _head_inputs(rng)
    q, k = _normed(x)
    signals_q, signals_k = _signals(x, q, k)
    return max(
        gradient_error(
            rmsnorm.grad_w_heads(signals_q, q), lambda w: _raw_scores(x.q, x.k, w, x.gain_k), x.gain_q, x.delta, rng
        ),
        gradient_error(
            rmsnorm.grad_w_heads(signals_k, k), lambda w: _raw_scores(x.q, x.k, x.gain_q, w), x.gain_k, x.delta, rng
        ),
    )

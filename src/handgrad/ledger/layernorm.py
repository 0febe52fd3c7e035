"""Section 5: layer normalization."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import layernorm
from ..proof.oracles import differentiate, relative_error
from .check import AUTOGRAD, EXACT, IDENTITY, RandomInputs, check, disagreement, mismatch, shortfall

EPS = 1e-5


def _inputs(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a (n_T, d), w (d), b (d) and an upstream Δ (n_T, d)"""
    n, d = rng.size(2, 9), rng.size(3, 17)
    return 2 * rng.matrix(n, d) + 1, rng.matrix(d), rng.matrix(d), rng.matrix(n, d)


def _by_torch(a: Tensor, w: Tensor, b: Tensor, delta: Tensor, eps: float) -> tuple[Tensor, ...]:
    return differentiate(lambda a, w, b: F.layer_norm(a, w.shape, w, b, eps), a, w, b, upstream=delta)


@check("E-ln-stats", 7, "", IDENTITY)
def statistics(rng: RandomInputs) -> tuple[float, str]:
    """μ_t and σ_t are the mean and the population deviation (1/d) over the features of token t, both in (n_T)"""
    a, w, b, _ = _inputs(rng)
    f = layernorm.forward(a, w, b, 0.0)
    error = max(relative_error(f.mu, a.mean(1)), relative_error(f.sigma, a.std(1, correction=0)))
    unbiased = relative_error(f.sigma, a.std(1, correction=1))
    return max(error, shortfall(unbiased, 0.01)), f"the unbiased deviation would be off by {unbiased:.2f}"


@check("E-ln-norm", 7, "36", IDENTITY)
def normalization(rng: RandomInputs) -> float:
    """ā = diag(1/σ)(a − μ~) ∈ (n_T, d): every row has mean 0 and mean square 1"""
    a, w, b, _ = _inputs(rng)
    a_bar = layernorm.forward(a, w, b, 0.0).a_bar
    means, squares = a_bar.mean(1), (a_bar**2).mean(1)
    direct = (a - a.mean(1, keepdim=True)) / a.std(1, correction=0, keepdim=True)
    return max(means.abs().max().item(), relative_error(squares, torch.ones(len(a))), relative_error(a_bar, direct))


@check("E-ln-affine", 7, "37", IDENTITY)
def affine(rng: RandomInputs) -> float:
    """a_i = ā diag(w) + b~ with w, b ∈ (d)"""
    a, w, b, _ = _inputs(rng)
    f = layernorm.forward(a, w, b, EPS)
    return relative_error(f.a, f.a_bar * w + b)


@check("E-ln-fwd", 7, "38", IDENTITY)
def forward(rng: RandomInputs) -> float:
    """both steps together equal torch's layer_norm"""
    a, w, b, _ = _inputs(rng)
    return relative_error(layernorm.forward(a, w, b, EPS).a, F.layer_norm(a, w.shape, w, b, EPS))


@check("P-ln-stats-shape", 7, "", EXACT)
def statistics_per_token(rng: RandomInputs) -> float:
    """LayerNorm's statistics have one entry per token (n_T); batch normalization's have one per feature (d)"""
    a, w, b, _ = _inputs(rng)
    f = layernorm.forward(a, w, b, EPS)
    n, d = a.shape
    batch_norm = F.batch_norm(a, mean := torch.zeros(d).double(), torch.ones(d).double(), training=True)
    return mismatch((f.mu.shape, (n,)), (f.sigma.shape, (n,)), (mean.shape, (d,)), (batch_norm.shape, (n, d)))


@check("P-ln-tokindep", 7, "", EXACT)
def token_by_token(rng: RandomInputs) -> float:
    """each token is normalized separately: changing one token leaves the others exactly unchanged"""
    a, w, b, _ = _inputs(rng)
    changed = a.clone()
    changed[0] = rng.matrix(a.shape[1])
    before, after = layernorm.forward(a, w, b, EPS).a, layernorm.forward(changed, w, b, EPS).a
    return (before[1:] - after[1:]).abs().max().item() + shortfall((before[0] - after[0]).abs().max().item(), 1e-3)


@check("P-lnbn", 7, "39", IDENTITY)
def layer_norm_is_batch_norm_transposed(rng: RandomInputs) -> float:
    """the normalization step alone: LN(a) = [BN(aᵗ)]ᵗ"""
    a, w, b, _ = _inputs(rng)
    batch_norm = F.batch_norm(a.t(), None, None, training=True, eps=EPS)
    return relative_error(layernorm.forward(a, w, b, EPS).a_bar, batch_norm.t())


@check("E-ln-dx", 7, "40", AUTOGRAD)
def error_signal(rng: RandomInputs) -> float:
    """Δ_{i−1} = diag(1/(dσ)) [dG − 1 Σ_feat G − āᵗ∘(1 Σ_feat(āᵗ∘G))]ᵗ with G = diag(w) Δ_iᵗ; exact for ε > 0 too"""
    a, w, b, delta = _inputs(rng)
    errors = []
    for eps in (0.0, EPS, 0.1):
        f = layernorm.forward(a, w, b, eps)
        ours = layernorm.delta_prev(delta, f.a_bar, f.sigma, w)
        errors.append(relative_error(ours, _by_torch(a, w, b, delta, eps)[0]))
        errors.append(disagreement(lambda x, eps=eps: layernorm.forward(x, w, b, eps).a, a, ours, delta, rng))  # type: ignore[misc]
    return max(errors)


@check("E-ln-dw", 7, "41", AUTOGRAD)
def gradient_of_the_gain(rng: RandomInputs) -> float:
    """∂w = diag(āᵗ Δ_i) ∈ (d), which is Σ_tok ā∘Δ_i"""
    a, w, b, delta = _inputs(rng)
    ours = layernorm.grad_w(delta, layernorm.forward(a, w, b, EPS).a_bar)
    return relative_error(ours, _by_torch(a, w, b, delta, EPS)[1])


@check("E-ln-db", 7, "42", AUTOGRAD)
def gradient_of_the_offset(rng: RandomInputs) -> float:
    """∂b = Σ_tok Δ_i ∈ (d)"""
    a, w, b, delta = _inputs(rng)
    return relative_error(layernorm.grad_b(delta), _by_torch(a, w, b, delta, EPS)[2])

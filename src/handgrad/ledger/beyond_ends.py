"""Beyond the paper: multiplied embeddings, L-embed-*; scaled and capped logits, L-logits-*; LayerNorm without bias,
L-center-*; norms of all heads together, L-joint-*; heads rotated in part or for longer contexts, L-partial-*, L-rope-*."""

import math
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import embedding, layernorm, logits, loss, rmsnorm, rotary
from ..proof.oracles import relative_error
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, gradient_error, mismatch, shortfall

# ── embeddings and logits ───────────────────────────────────────────────────────────────────────────────────────────


@check("L-embed-fwd", BEYOND, "", IDENTITY)
def multiplied_embedding(rng: RandomInputs) -> float:
    """a_1 = s ohe(a_0) w_tok ∈ (n_T, d)"""
    w, s = rng.matrix(rng.size(3, 8), rng.size(2, 6)), 0.5 + rng.size(1, 9)
    ids = rng.ids(6, len(w))
    return relative_error(embedding.forward_scaled(ids, w, s), s * F.embedding(ids, w))


@check("L-embed-bwd", BEYOND, "", AUTOGRAD)
def multiplied_embedding_backward(rng: RandomInputs) -> float:
    """∂w_tok = s ohe(a_0)ᵗ Δ_1 ∈ (n_vocab, d); of a tied matrix, s multiplies this part alone: ∂w_tok = s ohe(a_0)ᵗ Δ_1 +
    Δ_12ᵗ a_11"""
    w, s = rng.matrix(rng.size(3, 8), rng.size(2, 6)), 0.5 + rng.size(1, 9)
    ids = rng.ids(6, len(w))
    delta, delta_12 = rng.matrix(6, w.shape[1]), rng.matrix(6, len(w))
    ours = embedding.grad_w_scaled(delta, ids, len(w), s)
    a_11 = embedding.forward_scaled(ids, w, s)
    back = embedding.grad_w_scaled(delta_12 @ w, ids, len(w), s) + delta_12.t() @ a_11
    return max(
        gradient_error(ours, lambda w: s * F.embedding(ids, w), w, delta, rng),
        gradient_error(back, lambda w: F.linear(s * F.embedding(ids, w), w), w, delta_12, rng),
    )


MAPS = ((0.3, None), (1.0, 2.0), (1.7, 0.5), (1.0, 30.0))  # s, c


def _mapped(a: Tensor, s: float, c: float | None) -> Tensor:
    """Without a tanh: c (1 − 2/(e^(2 s a/c) + 1))"""
    return s * a if c is None else c * (1 - 2 / (torch.exp(2 * s * a / c) + 1))


@check("L-logits-fwd", BEYOND, "", IDENTITY)
def mapped_logits(rng: RandomInputs) -> float:
    """y = s a_12, or c tanh(s a_12/c) ∈ (n_T, n_vocab): |y| ≤ c, in the order of a_12, and s a_12 for a large c"""
    a = rng.matrix(rng.size(2, 6), rng.size(3, 9))
    errors = [relative_error(logits.forward(a, 0.7, 1e9), 0.7 * a)]
    for s, c in MAPS:
        y = logits.forward(a, s, c)
        errors += [relative_error(y, _mapped(a, s, c)), mismatch((y.argsort(1).tolist(), a.argsort(1).tolist()))]
        errors.append(0.0 if c is None else shortfall(c, logits.forward(100 * a, s, c).abs().max().item()))
    return max(errors)


@check("L-logits-bwd", BEYOND, "", AUTOGRAD)
def mapped_logits_backward(rng: RandomInputs) -> float:
    """Δ_12 = s Δ_y, or s (1 − (y/c)²)∘Δ_y ∈ (n_T, n_vocab), Δ_y = softmax(y) − y_gt"""
    a = rng.matrix(rng.size(2, 6), rng.size(3, 9))
    targets, errors = rng.ids(len(a), a.shape[1]), []
    for s, c in MAPS:
        y = logits.forward(a, s, c)
        ours = logits.delta_prev(loss.delta_logits(torch.softmax(y, 1), targets), y, s, c)

        def by_torch(a: Tensor, s: float = s, c: float | None = c) -> Tensor:
            return F.cross_entropy(_mapped(a, s, c), targets, reduction="sum")

        errors.append(gradient_error(ours, by_torch, a, torch.ones((), dtype=torch.float64), rng))
    return max(errors)


@check("L-logits-rowsum", BEYOND, "", IDENTITY)
def rows_of_mapped_logits(rng: RandomInputs) -> float:
    """Rows of Δ_12 sum to 0 with a scale, as without; with a cap they do not, since a constant added to all logits then
    changes the loss. |Δ_12| ≤ s |Δ_y|, and 0 where a logit is at the cap"""
    a = rng.matrix(rng.size(2, 6), rng.size(3, 9))
    targets = rng.ids(len(a), a.shape[1])
    delta, errors = {}, []
    for s, c in MAPS:
        y = logits.forward(a, s, c)
        delta_y = loss.delta_logits(torch.softmax(y, 1), targets)
        delta[s, c] = logits.delta_prev(delta_y, y, s, c)
        errors.append((delta[s, c].abs() - s * delta_y.abs() * (1 + 1e-12)).clamp(min=0).max().item())
    capped = torch.full_like(a, 2.0)
    return max(
        *errors,
        delta[0.3, None].sum(1).abs().max().item(),
        shortfall(delta[1.7, 0.5].sum(1).abs().max().item(), 1e-6),
        logits.delta_prev(torch.ones_like(a), capped, 1.0, 2.0).abs().max().item(),
    )


# ── norms ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _norm_inputs(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor]:
    n, d = rng.size(2, 9), rng.size(3, 9)
    return 2 * rng.matrix(n, d) + 1, rng.matrix(d), rng.matrix(n, d)


def _centered(a: Tensor) -> Tensor:
    return a - a.mean(1, keepdim=True)


@check("L-center-fwd", BEYOND, "", IDENTITY)
def layernorm_without_bias(rng: RandomInputs) -> float:
    """LayerNorm without b ∈ (n_T, d) is RMSNorm of a − μ~, for every ε"""
    a, w, _ = _norm_inputs(rng)
    errors = []
    for eps in (0.0, 1e-5, 0.1):
        ours = layernorm.forward(a, w, torch.zeros_like(w), eps).a
        errors.append(relative_error(ours, F.layer_norm(a, w.shape, w, None, eps)))
        errors.append(relative_error(ours, rmsnorm.forward(_centered(a), w, eps).a))
    return max(errors)


@check("L-center-bwd", BEYOND, "", AUTOGRAD)
def layernorm_without_bias_backward(rng: RandomInputs) -> float:
    """Δ_{i−1} ∈ (n_T, d) is RMSNorm's of the centered rows, minus its mean over the features; ∂w does not change"""
    a, w, delta = _norm_inputs(rng)
    f = layernorm.forward(a, w, torch.zeros_like(w), 1e-5)
    ours = layernorm.delta_prev(delta, f.a_bar, f.sigma, w)
    rms = rmsnorm.forward(_centered(a), w, 1e-5)
    return max(
        gradient_error(ours, lambda a: F.layer_norm(a, w.shape, w, None, 1e-5), a, delta, rng),
        relative_error(ours, _centered(rmsnorm.delta_prev(delta, rms.a_bar, rms.rms, w))),
        gradient_error(
            layernorm.grad_w(delta, f.a_bar), lambda w: F.layer_norm(a, w.shape, w, None, 1e-5), w, delta, rng
        ),
    )


def _joint_inputs(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor]:
    """q and Δ (n_T, n_h, d_ρ), w (n_h d_ρ)"""
    n, h, d_rho = rng.size(2, 6), rng.size(2, 4), rng.size(2, 5)
    return 2 * rng.matrix(n, h, d_rho) + 1, rng.matrix(h * d_rho), rng.matrix(n, h, d_rho)


def _joint(q: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(q.flatten(1), w.shape, w, 1e-5).view_as(q)


@check("L-joint-fwd", BEYOND, "", IDENTITY)
def norm_of_all_heads(rng: RandomInputs) -> float:
    """RMSNorm of the n_h d_ρ features of a token's queries together, w ∈ (n_h d_ρ): the heads keep their proportions, which
    a norm of each head would make equal"""
    q, w, _ = _joint_inputs(rng)
    heads, _ = rmsnorm.forward_joint(q.unbind(1), w, 1e-5)
    plain, _ = rmsnorm.forward_joint(q.unbind(1), torch.ones_like(w), 0.0)
    lengths, expected = torch.stack(plain, 1).norm(dim=2), q.norm(dim=2)
    return max(
        relative_error(torch.stack(heads, 1), _joint(q, w)),
        relative_error(lengths / lengths[:, :1], expected / expected[:, :1]),
    )


@check("L-joint-bwd", BEYOND, "", AUTOGRAD)
def norm_of_all_heads_backward(rng: RandomInputs) -> float:
    """Δ^h_{i−1} ∈ (n_T, d_ρ) depends on all heads, by one mean over n_h d_ρ features; ∂w = Σ_tok ā∘Δ_i ∈ (n_h d_ρ)"""
    q, w, delta = _joint_inputs(rng)
    _, f = rmsnorm.forward_joint(q.unbind(1), w, 1e-5)
    ours = torch.stack(rmsnorm.delta_prev_joint(delta.unbind(1), f, w), 1)
    return max(
        gradient_error(ours, lambda q: _joint(q, w), q, delta, rng),
        gradient_error(rmsnorm.grad_w(delta.flatten(1), f.a_bar), lambda w: _joint(q, w), w, delta, rng),
    )


# ── rotary positions ────────────────────────────────────────────────────────────────────────────────────────────────


def _rotated(x: Tensor, positions: Tensor, theta: Tensor, interleaved: bool) -> Tensor:
    """The first features as complex numbers times e^{iθt}"""
    w = 2 * len(theta)
    first, second = (x[:, 0:w:2], x[:, 1:w:2]) if interleaved else (x[:, : w // 2], x[:, w // 2 : w])
    angle = positions.double()[:, None] * theta
    z = torch.complex(first.contiguous(), second.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    planes = torch.stack([z.real, z.imag], 2).flatten(1) if interleaved else torch.cat([z.real, z.imag], 1)
    return torch.cat([planes, x[:, w:]], 1)


def _rotary_inputs(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and Δ (n_T, d_ρ), positions (n_T), θ (w/2) with w < d_ρ"""
    n, w, rest = rng.size(3, 8), 2 * rng.size(2, 4), rng.size(1, 5)
    positions = torch.tensor([rng.size(1, 200) for _ in range(n)])
    return rng.matrix(n, w + rest), rng.matrix(n, w + rest), positions, rotary.frequencies(w, 100.0)


@check("L-partial-fwd", BEYOND, "", IDENTITY)
def partial_rotation(rng: RandomInputs) -> float:
    """y_t = diag(R(t), 1) x_t ∈ (n_T, d_ρ): the first w features are rotated, which keeps their length, and the others stay.
    θ_i = base^(−2i/w)"""
    x, _, positions, theta = _rotary_inputs(rng)
    w, errors = 2 * len(theta), []
    for interleaved in (False, True):
        y = rotary.forward_partial(x, positions, theta, interleaved)
        errors += [
            relative_error(y, _rotated(x, positions, theta, interleaved)),
            relative_error(y[:, :w].norm(dim=1), x[:, :w].norm(dim=1)),
            mismatch((y[:, w:].tolist(), x[:, w:].tolist())),
            shortfall(relative_error(y[:, :w], x[:, :w]), 1e-3),
        ]
    return max(errors)


@check("L-partial-bwd", BEYOND, "", AUTOGRAD)
def partial_rotation_backward(rng: RandomInputs) -> float:
    """Δ_x = diag(R(t)ᵗ, 1) Δ_y ∈ (n_T, d_ρ)"""
    x, delta, positions, theta = _rotary_inputs(rng)
    errors = []
    for interleaved in (False, True):
        ours = rotary.delta_prev_partial(delta, positions, theta, interleaved)
        errors.append(gradient_error(ours, lambda x, i=interleaved: _rotated(x, positions, theta, i), x, delta, rng))  # type: ignore[misc]
    return max(errors)


@check("L-rope-longrope", BEYOND, "", IDENTITY)
def rotary_longrope(rng: RandomInputs) -> float:
    """longrope: θ'_i = θ_i/f_i, which is the rotation of plane i at position t/f_i; with equal factors it is linear.
    m² = 1 + ln f/ln n"""
    x, _, positions, theta = _rotary_inputs(rng)
    factors = [1 + 0.5 * rng.size(0, 8) for _ in theta]
    ours = rotary.longrope(theta, factors)
    turned = [
        _rotated(x[:, [i, len(theta) + i]], positions.double() / f, theta[i : i + 1], False)
        for i, f in enumerate(factors)
    ]
    expected = torch.stack(turned, 2)  # (n, 2, planes)
    y = rotary.forward_partial(x, positions, ours, False)[:, : 2 * len(theta)].view(len(x), 2, -1)
    m = rotary.longrope_attention_factor(32.0, 4096)
    return max(
        relative_error(y, expected),
        relative_error(rotary.longrope(theta, [3.0] * len(theta)), rotary.linear(theta, 3.0)),
        abs(math.pow(4096, m * m - 1) / 32 - 1),
        mismatch((rotary.longrope_attention_factor(1.0, 4096), 1.0)),
    )


@check("L-rope-dynamic", BEYOND, "", IDENTITY)
def rotary_dynamic(rng: RandomInputs) -> float:
    """dynamic: within the context N the rotation is not scaled; beyond it, at n tokens, the slowest plane has θ divided by
    f n/N − f + 1, the fastest none"""
    d_rho, context, f = 2 * rng.size(3, 8), rng.size(50, 500), float(rng.size(2, 8))
    errors = []
    for n, base in product((1, context, 2 * context, 7 * context), (1e4, 5e5)):
        theta, scaled = (rotary.frequencies(d_rho, b) for b in (base, rotary.dynamic_base(d_rho, base, f, context, n)))
        divided = f * max(n, context) / context - f + 1
        errors += [abs(float(theta[-1] / scaled[-1]) / divided - 1), abs(float(theta[0] / scaled[0]) - 1)]
        if n <= context:
            errors.append(relative_error(scaled, theta))
    return max(errors)

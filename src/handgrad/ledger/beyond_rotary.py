"""Beyond the paper: rotary positions, L-rope-*. The oracle of a rotation is a product of complex numbers."""

import math
from itertools import product

import torch
from torch import Tensor

from ..paper import rotary
from ..proof.oracles import relative_error
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, gradient_error, mismatch, shortfall

BASES = (10_000.0, 500_000.0)
FORMS = (False, True)  # half-split, interleaved
FACTORS = (1.0, 1.3)  # m


def _inputs(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and an upstream Δ (n_T, d_ρ), positions (n_T) from 0, not in order, and θ (d_ρ/2), three planes or more: the
    permutation of two is its own inverse"""
    n, d_rho = rng.size(3, 8), 2 * rng.size(3, 6)
    positions = torch.tensor([0, *(rng.size(1, 200) for _ in range(n - 1))])
    return rng.matrix(n, d_rho), rng.matrix(n, d_rho), positions, rotary.frequencies(d_rho, rng.size(50, 10_000))


def _multiplied(x: Tensor, positions: Tensor, theta: Tensor, interleaved: bool) -> Tensor:
    """(x_i + i x_j) e^{i θ t}, written back to the two features of each plane"""
    n, d_rho = x.shape
    pairs = x.view(n, d_rho // 2, 2) if interleaved else x.view(n, 2, d_rho // 2).transpose(1, 2)
    angle = positions.double()[:, None] * theta
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_real(turned)
    return (pairs if interleaved else pairs.transpose(1, 2)).reshape(n, d_rho)


@check("L-rope-fwd", BEYOND, "", IDENTITY)
def rotary_forward(rng: RandomInputs) -> float:
    """y_t = m R(t) x_t ∈ (n_T, d_ρ): plane i is multiplied by m e^{iθ_i t}, θ_i = base^(−2i/d_ρ), m = 1 or yarn's attention
    factor; position 0 is not rotated"""
    x, _, positions, _ = _inputs(rng)
    d_rho = x.shape[1]
    errors = []
    for base in BASES:
        ours = rotary.frequencies(d_rho, base)
        theta = torch.logspace(0, 2 / d_rho - 1, d_rho // 2, base, dtype=torch.float64)
        errors.append(relative_error(ours / theta, torch.ones_like(theta)))
        for interleaved, m in product(FORMS, FACTORS):
            y = rotary.forward(x, positions, theta, interleaved, m)
            errors.append(relative_error(y, m * _multiplied(x, positions, theta, interleaved)))
            errors.append(relative_error(y[0], m * x[0]))
    return max(errors)


@check("L-rope-bwd", BEYOND, "", AUTOGRAD)
def rotary_backward(rng: RandomInputs) -> float:
    """Δ_x = R(t)ᵗ Δ_y ∈ (n_T, d_ρ), the rotation by −θ_i t; with an attention factor m, Δ_x = m R(t)ᵗ Δ_y"""
    x, delta, positions, theta = _inputs(rng)
    errors = []
    for interleaved, m in product(FORMS, FACTORS):

        def scaled(x: Tensor, interleaved: bool = interleaved, m: float = m) -> Tensor:
            return m * _multiplied(x, positions, theta, interleaved)

        ours = rotary.delta_prev(delta, positions, theta, interleaved, m)
        errors.append(gradient_error(ours, scaled, x, delta, rng))
    return max(errors)


@check("L-rope-orthogonal", BEYOND, "", IDENTITY)
def rotary_orthogonal(rng: RandomInputs) -> float:
    """R(t)ᵗ R(t) = 1, R(s) R(t) = R(s + t), R(−t) = R(t)ᵗ: lengths of queries, keys and error signals are kept"""
    x, _, positions, theta = _inputs(rng)
    s, t = (float(rng.size(1, 200)) for _ in range(2))
    errors = []
    for interleaved in FORMS:
        r_s, r_t, r_sum, r_back = (rotary.rotation(p, theta, interleaved) for p in (s, t, s + t, -t))
        y = rotary.forward(x, positions, theta, interleaved)
        errors += [
            relative_error(r_t.t() @ r_t, torch.eye(len(r_t), dtype=torch.float64)),
            relative_error(r_s @ r_t, r_sum),
            relative_error(r_back, r_t.t()),
            relative_error(y.norm(dim=1), x.norm(dim=1)),
        ]
    return max(errors)


@check("L-rope-relative", BEYOND, "", IDENTITY)
def rotary_relative(rng: RandomInputs) -> float:
    """(R(s) q)ᵗ (R(t) k) = qᵗ R(t − s) k: scores do not change if all positions are shifted, and change if only
    some are"""
    q, k, positions, theta = _inputs(rng)
    shift = rng.size(1, 100)
    errors = []
    for interleaved in FORMS:

        def scores(queries: Tensor, keys: Tensor, interleaved: bool = interleaved) -> Tensor:
            return rotary.forward(q, queries, theta, interleaved) @ rotary.forward(k, keys, theta, interleaved).t()

        here = scores(positions, positions)
        differences = [
            torch.stack(
                [q[i] @ rotary.rotation(t - s, theta, interleaved) @ k[j] for j, t in enumerate(positions.tolist())]
            )
            for i, s in enumerate(positions.tolist())
        ]
        errors += [
            relative_error(scores(positions + shift, positions + shift), here),
            relative_error(here, torch.stack(differences)),
            shortfall(relative_error(scores(positions + 1, positions), here), 1e-3),
        ]
    return max(errors)


@check("L-rope-forms", BEYOND, "", IDENTITY)
def rotary_forms(rng: RandomInputs) -> float:
    """R_half(t) = P R_interleaved(t) Pᵗ: both forms have the same scores if the columns of w_q and w_k are permuted, w Pᵗ,
    and different scores if not"""
    x, _, positions, theta = _inputs(rng)
    d_rho = 2 * len(theta)
    d, p = rng.size(3, 6), rotary.permutation(d_rho)
    a, w_q, w_k = rng.matrix(len(x), d), rng.matrix(d, d_rho), rng.matrix(d, d_rho)

    def scores(w_q: Tensor, w_k: Tensor, interleaved: bool) -> Tensor:
        q, k = (rotary.forward(a @ w, positions, theta, interleaved) for w in (w_q, w_k))
        return q @ k.t()

    expected = scores(w_q, w_k, True)
    t = positions[-1].item()
    return max(
        relative_error(p @ rotary.rotation(t, theta, True) @ p.t(), rotary.rotation(t, theta, False)),
        relative_error(p @ torch.arange(d_rho).double(), torch.arange(d_rho).view(-1, 2).t().flatten().double()),
        relative_error(scores(w_q @ p.t(), w_k @ p.t(), False), expected),
        shortfall(relative_error(scores(w_q, w_k, False), expected), 1e-3),
    )


@check("L-rope-scaling", BEYOND, "", IDENTITY)
def rotary_scaling(rng: RandomInputs) -> tuple[float, str]:
    """linear: θ/f at position t is θ at t/f. llama3 and yarn: planes with many turns in the original context keep θ, planes
    with few get θ/f, those between lie between. yarn: m = 0.1 ln f + 1"""
    x, _, positions, theta = _inputs(rng)
    f, n, d_rho, base = float(rng.size(2, 40)), rng.size(2_000, 10_000), 128, BASES[1]
    y = rotary.forward(x, positions, rotary.linear(theta, f), False)
    errors = [relative_error(y, _multiplied(x, positions.double() / f, theta, False))]
    theta = rotary.frequencies(d_rho, base)
    llama3, yarn = rotary.llama3_share(theta, 1, 4, n), rotary.yarn_share(d_rho, base, 32, 1, n)
    errors.append(_blend_error(theta, f, llama3, n, 1, 4))
    errors.append(_blend_error(theta, f, yarn, n, 0.8, 40))  # 1 and 32, but yarn rounds to complete planes
    two_turns = torch.tensor([2 * 2 * math.pi / n], dtype=torch.float64)
    errors.append(abs(rotary.llama3_share(two_turns, 1, 4, n)[0] - 1 / 3))
    first, last = (d_rho / 2 * math.log(n / (2 * math.pi * turns), base) for turns in (32, 1))
    i = round((first + last) / 2)
    errors.append(abs(rotary.yarn_share(d_rho, base, 32, 1, n, truncate=False)[i] - (last - i) / (last - first)))
    m = rotary.yarn_attention_factor(f)
    errors += [abs(10 * (m - 1) - math.log(f)), abs(rotary.yarn_attention_factor(f, 0.7, 0.7) - 1)]
    errors.append(abs(rotary.yarn_attention_factor(1.0) - 1))
    return max(errors), f"f = {f:g}, m = {m:.4f}"


def _blend_error(theta: Tensor, f: float, share: list[float], n: int, low: float, high: float) -> float:
    """Planes with fewer than `low` turns in n positions get θ/f, those with more than `high` keep θ, others lie between."""
    ratio, turns = rotary.blend(theta, f, share) / theta, n * theta / (2 * math.pi)
    few, many = turns < low, turns > high
    between = ratio[~few & ~many]
    return max(
        relative_error(ratio[few] * f, torch.ones_like(ratio[few])),
        relative_error(ratio[many], torch.ones_like(ratio[many])),
        mismatch(*((x, True) for x in (few.any().item(), many.any().item(), (ratio.diff() <= 1e-12).all().item()))),
        mismatch((((1 / f < between) & (between < 1)).any().item(), True)),
    )

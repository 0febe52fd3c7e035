"""Rotary positions: each plane of a query and of a key is rotated by the token's position times the plane's frequency.

    x, y, Δ  (n_T, d_ρ)      positions  (n_T)      θ  (d_ρ/2)      R(t)  (d_ρ, d_ρ)

One head. The paper has learned positions instead; this layer is beyond it. Half-split: plane i holds features i and
i + d_ρ/2 (Hugging Face). Interleaved: 2i and 2i + 1 (the original Llama files and GGUF).
"""

import math

import torch
from torch import Tensor


def frequencies(d_rho: int, base: float) -> Tensor:
    """θ_i = base^(−2i/d_ρ), i = 0 … d_ρ/2 − 1"""
    return torch.tensor([base ** (-2 * i / d_rho) for i in range(d_rho // 2)], dtype=torch.float64)


def planes(d_rho: int, interleaved: bool) -> list[tuple[int, int]]:
    """The two features of each plane."""
    half = d_rho // 2
    return [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]


def plane_rotation(angle: float) -> Tensor:
    """[[cos, −sin], [sin, cos]]"""
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def rotation(t: float, theta: Tensor, interleaved: bool) -> Tensor:
    """R(t) ∈ (d_ρ, d_ρ): plane i is rotated by θ_i t"""
    d_rho = 2 * len(theta)
    r = torch.zeros(d_rho, d_rho, dtype=torch.float64)
    for frequency, (i, j) in zip(theta.tolist(), planes(d_rho, interleaved), strict=True):
        block = plane_rotation(frequency * t)
        r[i, i], r[i, j], r[j, i], r[j, j] = block[0, 0], block[0, 1], block[1, 0], block[1, 1]
    return r


def forward(x: Tensor, positions: Tensor, theta: Tensor, interleaved: bool, factor: float = 1.0) -> Tensor:
    """y_t = m R(t) x_t for each token; m = 1, but for yarn's attention factor"""
    return torch.stack(
        [factor * rotation(t, theta, interleaved) @ row for t, row in zip(positions.tolist(), x, strict=True)]
    )


def delta_prev(delta: Tensor, positions: Tensor, theta: Tensor, interleaved: bool, factor: float = 1.0) -> Tensor:
    """Δ_x = m R(t)ᵗ Δ_y for each token: the rotation by −θ_i t"""
    return torch.stack(
        [factor * rotation(t, theta, interleaved).t() @ row for t, row in zip(positions.tolist(), delta, strict=True)]
    )


def forward_partial(x: Tensor, positions: Tensor, theta: Tensor, interleaved: bool) -> Tensor:
    """y_t = diag(R(t), 1) x_t: only the first w = 2 len(θ) features of a head are rotated"""
    w = 2 * len(theta)
    return torch.cat([forward(x[:, :w], positions, theta, interleaved), x[:, w:]], 1)


def delta_prev_partial(delta: Tensor, positions: Tensor, theta: Tensor, interleaved: bool) -> Tensor:
    """Δ_x = diag(R(t)ᵗ, 1) Δ_y"""
    w = 2 * len(theta)
    return torch.cat([delta_prev(delta[:, :w], positions, theta, interleaved), delta[:, w:]], 1)


def permutation(d_rho: int) -> Tensor:
    """P ∈ (d_ρ, d_ρ) with x_half = P x_interleaved, hence R_half = P R_interleaved Pᵗ"""
    p = torch.zeros(d_rho, d_rho, dtype=torch.float64)
    for (i, j), (k, l) in zip(planes(d_rho, False), planes(d_rho, True), strict=True):
        p[i, k] = p[j, l] = 1
    return p


# ── longer contexts ─────────────────────────────────────────────────────────────────────────────────────────────────


def blend(theta: Tensor, factor: float, share: list[float]) -> Tensor:
    """θ'_i = (1 − s_i) θ_i/f + s_i θ_i: s = 1 keeps a frequency, s = 0 divides it by f"""
    return torch.tensor(
        [(1 - s) * t / factor + s * t for t, s in zip(theta.tolist(), share, strict=True)], dtype=torch.float64
    )


def linear(theta: Tensor, factor: float) -> Tensor:
    """θ' = θ/f, which is the rotation at position t/f"""
    return blend(theta, factor, [0.0] * len(theta))


def llama3_share(theta: Tensor, low: float, high: float, n_original: int) -> list[float]:
    """s_i rises linearly from 0 to 1 while the turns of plane i in the original context, n θ_i/2π, go from low to high"""
    turns = [n_original * t / (2 * math.pi) for t in theta.tolist()]
    return [0.0 if r < low else 1.0 if r > high else (r - low) / (high - low) for r in turns]


def yarn_share(
    d_rho: int, base: float, fast: float, slow: float, n_original: int, truncate: bool = True
) -> list[float]:
    """s_i falls linearly from 1 to 0 between the planes that make `fast` and `slow` turns in the original context"""
    # n base^(−2i/d_ρ)/2π = turns, solved for i
    first, last = (d_rho * math.log(n_original / (2 * math.pi * r)) / (2 * math.log(base)) for r in (fast, slow))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d_rho - 1)
    if first == last:
        last += 0.001
    return [1 - min(max((i - first) / (last - first), 0), 1) for i in range(d_rho // 2)]


def longrope(theta: Tensor, factors: list[float]) -> Tensor:
    """θ'_i = θ_i/f_i, with one list of factors for sequences of the original context and another one for longer ones"""
    return torch.tensor([t / f for t, f in zip(theta.tolist(), factors, strict=True)], dtype=torch.float64)


def longrope_attention_factor(factor: float, n_original: int) -> float:
    """m = √(1 + ln f/ln n) for f > 1"""
    return math.sqrt(1 + math.log(factor) / math.log(n_original)) if factor > 1 else 1.0


def dynamic_base(d_rho: int, base: float, factor: float, n_context: int, n: int) -> float:
    """The base of a sequence of n tokens: b (f n/N − f + 1)^(d_ρ/(d_ρ − 2)) beyond the context N, and b within it"""
    grown = factor * max(n, n_context) / n_context - factor + 1
    return base * math.pow(grown, d_rho / (d_rho - 2))


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """m = 0.1 ln f + 1 for f > 1; with both scales the quotient (0.1 m_1 ln f + 1)/(0.1 m_2 ln f + 1)"""
    if factor <= 1:
        return 1.0
    if mscale and mscale_all_dim:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1

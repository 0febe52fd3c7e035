"""Preferences and rewards: losses of the log-probabilities of completions. The paper has the mean loss alone.

    ℓ_t = log y_pred(t)[target]      (n,) of a completion of n tokens        s = Σ_t ℓ_t,  m = s/n  its sum and mean
    c_t = −∂L/∂ℓ_t                   (n,) the coefficient of a token         Δ_12 = c̃ ∘ (y_pred − y_gt)

Indices: w chosen, l rejected, ref the same number under a reference model, old the one under which the tokens were sampled.
The mean loss over N targets has c = 1/N in every row.
"""

import torch
from torch import Tensor

from .loss import y_gt
from .notation import tilde_columns

Pair = tuple[Tensor, Tensor]  # of w and l


def log_p(a_12: Tensor, targets: Tensor) -> Tensor:
    """ℓ = y_gt ⊖ log y_pred ∈ (n,)"""
    return (y_gt(targets, a_12.shape[1], a_12.dtype) * torch.log_softmax(a_12, 1)).sum(1)


def delta_logits(y_pred: Tensor, targets: Tensor, c: Tensor) -> Tensor:
    """Δ_12 = c̃ ∘ (y_pred − y_gt): −∂ℓ_t/∂a_12 is y_pred − y_gt, as for the mean loss"""
    n_vocab = y_pred.shape[1]
    return tilde_columns(c, n_vocab) * (y_pred - y_gt(targets, n_vocab, y_pred.dtype))


def sigma(x: Tensor) -> Tensor:
    """σ(x) = 1/(1 + e^(−x));   σ' = σ (1 − σ),   (log σ)' = 1 − σ = σ(−x)"""
    return 1 / (1 + torch.exp(-x))


# ── pairs: each returns the loss, and the coefficient of every token of w and of l ──────────────────────────────────


def dpo(s: Pair, ref: Pair, beta: float, smoothing: float = 0.0) -> Tensor:
    """x = β [(s_w − ref_w) − (s_l − ref_l)];   L = −(1 − ε) log σ(x) − ε log σ(−x)"""
    x = beta * ((s[0] - ref[0]) - (s[1] - ref[1]))
    return -(1 - smoothing) * torch.log(sigma(x)) - smoothing * torch.log(sigma(-x))


def dpo_c(s: Pair, ref: Pair, beta: float, smoothing: float = 0.0) -> Pair:
    """c_w = β [(1 − ε) σ(−x) − ε σ(x)] = −c_l"""
    x = beta * ((s[0] - ref[0]) - (s[1] - ref[1]))
    c = beta * ((1 - smoothing) * sigma(-x) - smoothing * sigma(x))
    return c, -c


def ipo(m: Pair, ref: Pair, beta: float) -> Tensor:
    """u = (m_w − m_l) − (ref m_w − ref m_l) − 1/(2β);   L = u²"""
    return ((m[0] - m[1]) - (ref[0] - ref[1]) - 1 / (2 * beta)) ** 2


def ipo_c(m: Pair, ref: Pair, beta: float, n: tuple[int, int]) -> Pair:
    """c_w = −2u/n_w,   c_l = 2u/n_l"""
    u = (m[0] - m[1]) - (ref[0] - ref[1]) - 1 / (2 * beta)
    return -2 * u / n[0], 2 * u / n[1]


def simpo(m: Pair, beta: float, gamma: float) -> Tensor:
    """v = β (m_w − m_l) − γ;   L = −log σ(v)"""
    return -torch.log(sigma(beta * (m[0] - m[1]) - gamma))


def simpo_c(m: Pair, beta: float, gamma: float, n: tuple[int, int]) -> Pair:
    """c_w = β σ(−v)/n_w,   c_l = −β σ(−v)/n_l"""
    slope = beta * sigma(gamma - beta * (m[0] - m[1]))
    return slope / n[0], -slope / n[1]


def odds(m: Tensor) -> Tensor:
    """p/(1 − p) of the mean probability p = e^m"""
    return torch.exp(m) / (1 - torch.exp(m))


def orpo(m: Pair, beta: float) -> Tensor:
    """L = −β log σ(log odds_w/odds_l): the part beside the loss of the chosen tokens"""
    return -beta * torch.log(sigma(torch.log(odds(m[0]) / odds(m[1]))))


def orpo_c(m: Pair, beta: float, n: tuple[int, int]) -> Pair:
    """c_w = β σ(−x)/[(1 − e^{m_w}) n_w], x = log odds_w/odds_l;   c_l with the other sign: d log odds/dm = 1/(1 − e^m)"""
    slope = beta * sigma(-torch.log(odds(m[0]) / odds(m[1])))
    return slope / ((1 - torch.exp(m[0])) * n[0]), -slope / ((1 - torch.exp(m[1])) * n[1])


# ── single completions ──────────────────────────────────────────────────────────────────────────────────────────────


def kto(s: Tensor, ref: Tensor, z: float, beta: float, weight: float, desirable: bool) -> Tensor:
    """L = λ (1 − q),   q = σ(β (s − ref − z)) of a desirable completion, σ(β (z − s + ref)) of another; z is a constant"""
    x = beta * (s - ref - z)
    return weight * (1 - sigma(x if desirable else -x))


def kto_c(s: Tensor, ref: Tensor, z: float, beta: float, weight: float, desirable: bool) -> Tensor:
    """c = λ β q (1 − q) of a desirable completion, −λ β q (1 − q) of another"""
    x = beta * (s - ref - z)
    q = sigma(x if desirable else -x)
    return (1 if desirable else -1) * weight * beta * q * (1 - q)


# ── tokens of sampled completions ───────────────────────────────────────────────────────────────────────────────────


def grpo(ell: Tensor, old: Tensor, advantage: float, clip: tuple[float, float]) -> Tensor:
    """L_t = −min(r A, clip(r, 1 − ε_low, 1 + ε_high) A),   r = e^(ℓ − old)"""
    r = torch.exp(ell - old)
    return -torch.minimum(r * advantage, torch.clamp(r, 1 - clip[0], 1 + clip[1]) * advantage)


def grpo_c(ell: Tensor, old: Tensor, advantage: float, clip: tuple[float, float]) -> Tensor:
    """c_t = r A, or 0 where r has left the interval in the direction that A wants"""
    r = torch.exp(ell - old)
    left = r > 1 + clip[1] if advantage > 0 else r < 1 - clip[0]
    return torch.where(left, torch.zeros_like(r), r * advantage)


def kl(ell: Tensor, ref: Tensor, beta: float) -> Tensor:
    """L_t = β (e^x − x − 1),   x = ref − ℓ: an estimate of KL(p ‖ ref) whose gradient is not that of KL"""
    x = ref - ell
    return beta * (torch.exp(x) - x - 1)


def kl_c(ell: Tensor, ref: Tensor, beta: float) -> Tensor:
    """c_t = β (e^x − 1)"""
    return beta * (torch.exp(ref - ell) - 1)


def corrected_kl(ell: Tensor, old: Tensor, ref: Tensor, beta: float) -> Tensor:
    """L_t = β r (e^x − x − 1): tokens were sampled by p_old, so r makes its gradient that of KL, too"""
    x = ref - ell
    return beta * torch.exp(ell - old) * (torch.exp(x) - x - 1)


def corrected_kl_c(ell: Tensor, old: Tensor, ref: Tensor, beta: float) -> Tensor:
    """c_t = β r x: from −β [r (e^x − x − 1) + r (1 − e^x)]"""
    return beta * torch.exp(ell - old) * (ref - ell)


# ── a prefix that completions share ─────────────────────────────────────────────────────────────────────────────────


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """a = softmax(mask(q kᵗ/√d_ρ)) v for the last rows of a sequence: q has m rows, k and v all n of them"""
    m, n = len(q), len(k)
    hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
    return torch.softmax((q @ k.t() / q.shape[1] ** 0.5).masked_fill(hidden, -torch.inf), 1) @ v


def branch_signals(q: Tensor, k: Tensor, v: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Δ_q, and Δ_k and Δ_v of all rows that a branch sees, [prefix | own]: the formulas of Section 3 with a rectangular ρ"""
    m, n = len(q), len(k)
    hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
    rho = torch.softmax((q @ k.t() / q.shape[1] ** 0.5).masked_fill(hidden, -torch.inf), 1)
    signal = delta @ v.t()
    raw = rho * (signal - (signal * rho).sum(1, keepdim=True)) / q.shape[1] ** 0.5
    return raw @ k, raw.t() @ q, rho.t() @ delta


def prefix_signals(p: int, signals: list[tuple[Tensor, Tensor, Tensor]]) -> Pair:
    """Δ_k and Δ_v of a prefix of p rows: the sums over the branches that see it"""
    delta_k = sum((k[:p] for _, k, _ in signals), torch.zeros(()))
    delta_v = sum((v[:p] for *_, v in signals), torch.zeros(()))
    return torch.as_tensor(delta_k), torch.as_tensor(delta_v)

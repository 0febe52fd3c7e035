"""Losses of preferences and rewards, as functions of log-probabilities: each gives its value and one coefficient per target,

    c_t = −∂L/∂log p_t,      with which Δ_12(t) = c_t (y_pred − y_gt).

    s = Σ_t log p_t of a completion of n tokens, m = s/n; ref: s under the reference model; w chosen, l rejected

Losses of pairs take s, n and ref of shape (2P), chosen and rejected in turn, and return P values and C = −∂L/∂s (2P): every
token of a completion has the coefficient C of its completion. The math is float64.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Values = tuple[Tensor, Tensor]  # losses, and coefficients


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of chosen completions, and of rejected ones."""
    return x[0::2], x[1::2]


def _in_turn(chosen: Tensor, rejected: Tensor) -> Tensor:
    return torch.stack([chosen, rejected], 1).flatten()


def _logistic(x: Tensor, smoothing: float) -> Values:
    """L = −(1 − ε) log σ(x) − ε log σ(−x), and −dL/dx = (1 − ε) σ(−x) − ε σ(x)"""
    losses = -(1 - smoothing) * logsigmoid(x) - smoothing * logsigmoid(-x)
    return losses, (1 - smoothing) * torch.sigmoid(-x) - smoothing * torch.sigmoid(x)


def dpo(s: Tensor, ref: Tensor, beta: float, smoothing: float = 0.0) -> Values:
    """x = β [(s_w − ref_w) − (s_l − ref_l)];  C_w = −C_l = β σ(−x) without label smoothing"""
    chosen, rejected = _pairs(s - ref)
    losses, slope = _logistic(beta * (chosen - rejected), smoothing)
    return losses, _in_turn(beta * slope, -beta * slope)


def ipo(s: Tensor, n: Tensor, ref: Tensor, beta: float) -> Values:
    """u = (m_w − m_l) − (ref m_w − ref m_l) − 1/(2β);  L = u²;  C_w = −2u/n_w, C_l = 2u/n_l"""
    chosen, rejected = _pairs((s - ref) / n)
    u = chosen - rejected - 1 / (2 * beta)
    return u.square(), _in_turn(-2 * u, 2 * u) / n


def simpo(s: Tensor, n: Tensor, beta: float, gamma: float, smoothing: float = 0.0) -> Values:
    """x = β (m_w − m_l) − γ;  C_w = β σ(−x)/n_w, C_l = −β σ(−x)/n_l"""
    chosen, rejected = _pairs(s / n)
    losses, slope = _logistic(beta * (chosen - rejected) - gamma, smoothing)
    return losses, _in_turn(beta * slope, -beta * slope) / n


def log_odds(m: Tensor) -> Tensor:
    """log p/(1 − p) of p = e^m:  m − log(1 − e^m), which is accurate for m near 0 as well"""
    return m - torch.where(m > -0.7, torch.log(-torch.expm1(m)), torch.log1p(-torch.exp(m)))


def orpo(s: Tensor, n: Tensor, beta: float) -> Values:
    """x = o(m_w) − o(m_l), o = log_odds;  L = −β log σ(x);  C_w = β σ(−x)/((1 − e^{m_w}) n_w), C_l with the other sign"""
    m = s / n
    chosen, rejected = _pairs(log_odds(m))
    losses, slope = _logistic(chosen - rejected, 0.0)
    slopes = _in_turn(beta * slope, -beta * slope)
    return beta * losses, slopes / (-torch.expm1(m) * n)


def kto(s: Tensor, ref: Tensor, desirable: Tensor, z: float, beta: float, weights: tuple[float, float]) -> Values:
    """q = σ(β (s − ref − z)) of a desirable completion, σ(β (z − s + ref)) of another;  L = λ (1 − q);  C = ± λ β q (1 − q)

    desirable (B) bool; weights are λ of desirable and of other completions; z is a constant. B values."""
    sign = torch.where(desirable, 1.0, -1.0).to(s)
    weight = torch.where(desirable, s.new_tensor(weights[0]), s.new_tensor(weights[1]))
    q = torch.sigmoid(beta * sign * (s - ref - z))
    return weight * (1 - q), sign * weight * beta * q * (1 - q)


def nll(s: Tensor, tokens: float) -> Values:
    """L = −s_w/tokens of every pair, C_w = 1/tokens: what keeps the chosen answer probable, in DPO and ORPO"""
    chosen, _ = _pairs(s)
    return -chosen / tokens, _in_turn(torch.full_like(chosen, 1 / tokens), torch.zeros_like(chosen))


def clipped(log_p: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> Values:
    """Of every token, with r = p/p_old and its advantage A:  L = −min(r A, clip(r, 1 − low, 1 + high) A)

    c = r A where the smaller is r A, else 0. r = 1 when the tokens were sampled by these weights: then c = A."""
    r = torch.exp(log_p - old)
    free, limited = r * advantage, r.clamp(1 - low, 1 + high) * advantage
    return -torch.minimum(free, limited), torch.where(free <= limited, free, torch.zeros_like(free))


def kl(log_p: Tensor, ref: Tensor, beta: float) -> Values:
    """Of every token:  L = β (e^x − x − 1), x = ref − log p;  c = β (e^x − 1)"""
    x = ref - log_p
    return beta * (torch.expm1(x) - x), beta * torch.expm1(x)


def corrected_kl(log_p: Tensor, old: Tensor, ref: Tensor, beta: float) -> Values:
    """Of every token sampled by p_old:  L = β r (e^x − x − 1), r = p/p_old, x = ref − log p, whose mean is the divergence

    c = −β r (e^x − x − 1) + β r (e^x − 1) = β r x, which has no exponential of x and does not overflow."""
    x, r = ref - log_p, torch.exp(log_p - old)
    return beta * (torch.exp(ref - old) - r * (x + 1)), beta * r * x

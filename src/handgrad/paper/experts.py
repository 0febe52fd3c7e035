"""Mixture of experts: every token goes through k of E gated feed-forward layers, and a router says which and how much.

    a_6  (n_T, d)      s, p  (n_T, E)   the router's scores and their softmax      g  (n_T, k)   gates of the chosen experts
    expert e:  y_e = [g(a_6 w_gate) ∘ a_6 w_up] w_down + b      a_9 = Σ_chosen g_e y_e      Δ_g, Δ_s like g and s

Everything is written for one token, with vectors instead of matrices: s (E), chosen (k) numbers of experts, g (k).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import gated


class Expert(NamedTuple):
    """One gated feed-forward layer."""

    w_gate: Tensor  # (d, f)
    w_up: Tensor  # (d, f)
    w_down: Tensor  # (f, d)
    b_down: Tensor  # (d)


# ── which experts, and how much of each ─────────────────────────────────────────────────────────────────────────────


def choose(s: Tensor, k: int) -> list[int]:
    """The experts with the k largest scores, the largest first"""
    return sorted(range(len(s)), key=lambda e: -s[e].item())[:k]


def choose_in_groups(s: Tensor, k: int, groups: int, kept: int) -> list[int]:
    """The k largest scores within the `kept` groups whose two largest scores have the largest sums"""
    size = len(s) // groups
    of_group = [[*range(j * size, (j + 1) * size)] for j in range(groups)]
    best = choose(torch.stack([s[choose_from(s, members, 2)].sum() for members in of_group]), kept)
    return choose_from(s, [e for j in sorted(best) for e in of_group[j]], k)


def choose_from(s: Tensor, members: list[int], k: int) -> list[int]:
    """The members with the k largest scores"""
    return [members[i] for i in choose(s[members], k)]


def softmax(s: Tensor) -> Tensor:
    """p_e = e^(s_e) / Σ_j e^(s_j)"""
    powers = torch.exp(s - s.max())
    return powers / powers.sum()


def gates_softmax(s: Tensor, chosen: list[int]) -> Tensor:
    """g_e = p_e: what the others have is lost"""
    return softmax(s)[chosen]


def gates_normalized(s: Tensor, chosen: list[int]) -> Tensor:
    """g_e = p_e / Σ_chosen p, which is the softmax of the chosen scores alone"""
    p = softmax(s)[chosen]
    return p / p.sum()


def gates_sigmoid(s: Tensor, chosen: list[int], tau: float, normalized: bool) -> Tensor:
    """g_e = τ σ(s_e), or τ σ(s_e) / Σ_chosen σ. What was added to σ in order to choose is not part of it."""
    sigma = _sigma(s)[chosen]
    return tau * sigma / sigma.sum() if normalized else tau * sigma


def delta_softmax(delta_g: Tensor, s: Tensor, chosen: list[int]) -> Tensor:
    """Δ_s = p ∘ (Δ_p − ⟨p, Δ_p⟩) for all experts; Δ_p is Δ_g on the chosen and 0 elsewhere"""
    p = softmax(s)
    delta_p = spread(delta_g, chosen, len(s))
    return p * (delta_p - (p * delta_p).sum())


def delta_normalized(delta_g: Tensor, s: Tensor, chosen: list[int]) -> Tensor:
    """Δ_s = g ∘ (Δ_g − ⟨g, Δ_g⟩) on the chosen, 0 elsewhere"""
    g = gates_normalized(s, chosen)
    return spread(g * (delta_g - (g * delta_g).sum()), chosen, len(s))


def delta_sigmoid(delta_g: Tensor, s: Tensor, chosen: list[int], tau: float, normalized: bool) -> Tensor:
    """Δ_s = τ/Σσ (Δ_g − ⟨ĝ, Δ_g⟩) ∘ σ(1 − σ) with ĝ = σ/Σσ, or τ Δ_g ∘ σ(1 − σ), on the chosen; 0 elsewhere"""
    sigma = _sigma(s)[chosen]
    if normalized:
        share = sigma / sigma.sum()
        delta_g = (delta_g - (share * delta_g).sum()) / sigma.sum()
    return spread(tau * delta_g * sigma * (1 - sigma), chosen, len(s))


def spread(x: Tensor, chosen: list[int], n_experts: int) -> Tensor:
    """x of the chosen experts, and 0 for the others. (E)"""
    return torch.stack([x[chosen.index(e)] if e in chosen else torch.zeros_like(x[0]) for e in range(n_experts)])


# ── what the experts compute ────────────────────────────────────────────────────────────────────────────────────────


def hidden(a: Tensor, expert: Expert, name: str) -> Tensor:
    """a_8 = g(a_6 w_gate) ∘ a_6 w_up of one token. (f)"""
    return gated.forward(a @ expert.w_gate, a @ expert.w_up, name)


def output(a: Tensor, expert: Expert, name: str) -> Tensor:
    """y_e = a_8 w_down + b of one token. (d)"""
    return hidden(a, expert, name) @ expert.w_down + expert.b_down


def mixture(a: Tensor, g: Tensor, chosen: list[int], experts: list[Expert], name: str) -> Tensor:
    """a_9 = Σ_chosen g_e y_e of one token. (d)"""
    return sum((g[i] * output(a, experts[e], name) for i, e in enumerate(chosen)), torch.zeros_like(a))


def delta_gate(delta: Tensor, a: Tensor, expert: Expert, name: str) -> Tensor:
    """Δ_g = ⟨Δ_9, y_e⟩ = ⟨Δ_9 w_downᵗ, a_8⟩ + ⟨Δ_9, b⟩: y_e is not needed"""
    return (delta @ expert.w_down.t() * hidden(a, expert, name)).sum() + (delta * expert.b_down).sum()


def delta_input(delta: Tensor, a: Tensor, g: Tensor, expert: Expert, name: str) -> Tensor:
    """What one expert adds to Δ_6: its backward pass from g_e Δ_9. (d)"""
    gate, up = a @ expert.w_gate, a @ expert.w_up
    delta_8 = g * delta @ expert.w_down.t()
    d_gate, d_up = gated.delta_gate(delta_8, gate, up, name), gated.delta_up(delta_8, gate, name)
    return d_gate @ expert.w_gate.t() + d_up @ expert.w_up.t()


def grad_down(delta: Tensor, a: Tensor, g: Tensor, expert: Expert, name: str) -> Tensor:
    """What one token adds to ∂w_down of an expert: a_8ᵗ g_e Δ_9. (f, d)"""
    return torch.outer(hidden(a, expert, name), g * delta)


def shared(a: Tensor, v: Tensor, expert: Expert, name: str) -> Tensor:
    """σ(a_6 v) y: the expert that every token goes through, where it has its own gate. (d)"""
    return _sigma(a @ v) * output(a, expert, name)


def delta_shared_gate(delta: Tensor, a: Tensor, v: Tensor, expert: Expert, name: str) -> Tensor:
    """Δ of a_6 v: ⟨Δ_9, y⟩ σ(1 − σ)"""
    sigma = _sigma(a @ v)
    return delta_gate(delta, a, expert, name) * sigma * (1 - sigma)


# ── losses of the router ────────────────────────────────────────────────────────────────────────────────────────────


def balance(s: Tensor, k: int) -> Tensor:
    """E Σ_e f_e P_e of all rows s (n, E): f_e tokens of expert e per row, P_e the mean of p_e"""
    p = torch.stack([softmax(row) for row in s])
    return s.shape[1] * (tokens_per_row(s, k) * p.mean(0)).sum()


def delta_balance(s: Tensor, k: int) -> Tensor:
    """Δ_s = (E/n) p ∘ (f − ⟨p, f⟩), row by row: f counts, and has no derivative. (n, E)"""
    f = tokens_per_row(s, k)
    p = torch.stack([softmax(row) for row in s])
    return s.shape[1] / len(s) * p * (f - (p * f).sum(1, keepdim=True))


def tokens_per_row(s: Tensor, k: int) -> Tensor:
    """f_e: how many rows have expert e among their k, divided by the number of rows. (E)"""
    picked = [e for row in s for e in choose(row, k)]
    return torch.tensor([picked.count(e) for e in range(s.shape[1])], dtype=s.dtype) / len(s)


def z_loss(s: Tensor) -> Tensor:
    """The mean of lse², lse = log Σ_e e^(s_e)"""
    return torch.logsumexp(s, 1).square().mean()


def delta_z_loss(s: Tensor) -> Tensor:
    """Δ_s = (2/n) lse p, row by row. (n, E)"""
    p = torch.stack([softmax(row) for row in s])
    return 2 / len(s) * torch.logsumexp(s, 1)[:, None] * p


def _sigma(x: Tensor) -> Tensor:
    return torch.sigmoid(x)

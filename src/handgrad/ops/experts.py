"""Mixture of experts: which experts a token goes to, how much of each, and what the router's scores get back.

    s  (n, E) scores      chosen  (n, k) numbers of experts      g, Δ_g  (n, k) gates, in the same order

Experts are chosen by torch.topk of the same numbers as in transformers, so that ties fall the same way. bfloat16 is computed
in float32.
"""

import torch
from torch import Tensor

from .routing import Routing

TINY = 1e-20  # added to the sum of sigmoids, as DeepSeek does


def route(s: Tensor, r: Routing, selection: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """s → g and chosen"""
    chosen = choose(s, r, selection)
    return gates(s, chosen, r), chosen


def choose(s: Tensor, r: Routing, selection: Tensor | None = None) -> Tensor:
    """s → the experts with the largest scores, of the groups with the largest if there are several. `selection` (E) is added
    to the sigmoids in order to choose, and to nothing else."""
    s = _wide(s)
    if r.kind != "sigmoid":
        return torch.topk(s if r.kind == "softmax of chosen" else torch.softmax(s, 1), r.k)[1]
    ranked = torch.sigmoid(s) if selection is None else torch.sigmoid(s) + selection
    if r.kept < r.groups:
        members = ranked.view(len(s), r.groups, -1)
        best = torch.topk(members.topk(2, 2)[0].sum(2), r.kept, sorted=False)[1]
        hidden = torch.ones(members.shape[:2], dtype=torch.bool, device=s.device).scatter_(1, best, False)
        ranked = members.masked_fill(hidden[:, :, None], -torch.inf).flatten(1)
    return torch.topk(ranked, r.k, sorted=False)[1]


def gates(s: Tensor, chosen: Tensor, r: Routing) -> Tensor:
    """s → g of the chosen experts

    softmax            g = p of the chosen, divided by their sum if `normalized`
    softmax of chosen  g = softmax of the chosen scores
    sigmoid            g = τ σ of the chosen, divided by their sum if `normalized`
    """
    s = _wide(s)
    if r.kind == "softmax of chosen":
        return torch.softmax(s.gather(1, chosen), 1)
    if r.kind == "softmax":
        g = torch.softmax(s, 1).gather(1, chosen)
        return g / g.sum(1, keepdim=True) if r.normalized else g
    g = torch.sigmoid(s).gather(1, chosen)
    return (g / (g.sum(1, keepdim=True) + TINY) if r.normalized else g) * r.scale


def backward(delta_g: Tensor, s: Tensor, chosen: Tensor, r: Routing) -> Tensor:
    """Δ_g → Δ_s (n, E)

    normalized softmax  g ∘ (Δ_g − ⟨g, Δ_g⟩) on the chosen, 0 elsewhere
    other softmax       p ∘ (Δ_p − ⟨p, Δ_p⟩), where Δ_p is Δ_g on the chosen and 0 elsewhere
    sigmoid             τ/Σσ (Δ_g − ⟨ĝ, Δ_g⟩) ∘ σ(1 − σ) with ĝ = σ/Σσ, or τ Δ_g ∘ σ(1 − σ), on the chosen
    """
    wide, delta_g = _wide(s), _wide(delta_g)
    if r.kind == "softmax" and not r.normalized:
        p = torch.softmax(wide, 1)
        delta_p = torch.zeros_like(p).scatter_(1, chosen, delta_g)
        return (p * (delta_p - (p * delta_p).sum(1, keepdim=True))).to(s.dtype)
    if r.kind == "sigmoid":
        sigma = torch.sigmoid(wide).gather(1, chosen)
        if r.normalized:
            total = sigma.sum(1, keepdim=True) + TINY
            delta_g = (delta_g - (sigma / total * delta_g).sum(1, keepdim=True)) / total
        of_chosen = r.scale * delta_g * sigma * (1 - sigma)
    else:
        g = torch.softmax(wide.gather(1, chosen), 1)
        of_chosen = g * (delta_g - (g * delta_g).sum(1, keepdim=True))
    return torch.zeros_like(wide).scatter_(1, chosen, of_chosen).to(s.dtype)


def by_expert(chosen: Tensor, n_experts: int) -> list[Tensor]:
    """The entries of `chosen` that are each expert, by their number t·k + i: rows sorted by expert, and by token in each."""
    flat = chosen.flatten()
    if flat.is_meta:  # where tensors are only counted: as if all tokens had chosen the same
        n, k = chosen.shape
        counts = [n] * k + [0] * (n_experts - k)
    else:
        counts = torch.bincount(flat, minlength=n_experts).tolist()
    return list(torch.split(torch.argsort(flat, stable=True), counts))


def tokens_of_experts(chosen: Tensor, n_experts: int, dtype: torch.dtype) -> Tensor:
    """How many tokens chose each expert. (E)"""
    return torch.bincount(chosen.flatten(), minlength=n_experts).to(dtype)


def balance(tokens: Tensor, p: Tensor, n: int) -> Tensor:
    """E Σ_e f_e P_e, from the tokens of each expert and the sum of its p over the n rows: f = tokens/n, P = p/n"""
    return len(tokens) * (tokens * p).sum() / n**2


def delta_balance(s: Tensor, tokens: Tensor, n: int) -> Tensor:
    """Δ_s = (E/n) p ∘ (f − ⟨p, f⟩) with f = tokens/n: counts have no derivative"""
    p = torch.softmax(_wide(s), 1)
    f = (tokens / n).to(p.dtype)
    return (s.shape[1] / n * p * (f - (p * f).sum(1, keepdim=True))).to(s.dtype)


def delta_z_loss(s: Tensor, n: int) -> Tensor:
    """Δ_s = (2/n) lse p of the mean of lse² over n rows, lse = log Σ_e e^(s_e)"""
    wide = _wide(s)
    return (2 / n * torch.logsumexp(wide, 1, keepdim=True) * torch.softmax(wide, 1)).to(s.dtype)


def router_sums(s: Tensor, chosen: Tensor) -> Tensor:
    """What the losses of a router need of its rows: tokens and Σ p of every expert, Σ lse², and their number. (2E + 2)"""
    wide = _wide(s).double()
    tokens, p = tokens_of_experts(chosen, s.shape[1], wide.dtype), torch.softmax(wide, 1).sum(0)
    return torch.cat([tokens, p, torch.logsumexp(wide, 1).square().sum()[None], tokens.new_tensor([len(s)])])


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x

"""Beyond the paper: mixtures of experts, L-moe-*."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import experts, gated, linear
from ..paper.experts import Expert
from ..proof.oracles import relative_error
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, gradient_error, mismatch

NAME, TAU = "silu", 2.5


class _Inputs(NamedTuple):
    a: Tensor  # (n_T, d)
    w_router: Tensor  # (d, E)
    experts: list[Expert]
    k: int
    delta: Tensor  # (n_T, d)


def _inputs(rng: RandomInputs) -> _Inputs:
    """More experts than a token goes to, and tokens that go to different ones"""
    n, d, f, e = rng.size(3, 6), rng.size(2, 6), rng.size(2, 7), rng.size(3, 6)
    own = [Expert(rng.matrix(d, f), rng.matrix(d, f), rng.matrix(f, d), rng.matrix(d)) for _ in range(e)]
    return _Inputs(rng.matrix(n, d), rng.matrix(d, e), own, rng.size(2, e - 1), rng.matrix(n, d))


def _scores(rng: RandomInputs) -> tuple[Tensor, list[int], Tensor]:
    """The scores of a token (E), its experts, and an upstream Δ_g (k)"""
    e = rng.size(3, 9)
    s, k = 2 * rng.matrix(e), rng.size(2, e - 1)
    return s, experts.choose(s, k), rng.matrix(k)


def _by_torch(a: Tensor, e: Expert) -> Tensor:
    """y_e of every token"""
    return F.linear(F.silu(F.linear(a, e.w_gate.t())) * F.linear(a, e.w_up.t()), e.w_down.t(), e.b_down)


def _mixed(a: Tensor, w_router: Tensor, x: _Inputs) -> Tensor:
    """a_9 of every token, as a sum over all experts with a mask"""
    s = F.linear(a, w_router.t())
    hidden = torch.ones_like(s, dtype=torch.bool).scatter(1, torch.topk(s, x.k)[1], False)
    g = F.softmax(s.masked_fill(hidden, -torch.inf), 1)
    return torch.einsum("ne,end->nd", g, torch.stack([_by_torch(a, e) for e in x.experts]))


def _routed(x: _Inputs) -> list[tuple[Tensor, Tensor, Tensor, list[int], Tensor]]:
    """Of every token: a_6, Δ_9, s, its experts and their gates"""
    s = linear.forward(x.a, x.w_router, None)
    chosen = [experts.choose(row, x.k) for row in s]
    gates = [experts.gates_normalized(row, own) for row, own in zip(s, chosen, strict=True)]
    return list(zip(x.a, x.delta, s, chosen, gates, strict=True))


def _delta_scores(x: _Inputs) -> Tensor:
    """Δ_s of every token. (n_T, E)"""
    rows = []
    for a, delta, s, chosen, _ in _routed(x):
        delta_g = torch.stack([experts.delta_gate(delta, a, x.experts[e], NAME) for e in chosen])
        rows.append(experts.delta_normalized(delta_g, s, chosen))
    return torch.stack(rows)


@check("L-moe-fwd", BEYOND, "", IDENTITY)
def mixture(rng: RandomInputs) -> float:
    """a_9 = Σ_chosen g_e y_e ∈ (n_T, d), g the softmax of the k largest scores: all experts, with the others masked"""
    x = _inputs(rng)
    ours = [experts.mixture(a, g, chosen, x.experts, NAME) for a, _, _, chosen, g in _routed(x)]
    return relative_error(torch.stack(ours), _mixed(x.a, x.w_router, x))


@check("L-moe-bwd", BEYOND, "", AUTOGRAD)
def mixture_backward(rng: RandomInputs) -> float:
    """Δ_6 = Σ_chosen (expert e's from g_e Δ_9) + Δ_s w_routerᵗ ∈ (n_T, d)"""
    x = _inputs(rng)
    rows = []
    for a, delta, _, chosen, g in _routed(x):
        rows.append(sum(experts.delta_input(delta, a, g[i], x.experts[e], NAME) for i, e in enumerate(chosen)))
    ours = torch.stack(rows) + linear.delta_prev(_delta_scores(x), x.w_router)  # type: ignore[arg-type]
    return gradient_error(ours, lambda a: _mixed(a, x.w_router, x), x.a, x.delta, rng)


@check("L-moe-router", BEYOND, "", AUTOGRAD)
def gradient_of_the_router(rng: RandomInputs) -> float:
    """∂w_router = a_6ᵗ Δ_s ∈ (d, E) with Δ_g = ⟨Δ_9 w_downᵗ, a_8⟩ + ⟨Δ_9, b⟩"""
    x = _inputs(rng)
    return gradient_error(linear.grad_w(_delta_scores(x), x.a), lambda w: _mixed(x.a, w, x), x.w_router, x.delta, rng)


@check("L-moe-expert", BEYOND, "", AUTOGRAD)
def gradient_of_an_expert(rng: RandomInputs) -> float:
    """∂w_down of expert e = Σ over its tokens of a_8ᵗ g_e Δ_9 ∈ (f, d); one without a token has gradient 0"""
    x, errors = _inputs(rng), []
    for e, expert in enumerate(x.experts):
        ours = torch.zeros_like(expert.w_down)
        for a, delta, _, chosen, g in _routed(x):
            if e in chosen:
                ours += experts.grad_down(delta, a, g[chosen.index(e)], expert, NAME)

        def network(w: Tensor, e: int = e, expert: Expert = expert) -> Tensor:
            changed = [*x.experts[:e], expert._replace(w_down=w), *x.experts[e + 1 :]]
            return _mixed(x.a, x.w_router, x._replace(experts=changed))

        errors.append(gradient_error(ours, network, expert.w_down, x.delta, rng))
    return max(errors)


# ── gates ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@check("L-moe-softmax", BEYOND, "", AUTOGRAD)
def softmax_gates(rng: RandomInputs) -> float:
    """g = p of the chosen ∈ (k), not normalized: Δ_s = p∘(Δ_p − ⟨p, Δ_p⟩) ∈ (E), not 0 for the others either"""
    s, chosen, delta = _scores(rng)
    value = relative_error(experts.gates_softmax(s, chosen), F.softmax(s, 0)[chosen])
    ours = experts.delta_softmax(delta, s, chosen)
    return max(value, gradient_error(ours, lambda s: F.softmax(s, 0)[chosen], s, delta, rng))


@check("L-moe-normalized", BEYOND, "", AUTOGRAD)
def normalized_gates(rng: RandomInputs) -> float:
    """g = p/Σ_chosen p, the softmax of the chosen scores alone ∈ (k): Δ_s = g∘(Δ_g − ⟨g, Δ_g⟩) there, 0 elsewhere"""
    s, chosen, delta = _scores(rng)
    value = relative_error(experts.gates_normalized(s, chosen), F.softmax(s[chosen], 0))
    ours = experts.delta_normalized(delta, s, chosen)
    return max(value, gradient_error(ours, lambda s: F.normalize(F.softmax(s, 0)[chosen], 1, 0), s, delta, rng))


@check("L-moe-sigmoid", BEYOND, "", AUTOGRAD)
def sigmoid_gates(rng: RandomInputs) -> float:
    """g = τσ/Σσ or τσ of the chosen ∈ (k): Δ_s = τ/Σσ (Δ_g − ⟨ĝ, Δ_g⟩)∘σ(1 − σ) with ĝ = σ/Σσ, or τΔ_g∘σ(1 − σ)"""
    s, chosen, delta = _scores(rng)
    forms: dict[bool, Callable[[Tensor], Tensor]] = {
        True: lambda s: TAU * F.normalize(F.sigmoid(s)[chosen], 1, 0),
        False: lambda s: TAU * F.sigmoid(s)[chosen],
    }
    errors = []
    for normalized, network in forms.items():
        errors.append(relative_error(experts.gates_sigmoid(s, chosen, TAU, normalized), network(s)))
        ours = experts.delta_sigmoid(delta, s, chosen, TAU, normalized)
        errors.append(gradient_error(ours, network, s, delta, rng))
    return max(errors)


@check("L-moe-groups", BEYOND, "", IDENTITY)
def experts_in_groups(rng: RandomInputs) -> float:
    """Choosing within groups: the k largest of the groups whose two largest scores have the largest sums"""
    pairs = []
    for _ in range(8):  # the groups matter in some samples only
        groups, size = rng.size(2, 4), rng.size(2, 4)
        kept, s = rng.size(1, groups - 1), rng.matrix(groups * size)
        best = s.view(groups, size).topk(2)[0].sum(1).topk(kept)[1]
        masked = torch.full_like(s, -torch.inf).view(groups, size)
        masked[best] = s.view(groups, size)[best]
        k = rng.size(1, kept * size)
        pairs.append((experts.choose_in_groups(s, k, groups, kept), masked.flatten().topk(k)[1].tolist()))
    return mismatch(*pairs)


@check("L-moe-shared", BEYOND, "", AUTOGRAD)
def shared_expert(rng: RandomInputs) -> float:
    """σ(a_6 v) y ∈ (d), v (d): Δ of a_6 v = ⟨Δ_9, y⟩ σ(1 − σ), one number per token"""
    x = _inputs(rng)
    a, e, v, delta = x.a[0], x.experts[0], rng.matrix(x.a.shape[1]), x.delta[0]

    def network(v: Tensor) -> Tensor:
        return F.sigmoid(a @ v) * _by_torch(a, e)

    ours = experts.delta_shared_gate(delta, a, v, e, NAME) * a
    return max(relative_error(experts.shared(a, v, e, NAME), network(v)), gradient_error(ours, network, v, delta, rng))


@check("L-moe-clamp", BEYOND, "", AUTOGRAD)
def clamped_gate(rng: RandomInputs) -> float:
    """a_8 = (U + 1)∘Gσ(1.702 G) with G = min(gate, 7), U = up within ±7: Δ_gate and Δ_up are 0 beyond the limits"""
    n, f = rng.size(3, 8), rng.size(2, 8)
    gate, up, delta = 3 * rng.matrix(n, f), 3 * rng.matrix(n, f), rng.matrix(n, f)
    gate[0, 0], gate[0, 1], up[1, 0], up[1, 1] = 9.0, -9.0, 9.0, -9.0  # both sides of both limits in every sample
    gate[1, :2], up[0, :2] = 1.0, 1.0

    def network(gate: Tensor, up: Tensor) -> Tensor:
        capped = gate.clamp(max=7.0)
        return (up.clamp(-7.0, 7.0) + 1) * capped * F.sigmoid(1.702 * capped)

    d_gate, d_up = gated.delta_clamped(delta, gate, up)
    return max(
        relative_error(gated.clamped(gate, up), network(gate, up)),
        gradient_error(d_gate, lambda x: network(x, up), gate, delta, rng),
        gradient_error(d_up, lambda x: network(gate, x), up, delta, rng),
    )


# ── losses of the router ────────────────────────────────────────────────────────────────────────────────────────────


@check("L-moe-balance", BEYOND, "", AUTOGRAD)
def balance_loss(rng: RandomInputs) -> float:
    """E Σ_e f_e P_e: Δ_s = (E/n) p∘(f − ⟨p, f⟩) ∈ (n, E); f counts the tokens of each expert and has no derivative"""
    n, e = rng.size(3, 7), rng.size(3, 6)
    s, k = 2 * rng.matrix(n, e), rng.size(1, e - 1)
    counts = torch.zeros(n, e, dtype=s.dtype).scatter(1, s.topk(k)[1], 1.0).mean(0)

    def network(s: Tensor) -> Tensor:
        return e * (counts * F.softmax(s, 1).mean(0)).sum()

    one = torch.ones((), dtype=s.dtype)
    value = relative_error(experts.balance(s, k), network(s))
    return max(value, gradient_error(experts.delta_balance(s, k), network, s, one, rng))


@check("L-moe-z", BEYOND, "", AUTOGRAD)
def z_loss(rng: RandomInputs) -> float:
    """mean(lse²), lse = log Σ_e e^(s_e): Δ_s = (2/n) lse p ∈ (n, E)"""
    s = 2 * rng.matrix(rng.size(3, 7), rng.size(2, 6)) + 1

    def network(s: Tensor) -> Tensor:
        return F.softmax(s, 1).mul(s.exp()).sum(1).div(F.softmax(s, 1).square().sum(1)).log().square().mean()

    one = torch.ones((), dtype=s.dtype)
    value = relative_error(experts.z_loss(s), network(s))
    return max(value, gradient_error(experts.delta_z_loss(s), network, s, one, rng))

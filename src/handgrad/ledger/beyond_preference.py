"""Beyond the paper: preferences and rewards, L-dpo-*, L-ipo-*, L-simpo-*, L-orpo-*, L-kto-*, L-grpo-*, L-kl-*; prefixes that
sequences share, L-prefix-*. Losses are compared with other writings of them, coefficients with autograd through logits."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import preference
from ..proof.oracles import differentiate, relative_error
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, shortfall

BETA, GAMMA, CLIP = 0.3, 0.4, (0.2, 0.3)


class _Completion(NamedTuple):
    a_12: Tensor  # (n, V)
    targets: Tensor  # (n)
    ref: Tensor  # (n)   log-probabilities
    old: Tensor  # (n)

    @property
    def ell(self) -> Tensor:
        return -F.cross_entropy(self.a_12, self.targets, reduction="none")

    def delta_error(self, c: Tensor, loss: Callable[[Tensor], Tensor]) -> float:
        """Δ_12 from the coefficients against that of loss(log-probabilities) by autograd"""
        ours = preference.delta_logits(torch.softmax(self.a_12, 1), self.targets, c.expand(len(self.targets)))
        return relative_error(ours, differentiate(lambda x: loss(preference.log_p(x, self.targets)), self.a_12)[0])


def _completion(rng: RandomInputs, n: int) -> _Completion:
    n_vocab = rng.size(3, 7)
    a_12, targets = rng.matrix(n, n_vocab), rng.ids(n, n_vocab)
    ell = -F.cross_entropy(a_12, targets, reduction="none")
    return _Completion(a_12, targets, ell + 0.5 * rng.matrix(n), ell + 0.3 * rng.matrix(n))


def _pair(rng: RandomInputs) -> tuple[_Completion, _Completion]:
    """Completions of different lengths."""
    n = rng.size(2, 5)
    return _completion(rng, n), _completion(rng, n + rng.size(1, 4))


def _pair_error(
    x: tuple[_Completion, _Completion], c: preference.Pair, loss: Callable[[Tensor, Tensor], Tensor]
) -> float:
    """Of Δ_12 of both completions."""
    chosen, rejected = x
    return max(
        chosen.delta_error(c[0], lambda ell: loss(ell, rejected.ell)),
        rejected.delta_error(c[1], lambda ell: loss(chosen.ell, ell)),
    )


def _sums(x: tuple[_Completion, _Completion]) -> tuple[preference.Pair, preference.Pair]:
    return (x[0].ell.sum(), x[1].ell.sum()), (x[0].ref.sum(), x[1].ref.sum())


def _means(x: tuple[_Completion, _Completion]) -> tuple[preference.Pair, preference.Pair, tuple[int, int]]:
    n = len(x[0].targets), len(x[1].targets)
    return (x[0].ell.mean(), x[1].ell.mean()), (x[0].ref.mean(), x[1].ref.mean()), n


@check("L-dpo-fwd", BEYOND, "", IDENTITY)
def dpo_of_a_pair(rng: RandomInputs) -> float:
    """L = −log σ(β h), h = (s_w − ref_w) − (s_l − ref_l): a classifier with the logits β(s − ref) of w and l"""
    x = _pair(rng)
    s, ref = _sums(x)
    logits = BETA * torch.stack([s[0] - ref[0], s[1] - ref[1]])
    smooth = F.cross_entropy(logits[None], torch.tensor([0]), label_smoothing=0.2)  # ε = 0.1 for each of two
    return max(
        relative_error(preference.dpo(s, ref, BETA), -torch.log_softmax(logits, 0)[0]),
        relative_error(preference.dpo(s, ref, BETA, 0.1), smooth),
    )


@check("L-dpo-bwd", BEYOND, "", AUTOGRAD)
def dpo_coefficients(rng: RandomInputs) -> float:
    """Δ_12 = c̃ ∘ (y_pred − y_gt), c_w = β [(1 − ε) σ(−βh) − ε σ(βh)] = −c_l in every token of the completion"""
    x = _pair(rng)
    s, ref = _sums(x)

    def error(smoothing: float) -> float:
        c = preference.dpo_c(s, ref, BETA, smoothing)
        return _pair_error(x, c, lambda w, l: preference.dpo((w.sum(), l.sum()), ref, BETA, smoothing))

    return max(error(0.0), error(0.1))


@check("L-ipo-fwd", BEYOND, "", IDENTITY)
def ipo_of_a_pair(rng: RandomInputs) -> float:
    """L = ((m_w − ref m_w) − (m_l − ref m_l) − 1/(2β))²"""
    x = _pair(rng)
    m, ref, _ = _means(x)
    h = (x[0].ell - x[0].ref).mean() - (x[1].ell - x[1].ref).mean()
    return relative_error(preference.ipo(m, ref, BETA), F.mse_loss(h, torch.full_like(h, 0.5 / BETA)))


@check("L-ipo-bwd", BEYOND, "", AUTOGRAD)
def ipo_coefficients(rng: RandomInputs) -> float:
    """c_w = −2u/n_w, c_l = 2u/n_l, u = (m_w − m_l) − (ref m_w − ref m_l) − 1/(2β)"""
    x = _pair(rng)
    m, ref, n = _means(x)
    c = preference.ipo_c(m, ref, BETA, n)
    return _pair_error(x, c, lambda w, l: preference.ipo((w.mean(), l.mean()), ref, BETA))


@check("L-simpo-fwd", BEYOND, "", IDENTITY)
def simpo_of_a_pair(rng: RandomInputs) -> float:
    """L = softplus(γ − β (m_w − m_l)), and with γ = 0 that of DPO whose reference is uniform, for equal lengths"""
    x = _pair(rng)
    m, _, _ = _means(x)
    none = (torch.zeros(()), torch.zeros(()))
    return max(
        relative_error(preference.simpo(m, BETA, GAMMA), F.softplus(GAMMA - BETA * (m[0] - m[1]))),
        relative_error(preference.simpo(m, BETA, 0.0), preference.dpo(m, none, BETA)),
    )


@check("L-simpo-bwd", BEYOND, "", AUTOGRAD)
def simpo_coefficients(rng: RandomInputs) -> float:
    """c_w = β σ(−v)/n_w, c_l = −β σ(−v)/n_l, v = β (m_w − m_l) − γ"""
    x = _pair(rng)
    m, _, n = _means(x)
    c = preference.simpo_c(m, BETA, GAMMA, n)
    return _pair_error(x, c, lambda w, l: preference.simpo((w.mean(), l.mean()), BETA, GAMMA))


@check("L-orpo-fwd", BEYOND, "", IDENTITY)
def orpo_of_a_pair(rng: RandomInputs) -> float:
    """L = −β log σ(x), x = (m_w − m_l) − log((1 − e^{m_w})/(1 − e^{m_l})): the logarithm of the ratio of odds"""
    m, _, _ = _means(_pair(rng))
    x = m[0] - m[1] - torch.log(torch.expm1(m[0]) / torch.expm1(m[1]))
    return relative_error(preference.orpo(m, BETA), BETA * F.softplus(-x))


@check("L-orpo-bwd", BEYOND, "", AUTOGRAD)
def orpo_coefficients(rng: RandomInputs) -> float:
    """c_w = β σ(−x)/[(1 − e^{m_w}) n_w], c_l = −β σ(−x)/[(1 − e^{m_l}) n_l]"""
    x = _pair(rng)
    m, _, n = _means(x)
    return _pair_error(x, preference.orpo_c(m, BETA, n), lambda w, l: preference.orpo((w.mean(), l.mean()), BETA))


Z, WEIGHTS = 0.2, {True: 1.0, False: 1.3}


@check("L-kto-fwd", BEYOND, "", IDENTITY)
def kto_of_a_completion(rng: RandomInputs) -> float:
    """L = λ σ(−β (s − ref − z)) of a desirable completion, λ σ(β (s − ref − z)) of another"""
    x = _completion(rng, rng.size(2, 6))
    s, ref = x.ell.sum(), x.ref.sum()
    found = [preference.kto(s, ref, Z, BETA, weight, kind) for kind, weight in WEIGHTS.items()]
    h = BETA * (s - ref - Z)
    return relative_error(torch.stack(found), torch.stack([torch.sigmoid(-h), 1.3 * torch.sigmoid(h)]))


@check("L-kto-bwd", BEYOND, "", AUTOGRAD)
def kto_coefficients(rng: RandomInputs) -> float:
    """c = ± λ β q (1 − q), q = σ(± β (s − ref − z)), z a constant"""
    x = _completion(rng, rng.size(2, 6))
    s, ref = x.ell.sum(), x.ref.sum()

    def error(desirable: bool, weight: float) -> float:
        c = preference.kto_c(s, ref, Z, BETA, weight, desirable)
        return x.delta_error(c, lambda ell: preference.kto(ell.sum(), ref, Z, BETA, weight, desirable))

    return max(error(*kind) for kind in WEIGHTS.items())


ADVANTAGES = (1.4, -0.8)


@check("L-grpo-fwd", BEYOND, "", IDENTITY)
def clipped_ratio(rng: RandomInputs) -> float:
    """L_t = −min(r A, clip(r) A) is −A min(r, 1 + ε_high) for A > 0, and −A max(r, 1 − ε_low) for A < 0"""
    x = _completion(rng, 24)
    r = torch.exp(x.ell - x.old)
    found = [preference.grpo(x.ell, x.old, a, CLIP) for a in ADVANTAGES]
    bounds = [r.clamp(max=1 + CLIP[1]), r.clamp(min=1 - CLIP[0])]
    outside = sum(int((bound != r).sum()) for bound in bounds)
    errors = [relative_error(l, -a * bound) for l, a, bound in zip(found, ADVANTAGES, bounds, strict=True)]
    return max(*errors, shortfall(outside, 1))


@check("L-grpo-bwd", BEYOND, "", AUTOGRAD)
def clipped_ratio_coefficients(rng: RandomInputs) -> float:
    """c_t = r A inside the interval and where A draws r back into it, else 0; r = 1, c = A where p is p_old"""
    x = _completion(rng, 24)

    def error(a: float) -> float:
        c = preference.grpo_c(x.ell, x.old, a, CLIP)
        return x.delta_error(c, lambda ell: preference.grpo(ell, x.old, a, CLIP).sum())

    fresh = preference.grpo_c(x.ell, x.ell, ADVANTAGES[0], CLIP)
    return max(*map(error, ADVANTAGES), relative_error(fresh, torch.full_like(fresh, ADVANTAGES[0])))


def _expected(n_vocab: int, rng: RandomInputs) -> tuple[Tensor, Tensor]:
    """Logits, and log-probabilities of a reference, of one token."""
    return rng.matrix(1, n_vocab), torch.log_softmax(rng.matrix(n_vocab), 0)


@check("L-kl-fwd", BEYOND, "", IDENTITY)
def estimates_of_the_divergence(rng: RandomInputs) -> float:
    """The mean of e^x − x − 1, x = ref − log p, over tokens of p is KL(p ‖ ref); so is that of r (e^x − x − 1) over p_old"""
    a_12, ref = _expected(rng.size(3, 8), rng)
    ell, old = torch.log_softmax(a_12, 1)[0], torch.log_softmax(rng.matrix(len(ref)), 0)
    divergence = F.kl_div(ref, ell, reduction="sum", log_target=True)
    own, other = (
        torch.exp(ell) @ preference.kl(ell, ref, 1.0),
        torch.exp(old) @ preference.corrected_kl(ell, old, ref, 1.0),
    )
    return max(relative_error(own, divergence), relative_error(other, divergence))


@check("L-kl-bwd", BEYOND, "", AUTOGRAD)
def coefficients_of_the_divergence(rng: RandomInputs) -> float:
    """c = β (e^x − 1), and corrected β r x, whose mean error signal over tokens of p_old is that of KL(p ‖ ref)"""
    x = _completion(rng, rng.size(3, 8))
    errors = [
        x.delta_error(preference.kl_c(x.ell, x.ref, BETA), lambda ell: preference.kl(ell, x.ref, BETA).sum()),
        x.delta_error(
            preference.corrected_kl_c(x.ell, x.old, x.ref, BETA),
            lambda ell: preference.corrected_kl(ell, x.old, x.ref, BETA).sum(),
        ),
    ]
    a_12, ref = _expected(rng.size(3, 8), rng)
    ell, old = torch.log_softmax(a_12, 1)[0], torch.log_softmax(rng.matrix(len(ref)), 0)
    every = torch.arange(len(ref))
    c = torch.exp(old) * preference.corrected_kl_c(ell, old, ref, 1.0)
    mean = preference.delta_logits(torch.softmax(a_12, 1).expand(len(ref), -1), every, c).sum(0)
    exact = differentiate(lambda x: F.kl_div(ref, torch.log_softmax(x, 1)[0], reduction="sum", log_target=True), a_12)[
        0
    ]
    return max(*errors, relative_error(mean, exact[0]))


class _Shared(NamedTuple):
    prefix: int
    q: list[Tensor]  # of the prefix, then of each branch
    k: list[Tensor]
    v: list[Tensor]
    deltas: list[Tensor]  # of each branch


def _shared(rng: RandomInputs) -> _Shared:
    lengths, d_rho, d_h = [rng.size(2, 5) for _ in range(4)], rng.size(2, 5), rng.size(2, 5)
    q, k, v = ([rng.matrix(n, w) for n in lengths] for w in (d_rho, d_rho, d_h))
    return _Shared(lengths[0], q, k, v, [rng.matrix(n, d_h) for n in lengths[1:]])


@check("L-prefix-fwd", BEYOND, "", IDENTITY)
def attention_after_a_shared_prefix(rng: RandomInputs) -> float:
    """The queries of a branch that see the keys [prefix | own] have the output of the whole sequence's last rows"""
    x = _shared(rng)
    errors = []
    for q, k, v in zip(x.q[1:], x.k[1:], x.v[1:], strict=True):
        queries, keys, values = (torch.cat([first[0], own]) for first, own in ((x.q, q), (x.k, k), (x.v, v)))
        whole = F.scaled_dot_product_attention(queries[None], keys[None], values[None], is_causal=True)
        errors.append(relative_error(preference.attend(q, keys, values), whole[0][x.prefix :]))
    return max(errors)


@check("L-prefix-bwd", BEYOND, "", AUTOGRAD)
def signals_of_a_shared_prefix(rng: RandomInputs) -> float:
    """Δ_k and Δ_v of a shared prefix are the sums over its branches"""
    x = _shared(rng)
    signals = [
        preference.branch_signals(q, torch.cat([x.k[0], k]), torch.cat([x.v[0], v]), delta)
        for q, k, v, delta in zip(x.q[1:], x.k[1:], x.v[1:], x.deltas, strict=True)
    ]

    def loss(k_0: Tensor, v_0: Tensor, q_1: Tensor) -> Tensor:
        queries = [q_1, *x.q[2:]]
        return torch.stack([
            (delta * preference.attend(q, torch.cat([k_0, k]), torch.cat([v_0, v]))).sum()
            for q, k, v, delta in zip(queries, x.k[1:], x.v[1:], x.deltas, strict=True)
        ]).sum()  # fmt: skip

    expected = differentiate(loss, x.k[0], x.v[0], x.q[1])
    ours = (*preference.prefix_signals(x.prefix, signals), signals[0][0])
    return max(relative_error(a, b) for a, b in zip(ours, expected, strict=True))

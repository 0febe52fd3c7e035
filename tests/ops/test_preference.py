"""Losses of preferences and rewards: the batched form equals the paper's for every pair, also where numbers are extreme."""

import pytest
import torch
from torch import Tensor

from handgrad.ops import loss, preference
from handgrad.paper import preference as paper
from handgrad.proof.oracles import relative_error
from handgrad.tolerances import TOLERANCE

BETA = 0.3
CLOSE = 1e-12


def sums(pairs: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """s, n and ref of pairs of completions of uneven lengths."""
    g = torch.Generator().manual_seed(seed)
    n = torch.randint(1, 9, (2 * pairs,), generator=g).double()
    s, ref = (-n * torch.rand(2 * pairs, generator=g, dtype=torch.float64) * 3 - 1e-3 for _ in range(2))
    return s, n, ref


def by_pair(s: Tensor, n: Tensor, ref: Tensor, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and coefficients, one pair after the other, in the paper's form."""
    losses: list[Tensor] = []
    c: list[Tensor] = []
    for i in range(0, len(s), 2):
        pair, refs, counts = (s[i], s[i + 1]), (ref[i], ref[i + 1]), (int(n[i]), int(n[i + 1]))
        means, ref_means = (s[i] / n[i], s[i + 1] / n[i + 1]), (ref[i] / n[i], ref[i + 1] / n[i + 1])
        given = {
            "dpo": ((pair, refs, BETA, 0.1), ()),
            "ipo": ((means, ref_means, BETA), (counts,)),
            "simpo": ((means, BETA, 0.4), (counts,)),
            "orpo": ((means, BETA), (counts,)),
        }
        arguments, more = given[name]
        losses.append(getattr(paper, name)(*arguments))
        c += getattr(paper, f"{name}_c")(*arguments, *more)
    return losses, c


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_pairs_equal_the_paper_form(name: str) -> None:
    s, n, ref = sums(5)
    batched = {
        "dpo": lambda: preference.dpo(s, ref, BETA, 0.1),
        "ipo": lambda: preference.ipo(s, n, ref, BETA),
        "simpo": lambda: preference.simpo(s, n, BETA, 0.4),
        "orpo": lambda: preference.orpo(s, n, BETA),
    }
    found = batched[name]()
    for ours, expected in zip(found, by_pair(s, n, ref, name), strict=True):
        assert relative_error(ours, torch.stack(expected)) <= CLOSE


def test_completions_and_tokens_equal_the_paper_form() -> None:
    s, _, ref = sums(4)
    desirable = torch.tensor([True, False, False, True, True, False, True, True])
    losses, c = preference.kto(s, ref, desirable, 0.2, BETA, (1.0, 1.3))
    for i, kind in enumerate(desirable.tolist()):
        given = s[i], ref[i], 0.2, BETA, 1.0 if kind else 1.3, kind
        assert (
            relative_error(losses[i], paper.kto(*given)) <= CLOSE and relative_error(c[i], paper.kto_c(*given)) <= CLOSE
        )
    ell, old = s / 4, s / 4 + torch.linspace(-0.6, 0.6, 8).double()
    for a in (1.4, -0.8, 0.0):
        losses, c = preference.clipped(ell, old, torch.full_like(s, a), 0.2, 0.3)
        assert relative_error(losses, paper.grpo(ell, old, a, (0.2, 0.3))) <= CLOSE
        assert relative_error(c, paper.grpo_c(ell, old, a, (0.2, 0.3))) <= CLOSE
    for ours, form, form_c in (
        (preference.kl(ell, old, BETA), paper.kl(ell, old, BETA), paper.kl_c(ell, old, BETA)),
        (
            preference.corrected_kl(ell, old, ref, BETA),
            paper.corrected_kl(ell, old, ref, BETA),
            paper.corrected_kl_c(ell, old, ref, BETA),
        ),
    ):
        assert relative_error(ours[0], form) <= 1e-11 and relative_error(ours[1], form_c) <= CLOSE


def test_extreme_probabilities_give_finite_coefficients() -> None:
    """A margin of thousands of nats; completions of probability almost 1 and almost 0; a reference far away."""
    s = torch.tensor([-5000.0, -1e-12, -1e-12, -5000.0], dtype=torch.float64)
    n, ref = torch.full_like(s, 3.0), torch.tensor([-10.0, -4000.0, -3000.0, -20.0], dtype=torch.float64)
    for losses, c in (
        preference.dpo(s, ref, 0.1),
        preference.ipo(s, n, ref, 0.1),
        preference.simpo(s, n, 2.0, 1.0),
        preference.orpo(s, n, 0.1),
        preference.kto(s, ref, torch.tensor([True, False, True, False]), 0.0, 0.1, (1.0, 1.0)),
        preference.corrected_kl(s, s + 0.1, s - 900, 0.1),
    ):
        assert torch.isfinite(losses).all() and torch.isfinite(c).all()
    assert preference.corrected_kl(s[:1], s[:1], ref[:1] + 6000, 0.1)[1].isfinite().all()  # e^x would overflow
    assert preference.dpo(s, ref, 0.1)[1].abs().max() <= 0.1


def test_a_probability_of_one_has_no_odds() -> None:
    """log odds of p = 1 is infinite: the value is, and a training step that meets it is refused as not finite"""
    losses, c = preference.orpo(torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64), 0.1)
    assert not torch.isfinite(losses).all() and not torch.isfinite(c).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weighted_signals_and_log_probabilities(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    logits = (4 * torch.randn(5, 11, generator=g, dtype=torch.float64)).to(dtype)
    targets, c = torch.randint(11, (5,), generator=g), torch.randn(5, generator=g, dtype=torch.float64)
    exact = logits.double()
    assert (
        relative_error(loss.log_probabilities(logits, targets), paper.log_p(exact, targets))
        <= TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32]
    )
    expected = paper.delta_logits(torch.softmax(exact, 1), targets, c)
    assert relative_error(loss.weighted_delta(logits.clone(), targets, c).double(), expected) <= TOLERANCE[dtype]

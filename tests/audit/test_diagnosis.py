"""Every kind of mistake is recognized, in tensors with little and with much rounding error."""

import math

import pytest
import torch
from torch import Tensor

from handgrad.auditing.diagnosis import Diagnosis, diagnose

NOISES = [1e-12, 1e-6, 1e-2]  # relative rounding error of float64, float32 and bfloat16 after a few layers


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noisy(x: Tensor, noise: float) -> Tensor:
    return x * (1 + noise * values(*x.shape, seed=9))


@pytest.fixture(params=NOISES, ids=["float64", "float32", "bfloat16"])
def noise(request: pytest.FixtureRequest) -> float:
    return float(request.param)


RIGHT = values(8, 6)


def found(computed: Tensor | None, expected: Tensor | None, noise: float, **known: object) -> Diagnosis:
    bound = 0.0 if expected is None else 4 * noise * float(expected.norm())
    computed = noisy(computed, noise) if computed is not None else None
    return diagnose(computed, expected, bound, **known)  # type: ignore[arg-type]


def test_right(noise: float) -> None:
    assert found(RIGHT, RIGHT, noise).right
    assert not found(1.2 * RIGHT, RIGHT, noise).right
    assert found(None, torch.zeros(3), noise).right, "a gradient of 0 need not be computed"
    assert found(None, None, noise).right, "a frozen weight has none"


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (2.0, "2 times too large"),
        (0.5, "half of the right one"),
        (8.0, "multiplied by √d_head"),
        (1 / 8, "divided by √d_head"),
        (1 / 48, "divided by the number of targets"),
        (-3.0, "wrong sign and is 3 times too large"),
    ],
)
def test_factor(factor: float, says: str, noise: float) -> None:
    scales = {"√d_head": 8.0, "the number of targets": 48.0}
    result = found(factor * RIGHT, RIGHT, noise, scales=scales)
    assert result.kind == "factor"
    assert result.factor == pytest.approx(factor, rel=10 * noise + 1e-9)
    assert says in result.sentence


@pytest.mark.parametrize(
    ("factor", "says"), [(1.001, "is 0.1 % too large"), (0.97, "is 3 % too small"), (1.23, "is 1.23 times too large")]
)
def test_factors_near_1_have_digits_that_tell(factor: float, says: str) -> None:
    result = found(factor * RIGHT, RIGHT, 1e-9)
    assert (result.kind, result.sentence) == ("factor", says) and float(result.detail) == pytest.approx(factor)


def test_sign_zero_and_not_trained(noise: float) -> None:
    assert found(-RIGHT, RIGHT, noise).kind == "sign"
    assert found(0 * RIGHT, RIGHT, noise).kind == "zero"
    assert found(None, RIGHT, noise).kind == "not trained"
    assert found(RIGHT, None, noise).kind == "unexpected"


def test_transpose(noise: float) -> None:
    square = values(7, 7)
    assert found(square.t(), square, noise).kind == "transpose"
    assert found(RIGHT.t(), RIGHT, noise).kind == "transpose"
    assert found(RIGHT.t().reshape(8, 6), RIGHT, noise).kind == "transpose"
    stack = values(3, 5, 5)
    assert found(stack.transpose(1, 2), stack, noise).detail == "1,2"


def test_terms(noise: float) -> None:
    head, embedding = values(8, 6, seed=1), values(8, 6, seed=2)
    terms = {"the head's part": head, "the embedding's part": embedding}
    total = head + embedding
    lacking = found(embedding, total, noise, terms=terms)
    assert (lacking.kind, lacking.detail) == ("missing term", "the head's part")
    assert lacking.sentence == "lacks the head's part"
    assert found(total + head, total, noise, terms=terms).sentence == "has the head's part twice"
    assert (
        found(total - 2 * embedding, total, noise, terms=terms).sentence == "has the wrong sign in the embedding's part"
    )
    partial = found(total + 2.5 * head, total, noise, terms=terms)
    assert (partial.kind, partial.detail) == ("missing term", "the head's part")
    assert partial.factor == pytest.approx(3.5, rel=0.1)


def test_missing_sum(noise: float) -> None:
    unsummed = values(5, 8, 6)
    total = unsummed.sum(0)
    assert found(unsummed, total, noise).kind == "missing sum"
    last = found(unsummed[-1], total, noise, unsummed=unsummed)
    assert last.kind == "missing sum" and "the last of 5 contributions" in last.sentence
    column = RIGHT.sum(1, keepdim=True)
    assert found(RIGHT, column, noise).detail == "1"
    assert found(values(3, 4), RIGHT, noise).kind == "shape"


def test_not_finite(noise: float) -> None:
    broken = RIGHT.clone()
    broken[0, 0] = math.inf
    result = found(broken, RIGHT, noise)
    assert result.kind == "not finite"
    assert "infinite in 1 of 48 entries, and right in the others" in result.sentence
    assert found(RIGHT * math.nan, RIGHT, noise).kind == "not finite"


def test_permuted(noise: float) -> None:
    for order, says in (
        ([1, 0, 2, 3, 4, 5, 6, 7], "0 and 1 exchanged"),
        ([7, 6, 5, 4, 3, 2, 1, 0], "reversed"),
        ([4, 5, 6, 7, 0, 1, 2, 3], "halves exchanged"),
        ([7, 0, 1, 2, 3, 4, 5, 6], "shifted by 1"),
        ([0, 4, 1, 5, 2, 6, 3, 7], "interleaved"),
    ):
        result = found(RIGHT[order], RIGHT, noise)
        assert result.kind == "permuted" and says in result.sentence
    wide = values(6, 40)
    assert found(wide[:, torch.randperm(40)], wide, noise).kind == "permuted"


def test_slices_that_are_empty_or_belong_elsewhere(noise: float) -> None:
    empty = RIGHT.clone()
    empty[5:7] = 0.0
    result = found(empty, RIGHT, noise)
    assert result.kind == "zero"
    assert result.sentence == "is zero in 2 of the 8 slices of axis 0 (5–6), and right in the others"
    for order, says in (([0, 0, 1, 2, 3, 4, 5, 6], "shifted by 1"), ([0, 1, 2, 7, 4, 5, 6, 7], "slice 3 holds what")):
        result = found(RIGHT[order], RIGHT, noise)
        assert result.kind == "permuted" and says in result.sentence
    assert found(torch.cat([0 * RIGHT[:1], RIGHT[:-1]]), RIGHT, noise).detail == "shifted by 1"
    others = values(8, 6, seed=3)
    assert found(torch.cat([RIGHT[:6], others[6:]]), RIGHT, noise).kind == "other"


def test_entries_in_another_order() -> None:
    shuffled = RIGHT.flatten()[torch.randperm(48)].view(8, 6)
    assert found(shuffled, RIGHT, 1e-6).kind == "permuted"
    assert found(shuffled, RIGHT, 1e-2).kind == "other", "with so much rounding it may be a coincidence"


def test_factor_per_slice(noise: float) -> None:
    gains = 1 + values(6).abs()
    result = found(RIGHT * gains, RIGHT, noise)
    assert (result.kind, result.detail) == ("factor per slice", "1")


def test_parts_and_known_mistakes(noise: float) -> None:
    parts = {"q": (1, 0, 2), "k": (1, 2, 2), "v": (1, 4, 2)}
    wrong = RIGHT.clone()
    wrong[:, 2:4] *= -1
    result = found(wrong, RIGHT, noise, parts=parts)
    assert (result.kind, result.part) == ("sign", "k") and result.sentence == "in k has the wrong sign"
    assert found(2 * RIGHT, RIGHT, noise, parts=parts).part == "", "all parts are wrong in the same way"
    twice = values(8, 6, seed=5)
    known = found(twice, RIGHT, noise, mistakes={"the keys were rotated twice": twice})
    assert (known.kind, known.detail) == ("known mistake", "the keys were rotated twice")


def test_other_says_where(noise: float) -> None:
    wrong = RIGHT.clone()
    wrong[2:4] += values(2, 6, seed=7)
    result = found(wrong, RIGHT, noise)
    assert result.kind == "other"
    assert "2 of the 8 slices of axis 0: 2–3" in result.sentence
    assert "should be zero" in diagnose(RIGHT, 0 * RIGHT, 1e-6).sentence


def test_simplest_explanation_wins(noise: float) -> None:
    """A factor of −1 explains it, and so does a factor per row, a doubled term with the wrong sign, and a mistake."""
    known = {"terms": {"all of it": RIGHT}, "mistakes": {"it were negated": -RIGHT}}
    assert found(-RIGHT, RIGHT, noise, **known).kind == "sign"

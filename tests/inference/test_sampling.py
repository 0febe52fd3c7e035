"""Samplers: probabilities equal to transformers', and samples that follow them."""

import math

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process

from handgrad.inference import sampling
from handgrad.inference.processors import penalize
from handgrad.inference.sampling import Sampling, candidates_of, choose

ONE_BY_ONE = [
    {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 5}, {"top_k": 1}, {"top_k": 500}, {"top_p": 0.7},
    {"top_p": 0.0}, {"top_p": 1.0}, {"min_p": 0.2}, {"min_p": 1.0}, {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6},
]  # fmt: skip
COMBINED = [
    {"temperature": 0.7, "top_k": 9}, {"top_k": 12, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 15, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
]  # fmt: skip
SEEN = [[0, 3, 3, 8], [1], [20, 19, 0, 5, 5]]


def probabilities(logits: Tensor, chosen: Sampling) -> Tensor:
    """(B, V): those with which each id is chosen, in float64."""
    candidates, p = candidates_of(logits, chosen)
    return p if candidates is None else p.new_zeros(logits.shape).scatter_(1, candidates, p)


def logits_of(rows: int = 3, n_vocab: int = 23) -> torch.Tensor:
    return 2 * torch.randn(rows, n_vocab, dtype=torch.float64)


def penalized(logits: torch.Tensor, settings: list[Sampling], seen: list[list[int]]) -> torch.Tensor:
    """(B, V) logits, those of each row as its settings change them"""
    changed = logits.clone()
    for row, chosen, ids in zip(changed, settings, seen, strict=True):
        penalize(row, chosen, ids[:2], ids[2:])
    return changed


def by_transformers(logits: torch.Tensor, seen: list[list[int]], options: dict[str, float]) -> torch.Tensor:
    """One row at a time, in the order in which its generate applies them."""
    o = {"temperature": 1.0, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": 1.0, **options}
    steps = [logits_process.RepetitionPenaltyLogitsProcessor(float(o["repetition_penalty"]))]
    steps.append(logits_process.TemperatureLogitsWarper(float(o["temperature"])))
    if o["top_k"] is not None:
        steps.append(logits_process.TopKLogitsWarper(o["top_k"]))
    if o["top_p"] is not None:
        steps.append(logits_process.TopPLogitsWarper(float(o["top_p"])))
    if o["min_p"] is not None:
        steps.append(logits_process.MinPLogitsWarper(float(o["min_p"])))
    rows = []
    for row, ids in zip(logits, seen, strict=True):
        scores = row[None].clone()
        for step in steps:
            scores = step(torch.tensor([ids]), scores)
        rows.append(torch.softmax(scores, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("options", ONE_BY_ONE + COMBINED, ids=str)
def test_probabilities_equal_those_of_transformers(options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of()
    logits[1, 4:7] = logits[1].max()  # equal ones: top_k keeps all that equal the last
    chosen = Sampling(**{"temperature": 1.0, **options})
    changed = penalized(logits, [chosen] * 3, SEEN)
    ours, theirs = probabilities(changed, chosen), by_transformers(logits, SEEN, options)
    rows = [0, 2] if "top_p" in options else [0, 1, 2]  # top_p may keep either of two equal tokens at its edge
    assert torch.allclose(ours[rows], theirs[rows], atol=1e-14)
    assert torch.allclose(ours.sort(1)[0], theirs.sort(1)[0], atol=1e-14)
    monkeypatch.setattr(sampling, "FIRST_CANDIDATES", 2)  # the whole vocabulary has to be sorted
    assert torch.equal(probabilities(changed, chosen)[rows], ours[rows])


def test_penalties_and_bias_are_those_of_the_definition() -> None:
    """OpenAI's: l_i − f c_i − p [c_i > 0], where c_i counts the new text; between repetition penalty and bias."""
    logits = logits_of(1)[0]
    chosen = Sampling(
        1.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.7, logit_bias=((3, 5.0), (9, -100.0))
    )
    prompt, new = [3, 3, 5], [5, 8, 8, 8]
    expected = logits.clone()
    for i in {3, 5, 8}:
        expected[i] = expected[i] * 1.3 if expected[i] < 0 else expected[i] / 1.3
    expected[5] -= 0.4 - 0.7
    expected[8] -= 3 * 0.4 - 0.7
    expected[3] += 5
    expected[9] -= 100
    penalize(logits, chosen, prompt, new)
    assert torch.allclose(logits, expected, atol=1e-14)


def chi_square_limit(degrees: int) -> float:
    """Exceeded once in 10⁶ (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.753 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, *ONE_BY_ONE[1:3], *COMBINED], ids=str
)
@pytest.mark.some_cases(3)
def test_samples_follow_the_probabilities(options: dict[str, float]) -> None:
    """Chi-square over 20,000 samples."""
    chosen, draws = Sampling(**{"temperature": 1.0, "seed": 3, **options}), 20_000
    logits = penalized(logits_of(1), [chosen], SEEN[:1])
    p = probabilities(logits, chosen)[0]
    generators = [Sampling(seed=i).generator() for i in range(100)]  # of different sequences
    counts = torch.zeros(len(p), dtype=torch.float64)
    for _ in range(draws // 100):
        ids = choose(logits.expand(100, -1), [chosen] * 100, generators)
        counts += torch.bincount(torch.tensor(ids), minlength=len(p))
    assert counts[p == 0].sum() == 0
    rare = draws * p < 5  # together in one class
    expected = torch.cat([draws * p[~rare], (draws * p[rare]).sum()[None]])
    found = torch.cat([counts[~rare], counts[rare].sum()[None]])
    some = expected > 0
    chi = ((found - expected)[some].square() / expected[some]).sum().item()
    assert chi < chi_square_limit(int(some.sum()) - 1)
    wrong = expected[some].roll(1)
    assert ((found[some] - wrong).square() / wrong).sum() > chi_square_limit(int(some.sum()) - 1), "the test can fail"


def test_rows_of_different_settings() -> None:
    logits = logits_of(6)
    settings = [
        Sampling(), Sampling(1.0, seed=1), Sampling(1.0, top_k=3, seed=2), Sampling(), Sampling(1.0, seed=5),
        Sampling(repetition_penalty=9.0),
    ]  # fmt: skip
    seen = [[int(row.argmax())] for row in logits]
    logits = penalized(logits, settings, seen)
    together = choose(logits, settings, [s.generator() for s in settings])
    alone = [choose(logits[i : i + 1], [s], [s.generator()])[0] for i, s in enumerate(settings)]
    assert together == alone
    assert [together[0], together[3]] == [seen[0][0], seen[3][0]] and together[5] != seen[5][0]


def test_rounding_changes_a_choice_as_rarely_as_the_probabilities() -> None:
    """Of choices from p and q, with the same random numbers, at most 2 tv/(1 + tv) differ, tv = ½ Σ |p − q|. The vocabulary
    has thousands of improbable ids, whose places in a cumulative sum would move by more than their width."""
    chosen, draws = Sampling(1.0, seed=9), 1500
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(1, 5000, generator=generator)
    for rounding in (1e-6, 1e-2):
        noisy = logits + rounding * torch.randn(1, 5000, generator=generator)
        p, q = (probabilities(x, chosen) for x in (logits, noisy))
        distance = float((p - q).abs().sum() / 2)
        most = draws * 2 * distance / (1 + distance)
        first, second = chosen.generator(), chosen.generator()
        found = [choose(x, [chosen], [g])[0] for _ in range(draws) for x, g in ((logits, first), (noisy, second))]
        differ = sum(a != b for a, b in zip(found[::2], found[1::2], strict=True))
        assert differ <= most + 5 * math.sqrt(most) + 0.5
    assert differ > 0 and len(set(found[::2])) > 300, "the test can fail"


def test_a_choice_depends_on_key_and_id_only() -> None:
    keys, ids = torch.tensor([[7], [2**63 - 1]]), torch.tensor([[0, 5, 49151], [5, -3, 1]])
    expected = [[splitmix(int(key), int(i)) for i in row] for key, row in zip(keys, ids, strict=True)]
    assert torch.equal(sampling.uniform(keys, ids), torch.tensor(expected, dtype=torch.float64))
    logits = logits_of(1, 3000)
    settings = [Sampling(1.0, seed=3), Sampling(1.0, top_k=2999, seed=3), Sampling(1.0, top_p=1 - 1e-12, seed=3)]
    filtered = [choose(logits, [s], [s.generator()]) for s in settings[1:]]
    assert filtered[0] == filtered[1]  # the id that is left out was not chosen


def splitmix(key: int, i: int) -> float:
    """Number i + 1 of the published generator, by Python's integers."""
    mask = (1 << 64) - 1
    x = (key + (i + 1) * 0x9E3779B97F4A7C15) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ x >> shift) * factor) & mask
    return (((x ^ x >> 31) >> 11) + 0.5) * 2.0**-53


def test_a_tiny_temperature_takes_the_most_probable() -> None:
    logits = logits_of()
    found = choose(logits, [Sampling(1e-40, seed=1)] * 3, [Sampling(seed=1).generator()] * 3)
    assert found == logits.argmax(1).tolist()

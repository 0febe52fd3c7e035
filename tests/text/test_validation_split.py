"""The validation split: shares, groups of equal examples, and that no example is on both sides."""

from pathlib import Path

import numpy as np
import pytest
from example_files import lines, numbered, read, shown
from hypothesis import given, settings
from hypothesis import strategies as st

from handgrad.errors import HandgradError
from handgrad.text.examples import Examples
from handgrad.text.validation_split import count_shared, split


def test_split_shares_groups_and_errors() -> None:
    found = numbered(50)
    training, validation = split(found, 0.1, 3)
    assert validation is not None and (training.per_epoch, validation.per_epoch) == (45, 5)
    firsts = [part.ids[part.offsets[:-1]].tolist() for part in (training, validation)]
    assert sorted(firsts[0] + firsts[1]) == list(range(50)) and firsts[1] == sorted(firsts[1]) != list(range(45, 50))
    for part in (training, validation):
        for i in range(part.per_epoch):
            ids, learn = part.example(i)
            assert len(ids) == ids[0] + 2 and learn.tolist() == [False] + [True] * (len(ids) - 1)
    again, other = split(found, 0.1, 3)[1], split(found, 0.1, 4)[1]
    assert again is not None and other is not None
    assert again.fingerprint == validation.fingerprint != other.fingerprint
    assert split(found, 0.0, 3) == (found, None)
    for share in (0.001, 0.999):
        training, validation = split(numbered(2), share, 0)
        assert validation is not None and training.per_epoch == validation.per_epoch == 1
    # windows of one text stay together; of a single text the end is held out
    together = Examples(found.ids, found.is_target, found.offsets, np.arange(50) // 5, 0)
    training, validation = split(together, 0.2, 1)
    assert validation is not None and set(training.record_numbers) | set(validation.record_numbers) == set(range(10))
    assert not set(training.record_numbers) & set(validation.record_numbers) and validation.per_epoch == 10
    alone = Examples(found.ids, found.is_target, found.offsets, np.zeros(50), 0)
    training, validation = split(alone, 0.1, 1)
    assert validation is not None and validation.ids[validation.offsets[:-1]].tolist() == [45, 46, 47, 48, 49]
    with pytest.raises(HandgradError, match=r"1 example cannot be split.*val_share=0"):
        split(numbered(1), 0.1, 0)
    with pytest.raises(HandgradError, match="cannot hold out a share of 1"):
        split(found, 1.0, 0)


def test_equal_examples_are_counted_and_stay_on_one_side(tmp_path: Path) -> None:
    found, summary = read(lines(tmp_path, *({"prompt": f"q{i % 10}", "completion": f"a{i % 10}"} for i in range(200))))
    assert summary.examples == 200 and summary.distinct == 10
    text = " ".join(shown((found, summary), 100).split())
    assert "190 examples equal to an earlier one" in text
    assert "Only 10 of 200 examples are distinct" in text
    for seed in range(5):
        training, validation = split(found, 0.1, seed)
        assert validation is not None and (training.per_epoch, validation.per_epoch) == (180, 20)
        assert count_shared(training, validation) == 0
    assert count_shared(found, validation) == 20
    distinct, summary = read(lines(tmp_path, *({"text": f"text number {i}"} for i in range(40))))
    assert summary.distinct == 40 and "distinct" not in shown((distinct, summary), 100)
    same, _ = read(lines(tmp_path, *({"text": "the same"} for _ in range(40))))
    assert split(same, 0.1, 0) == (same, None)


def test_a_large_group_of_equal_examples_is_not_held_out(tmp_path: Path) -> None:
    records = [{"text": "the same"}] * 90 + [{"text": f"another, {i}"} for i in range(3)]
    found, _ = read(lines(tmp_path, *records))
    for seed in range(5):
        training, validation = split(found, 0.1, seed)
        assert validation is not None and training.per_epoch >= 90 and count_shared(training, validation) == 0
    pair, _ = read(lines(tmp_path, *[{"text": "the same"}] * 5, *[{"text": "another"}] * 4))
    training, validation = split(pair, 0.1, 0)
    assert validation is not None and (training.per_epoch, validation.per_epoch) == (5, 4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=2, max_size=40), st.floats(0.01, 0.9))
def test_no_example_is_on_both_sides(pairs: list[tuple[int, int]], share: float) -> None:
    """For any examples that lines have in common."""
    pairs = sorted(pairs, key=lambda pair: pair[1])
    ids = np.array([[value, value] for value, _ in pairs], np.uint16).ravel()
    found = Examples(
        ids, np.tile([False, True], len(pairs)), 2 * np.arange(len(pairs) + 1), np.array([n for _, n in pairs])
    )
    n_lines = len(set(found.record_numbers.tolist()))
    if n_lines * share < 1 and len(pairs) > n_lines:
        return
    training, validation = split(found, share, 0)
    if validation is None:
        assert training is found
        return
    assert validation is not None and training.per_epoch and validation.per_epoch
    assert training.per_epoch + validation.per_epoch == len(pairs)
    assert count_shared(training, validation) == 0
    assert not set(training.record_numbers.tolist()) & set(validation.record_numbers.tolist())

"""The command that times a mixture of experts beside transformers, at a tiny size."""

import re

import pytest
from bench import experts


def test_step_of_a_mixture_is_timed_beside_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    experts.main((experts.Case(64, 32, 1, 8, 2, (2, 9)),))
    shown = capsys.readouterr().out
    found = re.fullmatch(
        r"1 blocks of width 64, 2 of 8 experts of width 32, 18 tokens: handgrad ([\d.]+) s, transformers ([\d.]+) s,"
        r" ([\d.]+)×\nload .*(?:\n.*)*\n?",
        shown,
    )
    assert found, shown
    ours, theirs, ratio = map(float, found.groups())
    assert abs(ratio - theirs / ours) <= 0.01 * ratio + 1e-3 * (1 + ratio) / ours  # both are printed rounded

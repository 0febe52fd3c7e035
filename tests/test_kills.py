"""A few kills of tests/kills.py; `make long` runs a hundred per command."""

import json
from pathlib import Path

import pytest

from conftest import run_processes
from handgrad.files.atomic import exchange


@pytest.mark.parametrize(
    ("command", "processes", "kills", "optimizer"),
    [("train", 1, 4, "AdamW"), ("finetune", 1, 4, "AdamW"), ("train", 2, 2, "AdamW"), ("train", 1, 3, "muon")],
)
def test_run_killed_at_a_system_call_resumes_to_the_same_result(
    command: str, processes: int, kills: int, optimizer: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert exchange(tmp_path / "a", tmp_path / "b"), (
        "this file system must support exchange, or the kills would miss it"
    )
    options = ["--command", command, "--processes", str(processes), "--kills", str(kills)]
    options += ["--optimizer", optimizer]
    done = run_processes(1, Path(__file__).parent / "kills.py", *options)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] == kills and counts["points"] > 100

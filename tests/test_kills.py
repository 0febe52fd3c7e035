"""Some of the kills of tests/kills.py; `make long` places a hundred."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from handgrad.files.atomic import exchange


@pytest.mark.parametrize(("command", "processes", "kills"), [("train", 1, 6), ("finetune", 1, 6), ("train", 2, 2)])
def test_a_run_killed_at_a_system_call_ends_as_if_undisturbed(
    command: str, processes: int, kills: int, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert exchange(tmp_path / "a", tmp_path / "b"), "the trace below must contain real exchanges"
    options = ["--command", command, "--processes", str(processes), "--kills", str(kills)]
    script = Path(__file__).parent / "kills.py"
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] == kills and seen["points"] > 100

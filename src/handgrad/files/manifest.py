"""The manifest of a folder written by handgrad: size and SHA-256 of every file, and a digest of the manifest itself.

It may also contain facts, such as the step of a checkpoint. Any changed byte of a listed file or of the manifest is
detected. Files that are not listed are ignored; a folder without a manifest was written by another tool and is not checked.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import HandgradError, MissingError
from .reading import open_regular, read_json

FILE = "handgrad-manifest.json"
FORMAT = 1


class DamagedError(HandgradError):
    """A folder does not match its manifest."""


def write(folder: Path, **facts: Any) -> None:
    """Write the manifest of a folder: its files and `facts`."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != FILE
    }
    body = {"format": FORMAT, **facts, "files": files}
    (folder / FILE).write_text(json.dumps({**body, "digest": digest(body)}, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """Read the manifest. Raises MissingError without one, DamagedError if it was changed."""
    try:
        found = read_json(folder / FILE)
    except MissingError:
        raise
    except HandgradError as reason:
        raise DamagedError(reason.message) from None
    check_digest(found, folder / FILE)
    if found.get("format") != FORMAT or not isinstance(found.get("files"), dict):
        raise DamagedError(f"{folder / FILE} was written by another version of handgrad")
    return found


def check(folder: Path, required: Iterable[str] = (), contents: bool = True) -> dict[str, Any]:
    """Check every listed file and return the manifest. With contents=False only sizes are compared. Raises DamagedError
    for the first difference, MissingError if there is no manifest."""
    found = read(folder)
    for name in required:
        if name not in found["files"]:
            raise DamagedError(f"{folder} has no {name}")
    for name, expected in found["files"].items():
        path = folder / name
        try:
            with open_regular(path) as file:
                same = file.seek(0, 2) == expected["bytes"]
        except HandgradError as reason:
            raise DamagedError(reason.message) from None
        if same and contents:
            same = sha256_of(path) == expected["sha256"]
        if not same:
            raise DamagedError(f"{path} has changed since it was written")
    return found


def check_present(folder: Path) -> None:
    """Check the listed files that exist, for a folder given by the user. A folder without a manifest passes."""
    try:
        found = read(folder)
    except MissingError:
        return
    for name, expected in found["files"].items():
        path = folder / name
        if path.is_file() and (path.stat().st_size != expected["bytes"] or sha256_of(path) != expected["sha256"]):
            raise DamagedError(
                f"{path} is damaged: it has changed since handgrad wrote it. Restore it; if the change is intended, delete"
                f" {FILE} in the same folder"
            )


def digest(body: dict[str, Any]) -> str:
    """SHA-256 of a JSON object, independent of its layout."""
    plain = {name: value for name, value in body.items() if name != "digest"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_digest(body: dict[str, Any], file: Path) -> None:
    if body.get("digest") != digest(body):
        raise DamagedError(f"{file} is damaged: it has changed since it was written")


def sha256_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

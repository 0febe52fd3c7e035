"""Read untrusted files: regular files only, of bounded size, with JSON of bounded depth.

A path given by a user or a file can be a folder, a pipe, a device or a file of any size. `open_regular` never blocks and
never reads a device; `read_bytes` and `read_text` stop at a limit; `parse_json` bounds depth and digits and rejects unpaired
surrogates. Every failure is a HandgradError with the file and the reason.
"""

import errno
import json
import os
import stat
import sys
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import HandgradError, MissingError, printable

MB = 1_000_000
JSON_BYTES = 16 * MB  # maximum size of a configuration, an index, a manifest
MAX_DEPTH = 64  # nested objects and lists
MAX_DIGITS = 40  # of an integer
WHITESPACE = " \t\r\n"  # of JSON

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading. Raises MissingError if it does not exist."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as reason:
        kind = MissingError if reason.errno in (errno.ENOENT, errno.ENOTDIR) else HandgradError
        raise kind(f"cannot read {path}: {(reason.strerror or str(reason)).lower()}") from None
    except ValueError as reason:  # a zero byte or an unpaired surrogate in the name
        raise HandgradError(f"cannot read {printable(str(path))}: {reason}") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise HandgradError(
            f"cannot read {path}: it is {_KINDS.get(stat.S_IFMT(mode), 'not a file')}, not a regular file"
        )
    return os.fdopen(handle, "rb")


def check_regular(path: str | Path) -> None:
    """Raise like `open_regular`, before a library opens the file itself."""
    open_regular(path).close()


def read_bytes(path: str | Path, limit: int = JSON_BYTES) -> bytes:
    """The content of a file of at most `limit` bytes."""
    with open_regular(path) as file:
        try:
            raw = read_at_most(file, limit + 1)
        except OSError as reason:
            raise HandgradError(f"cannot read {path}: {reason.strerror}") from None
    if len(raw) > limit:
        most = f"{limit / MB:,.0f} MB" if limit >= MB else f"{limit:,} bytes"
        raise HandgradError(f"cannot read {path}: it is larger than {most}, the maximum for such a file")
    return raw


def read_at_most(file: BinaryIO, limit: int) -> bytes:
    """Up to `limit` bytes of a file. Python's own `read(limit)` allocates all of them first."""
    parts = bytearray()
    while len(parts) < limit and (part := file.read(min(1 << 20, limit - len(parts)))):
        parts += part
    return bytes(parts)


def read_text(path: str | Path, limit: int = JSON_BYTES) -> str:
    """The content of a UTF-8 file."""
    return decode(read_bytes(path, limit), path)


def read_stdin(limit: int = JSON_BYTES) -> str:
    """The text of standard input, which may be endless."""
    raw = read_at_most(sys.stdin.buffer, limit + 1)
    if len(raw) > limit:
        raise HandgradError(f"standard input has more than {limit / MB:,.0f} MB, the maximum")
    return decode(raw, "standard input")


def decode(raw: bytes, name: str | Path) -> str:
    """UTF-8 → text. `name` is for messages."""
    try:
        return raw.decode()
    except UnicodeDecodeError as reason:
        raise HandgradError(f"{name} is not UTF-8 text (byte {reason.start}): convert it") from None


def read_json(path: str | Path, limit: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file."""
    raw = parse_json(read_text(path, limit), path)
    if not isinstance(raw, dict):
        raise HandgradError(f"{path} must contain a JSON object, not a {type(raw).__name__}")
    return raw


def parse_json(text: str, name: str | Path) -> Any:
    """Parse JSON of bounded depth and digits, without unpaired surrogates. `name` is for messages."""
    start = len(text) - len(text.lstrip(WHITESPACE))
    value, end = parse_next(text, start, name)
    if text[end:].strip(WHITESPACE):
        raise HandgradError(f"{name} is not valid JSON: unexpected text after the value, column {end + 1:,}")
    return value


def parse_next(text: str, at: int, name: str | Path) -> tuple[Any, int]:
    """Parse the JSON value that starts at position `at`; returns it and its end. For texts with several values."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise HandgradError(f"{name} is not usable JSON: nested too deeply") from None
    except json.JSONDecodeError as reason:
        line = f"line {reason.lineno:,}, " if "\n" in text[at : reason.pos] else ""
        raise HandgradError(f"{name} is not valid JSON: {reason.msg}, {line}column {reason.colno:,}") from None
    except ValueError as reason:
        raise HandgradError(f"{name} is not valid JSON: {printable(str(reason))}") from None
    if text.count("[", at, end) + text.count("{", at, end) > MAX_DEPTH or text.find("\\u", at, end) >= 0:
        _check_values(value, name)
    return value, end


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_parse_integer)


def _check_values(value: Any, name: str | Path) -> None:
    """Check depth and characters, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                check_unicode(item, name)
            elif isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return
        level = below
    raise HandgradError(f"{name} is not usable JSON: more than {MAX_DEPTH} levels deep")


def check_unicode(text: str, name: str | Path) -> None:
    """Raise if the text contains an unpaired surrogate, such as \\ud83d alone: JSON and command lines can, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as reason:
        half = f"\\u{ord(text[reason.start]):04x}"
        raise HandgradError(f"{name} contains {half}, half of a character: complete it or remove it") from None

"""Reading files that come from outside: regular files only, never more than a limit, JSON that cannot hurt.

A name that a user or a file gives can be a folder, a pipe, a device, a file of any size. `open_regular` never blocks and
never reads a device; `read_bytes` and `read_text` stop at a limit; `parse_json` bounds depth and digits and refuses lone
surrogates. Every failure is a HandgradError that names the file and the reason.
"""

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import HandgradError, MissingError, printable

MB = 1_000_000
JSON_BYTES = 16 * MB  # of a configuration, an index, a manifest
DEEPEST = 64  # objects and lists inside each other
DIGITS = 40  # of a whole number
BLANKS = " \t\r\n"  # of JSON

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading. MissingError if there is none of that name."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as reason:
        kind = MissingError if reason.errno in (errno.ENOENT, errno.ENOTDIR) else HandgradError
        raise kind(f"cannot read {path}: {(reason.strerror or str(reason)).lower()}") from None
    except ValueError as reason:  # a zero byte or half a character in the name
        raise HandgradError(f"cannot read {printable(str(path))}: {reason}") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise HandgradError(f"cannot read {path}: it is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a regular file")
    return os.fdopen(handle, "rb")


def check_regular(path: str | Path) -> None:
    """Raise as `open_regular` does: for libraries that open files themselves."""
    open_regular(path).close()


def read_bytes(path: str | Path, limit: int = JSON_BYTES) -> bytes:
    """The whole file, if it is not larger than `limit` bytes."""
    with open_regular(path) as file:
        try:
            raw = file.read(limit + 1)
        except OSError as reason:
            raise HandgradError(f"cannot read {path}: {reason.strerror}") from None
    if len(raw) > limit:
        raise HandgradError(f"cannot read {path}: it is larger than the {limit / MB:,.0f} MB such a file may have")
    return raw


def read_text(path: str | Path, limit: int = JSON_BYTES) -> str:
    """The whole file as UTF-8 text."""
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as reason:
        raise HandgradError(f"{path} is not UTF-8 text (byte {reason.start}): convert it") from None


def read_json(path: str | Path, limit: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object that a file holds."""
    raw = parse_json(read_text(path, limit), path)
    if not isinstance(raw, dict):
        raise HandgradError(f"{path} must hold a JSON object, not a {type(raw).__name__}")
    return raw


def parse_json(text: str, name: str | Path) -> Any:
    """What the text says, if it is JSON of bounded depth and digits, without lone surrogates. `name` is for messages."""
    begin = len(text) - len(text.lstrip(BLANKS))
    value, end = parse_next(text, begin, name)
    if text[end:].strip(BLANKS):
        raise HandgradError(f"{name} is not valid JSON: something follows the value, column {end + 1:,}")
    return value


def parse_next(text: str, at: int, name: str | Path) -> tuple[Any, int]:
    """The JSON value that begins at `at`, and where it ends. For one of many values in a text."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise HandgradError(f"{name} is not usable JSON: nested too deeply") from None
    except json.JSONDecodeError as reason:
        line = f"line {reason.lineno:,}, " if "\n" in text[at : reason.pos] else ""
        raise HandgradError(f"{name} is not valid JSON: {reason.msg}, {line}column {reason.colno:,}") from None
    except ValueError as reason:
        raise HandgradError(f"{name} is not valid JSON: {printable(str(reason))}") from None
    if text.count("[", at, end) + text.count("{", at, end) > DEEPEST or text.find("\\u", at, end) >= 0:
        _check_values(value, name)
    return value, end


def _whole_number(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a whole number of {len(digits):,} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole_number)


def _check_values(value: Any, name: str | Path) -> None:
    """Depth and characters, walked without recursion."""
    level = [value]
    for _ in range(DEEPEST + 1):
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
    raise HandgradError(f"{name} is not usable JSON: more than {DEEPEST} levels deep")


def check_unicode(text: str, name: str | Path) -> None:
    """JSON and command lines can spell half of a character, \\ud83d alone, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as reason:
        half = f"\\u{ord(text[reason.start]):04x}"
        raise HandgradError(f"{name} holds {half}, half of a character: write the whole, or leave it out") from None

"""Errors caused by user input, and how they name options; and what libraries raise for such input, turned into one of these.

A message is written once, with `option("batch_tokens")` where it names an option. The command line shows it as
`--batch-tokens` (`for_command_line`), Python as `batch_tokens` (`for_python`), which is also what `str` gives. The command
line prints an error as one line and exits with status 1.
"""

import json
import os
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MAX_MESSAGE = 1000  # characters: a message may quote a file of any length
MAX_QUOTE = 200  # characters of a quotation in a message
_START, _OR, _END = "\ue000", "\ue001", "\ue002"  # around both names of an option; characters without a meaning
_PLAIN = {"\n", "\t", _START, _OR, _END}


def option(name: str, value: object = None) -> str:
    """An option in a message, which the command line calls `--batch-tokens` or `--batch-tokens 512`, and Python
    `batch_tokens` or `batch_tokens=512`. `value=True` is a switch: `--resume`, `resume=True`."""
    flag = "--" + name.replace("_", "-")
    if value is not None and value is not True:
        flag += f" {shlex.quote(str(value))}"
    return f"{_START}{flag}{_OR}{name if value is None else f'{name}={value!r}'}{_END}"


def for_command_line(message: object) -> str:
    """A text, or the message of an error, with options as flags."""
    return _rendered(message, 0)


def for_python(message: object) -> str:
    """A text, or the message of an error, with options as arguments."""
    return _rendered(message, 1)


def _rendered(message: object, which: int) -> str:
    text, *rest = (message.message if isinstance(message, _Message) else str(message)).split(_START)
    for part in rest:
        names, _, after = part.partition(_END)
        text += names.split(_OR)[which if _OR in names else 0] + after
    return text


class _Message(Exception):
    """What errors and warnings have in common: a message that may name options."""

    limit = MAX_MESSAGE

    def __init__(self, message: object = ""):
        self.message = printable(str(message), self.limit)  # quote this in another message
        super().__init__(for_python(self.message))


class HandgradError(_Message, ValueError):
    """States what was given, what is expected and what to do."""

    silent = False  # True: another rank prints the same error


class NonFiniteError(HandgradError):
    """A weight, activation or loss is NaN or infinite."""


class LimitError(HandgradError):
    """A sandboxed program exceeded its time or memory limit; it would do so again for any input."""


class HandgradWarning(_Message, UserWarning):
    """Something that works, and that is probably not what was meant. The command line prints it as one line."""


class OutOfMemoryError(HandgradError):
    """More memory is needed than there is."""


class MissingError(HandgradError):
    """A required file does not exist."""


def printable(text: str, limit: int = MAX_QUOTE) -> str:
    """Shorten text to `limit` characters and escape control characters and unpaired surrogates for the terminal."""
    if len(text) > limit:
        first, last = text[: limit - limit // 4 - 1], text[-(limit // 4) :]
        first = first[: first.rfind(_START)] if first.rfind(_START) > first.rfind(_END) else first  # not half an option
        last = last[last.find(_END) + 1 :] if _END in last.partition(_START)[0] else last
        text = f"{first}…{last}"
    return "".join(c if c.isprintable() or c in _PLAIN else repr(c)[1:-1] for c in text)


def shown(value: object, limit: int = 60) -> str:
    """Format a value as JSON for a message, shortened to `limit` characters."""
    if isinstance(value, str) and len(value) > limit:
        value = value[:limit] + "…"
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError, TypeError):
        text = f"a {type(value).__name__}"
    return printable(text if len(text) <= limit else f"{text[: limit - 3]}…")


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn errors of the `tokenizers` library into HandgradError. A panic in its Rust code raises PanicException, which
    is not a subclass of Exception."""
    try:
        yield
    except HandgradError:
        raise
    except BaseException as reason:
        if not isinstance(reason, Exception) and type(reason).__name__ != "PanicException":
            raise
        raise HandgradError(f"{what}: {printable((str(reason).splitlines() or ['no reason given'])[0])}") from None


@contextmanager
def without_panic_report() -> Iterator[None]:
    """Keep what Rust prints at a panic from standard error: `library_errors` makes one line of it. Not while other threads
    run, whose output would be lost as well."""
    if threading.active_count() > 1:
        yield
        return
    try:
        kept = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)

"""Errors caused by user input. The command line prints them as one line and exits with status 1."""

import json

MAX_MESSAGE = 1000  # characters: a message may quote a file of any length
MAX_QUOTE = 200  # characters of a quotation in a message


class HandgradError(ValueError):
    """States what was given, what is expected and what to do."""

    silent = False  # True: another rank prints the same error

    def __init__(self, message: object = ""):
        super().__init__(printable(str(message), MAX_MESSAGE))


class NonFiniteError(HandgradError):
    """A weight, activation or loss is NaN or infinite."""


class LimitError(HandgradError):
    """A sandboxed program exceeded its time or memory limit; it would do so again for any input."""


class HandgradWarning(UserWarning):
    """Something that works, and that is probably not what was meant. The command line prints it as one line."""


class OutOfMemoryError(HandgradError):
    """More memory is needed than there is."""


class MissingError(HandgradError):
    """A required file does not exist."""


def printable(text: str, limit: int = MAX_QUOTE) -> str:
    """Shorten text to `limit` characters and escape control characters and unpaired surrogates for the terminal."""
    if len(text) > limit:
        text = f"{text[: limit - limit // 4 - 1]}…{text[-(limit // 4) :]}"
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def shown(value: object, limit: int = 60) -> str:
    """Format a value as JSON for a message, shortened to `limit` characters."""
    if isinstance(value, str) and len(value) > limit:
        value = value[:limit] + "…"
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError, TypeError):
        text = f"a {type(value).__name__}"
    return printable(text if len(text) <= limit else f"{text[: limit - 3]}…")

"""Mistakes a user can make. The command line prints such an error as one line and exits with status 1."""

import json

LONGEST = 1000  # characters of a message: what is quoted from a file can be of any length
QUOTED = 200  # characters of what a message quotes


class HandgradError(ValueError):
    """What was given, what was expected, what to do."""

    silent = False  # another process of the group prints the same error

    def __init__(self, message: object = ""):
        super().__init__(printable(str(message), LONGEST))


class NonFiniteError(HandgradError):
    """A weight, activation or loss is NaN or infinite."""


class LimitError(HandgradError):
    """A foreign program took more time or memory than it may have: whatever it is given next, it will again."""


class MissingError(HandgradError):
    """A file that is needed does not exist."""


def printable(text: str, limit: int = QUOTED) -> str:
    """The text, cut to `limit` characters, with control characters and lone surrogates escaped: fit for any terminal."""
    if len(text) > limit:
        text = f"{text[: limit - limit // 4 - 1]}…{text[-(limit // 4) :]}"
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def shown(value: object, limit: int = 60) -> str:
    """A value as it stands in JSON, cut to what a message needs."""
    if isinstance(value, str) and len(value) > limit:
        value = value[:limit] + "…"
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError, TypeError):
        text = f"a {type(value).__name__}"
    return printable(text if len(text) <= limit else f"{text[: limit - 3]}…")

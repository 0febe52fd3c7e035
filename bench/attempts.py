"""Calls to contenders that may fail: one that does leaves the case with its reason, and the others go on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from handgrad.errors import HandgradError

from .row import MISSING, Row

T = TypeVar("T")
LONGEST = 300  # characters of a reason


class MissingError(Exception):
    """Something optional that a contender needs is not installed."""


class WrongError(HandgradError):
    """A contender's loss or gradient is not that of the reference."""


class Attempts:
    """Calls the contenders of one case and remembers the problems of those that failed."""

    def __init__(
        self, problems: dict[str, str] | None = None, tell: Callable[[str, float], None] = lambda name, done: None
    ):
        self.problems = dict(problems or {})  # by contender; of an earlier process that one of them ended
        self.tell = tell  # is told the contender before each call, and the share of the case that is done
        self.done = 0.0

    def __call__(self, name: str, call: Callable[[], T]) -> T | None:
        """What the call returns; None if it fails, or if this contender has failed before."""
        if name in self.problems:
            return None
        self.tell(name, self.done)
        try:
            return call()
        except Exception as reason:  # whatever it is, the other contenders go on
            self.problems[name] = problem(reason)
        return None

    def collect(self, calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """What the calls of all contenders return, without those that fail."""
        found = {name: self(name, call) for name, call in calls.items()}
        return {name: result for name, result in found.items() if result is not None}

    def competing(self, names: Iterable[str]) -> list[str]:
        """Those that have not failed."""
        return [name for name in names if name not in self.problems]

    def rounds(self, count: int) -> Iterator[int]:
        """0 … count − 1, as progress."""
        for i in range(count):
            self.done = i / count
            yield i


def problem(reason: Exception) -> str:
    """The kind of a problem and its message in one line."""
    lines = str(reason).strip().splitlines() or [""]
    text = lines[0][:LONGEST]
    if isinstance(reason, MissingError) or _is_missing_module(reason, text):
        return f"{MISSING}: {text}"
    if isinstance(reason, WrongError):
        return f"wrong: {text}"
    return f"failed: {text}" if isinstance(reason, HandgradError) else f"failed: {type(reason).__name__}: {text}"


def fill_in(row: Row, call: Callable[[], object]) -> None:
    """Fill in further figures of a row. If that fails, those it has stay, with the problem."""
    try:
        call()
    except Exception as reason:
        row.problem = row.problem or problem(reason)


def _is_missing_module(reason: Exception, text: str) -> bool:
    """Whether a package is not installed, here or in a process whose last line `text` is; handgrad's modules always are."""
    absent = isinstance(reason, ModuleNotFoundError) or "ModuleNotFoundError: " in text
    return absent and "named 'handgrad" not in text

"""Remember which exercises were solved: one small JSON file in the user's data folder.

The page and the command line share it. Every change reads, changes and replaces the file while holding a lock, so
that two of them at once lose nothing. A file that cannot be read is kept under another name, and a new one begun.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import HandgradError, MissingError
from ..files.atomic import locked, write_text
from ..files.reading import read_json
from .course import COURSE
from .exercise import Exercise
from .grading import MAX_CODE, Grade

MAX_BYTES = 4_000_000
EXACT_AFTER = 2  # hints


@dataclass(frozen=True)
class Entry:
    """What is known of one exercise."""

    attempts: int = 0  # answers that were judged
    solved: str = ""  # when it was first right; "" if not yet
    hints: int = 0  # how many were shown
    solution: bool = False  # whether it was shown
    code: str = ""  # the last answer that was judged
    answer: str = ""  # SHA-256 of the newest right answer

    @property
    def told_exactly(self) -> bool:
        """Whether a mistake is named with its term; before that, only its kind is."""
        return self.hints >= EXACT_AFTER


def data_folder() -> Path:
    """$HANDGRAD_DATA, or `handgrad` in the user's data folder."""
    if given := os.environ.get("HANDGRAD_DATA"):
        return Path(given)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "handgrad"


class Progress:
    """The file. `damaged` is where an unreadable one was put, if there was one."""

    def __init__(self, path: Path | None = None):
        self.path = path or data_folder() / "learn.json"
        self.damaged: Path | None = None

    def read(self) -> dict[str, Entry]:
        """An entry for every exercise of the course."""
        try:
            stored = read_json(self.path, MAX_BYTES).get("exercises")
        except HandgradError:
            stored = None
        known = stored if isinstance(stored, dict) else {}
        return {name: _entry(known.get(name)) for name in COURSE}

    def judged(self, exercise: Exercise, code: str, grade: Grade) -> Entry:
        """Count an answer that was judged. One that is not finished is stored, but not counted."""

        def change(old: Entry) -> dict[str, Any]:
            solved = old.solved or (datetime.now(UTC).isoformat(timespec="seconds") if grade.passed else "")
            attempts = old.attempts + (not grade.unfinished)
            answer = hashlib.sha256(code.encode()).hexdigest() if grade.passed else old.answer
            kept = code if len(code) <= MAX_CODE else old.code
            return {"attempts": attempts, "solved": solved, "code": kept, "answer": answer}

        return self._change(exercise, change)

    def hint_shown(self, exercise: Exercise) -> Entry:
        return self._change(exercise, lambda old: {"hints": min(old.hints + 1, len(exercise.hints))})

    def solution_shown(self, exercise: Exercise) -> Entry:
        return self._change(exercise, lambda old: {"solution": True})

    def _change(self, exercise: Exercise, change: Callable[[Entry], dict[str, Any]]) -> Entry:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.parent):
            stored = self._stored()
            exercises = stored["exercises"]
            old = _entry(exercises.get(exercise.name))
            new = Entry(**{**asdict(old), **change(old)})
            exercises[exercise.name] = asdict(new)
            write_text(self.path, json.dumps(stored, ensure_ascii=False, indent=1) + "\n")
        return new

    def _stored(self) -> dict[str, Any]:
        """The content of the file with whatever a newer version wrote there; an unreadable file is put aside."""
        try:
            stored = read_json(self.path, MAX_BYTES)
        except MissingError:
            return {"format": 1, "exercises": {}}
        except HandgradError:
            stored = {}
        if not isinstance(stored.get("exercises"), dict):
            number = next(i for i in range(1, 10_000) if not _aside(self.path, i).exists())
            self.damaged = _aside(self.path, number)
            os.rename(self.path, self.damaged)
            return {"format": 1, "exercises": {}}
        return stored


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-damaged-{number}{path.suffix}")


def _entry(stored: Any) -> Entry:
    """An entry from whatever the file holds: values of a wrong type are left out."""
    known = stored if isinstance(stored, dict) else {}
    defaults = Entry()
    kept = {
        f.name: known[f.name]
        for f in fields(Entry)
        if f.name in known and type(known[f.name]) is type(getattr(defaults, f.name))
    }
    return Entry(**kept)

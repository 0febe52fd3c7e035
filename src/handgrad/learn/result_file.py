"""The result of a student as a file that a teacher collects: `handgrad learn --export`, and *Save the result* on the page.

    {"format": "handgrad learn", "version": 1, "student": "Ada", "written": "2026-01-31T10:00:00+00:00",
     "exercises": [{"name": "softmax", "solved": "2026-…", "attempts": 3, "hints": 2, "solution": false, "answer": "…"}],
     "numbers": [the same for each number computed by hand], "sha256": "…"}

`solved` is a time or "", `answer` the SHA-256 of the answer: of the file, for code. `sha256` is that of everything else, as
`canonical` writes it; assets/result_file.js writes the same. It shows that a file was changed, unless its hash was too: it
is no signature, for a student's machine can keep no secret from the student.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import HandgradError, option
from ..files.reading import read_json
from .course import COURSE
from .progress import Entry

FORMAT, VERSION = "handgrad learn", 1
MAX_BYTES = 1_000_000
MAX_NAME = 200  # characters
MAX_ITEMS = 1000
MAX_COUNT = 1_000_000
FIELDS = {
    "format": str,
    "version": int,
    "student": str,
    "written": str,
    "exercises": list,
    "numbers": list,
    "sha256": str,
}


@dataclass(frozen=True)
class Item:
    """What a student did with one exercise, or with one number to compute by hand."""

    name: str
    solved: str = ""  # when it was first right; "" if not yet
    attempts: int = 0
    hints: int = 0
    solution: bool = False  # whether it was shown
    answer: str = ""  # SHA-256 of the right answer, else of the last one


@dataclass(frozen=True)
class Result:
    """A result file, checked."""

    student: str
    written: str
    exercises: tuple[Item, ...]
    numbers: tuple[Item, ...]
    sha256: str

    def exercise(self, name: str) -> Item:
        return next((item for item in self.exercises if item.name == name), Item(name))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def canonical(content: Mapping[str, Any]) -> str:
    """JSON with sorted names and without spaces: equal contents are equal texts, in JavaScript too."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def result_text(student: str, progress: Mapping[str, Entry]) -> str:
    """The file of a student who worked in the terminal."""
    if len(student) > MAX_NAME:
        raise HandgradError(f"the name has {len(student):,} characters; the limit is {MAX_NAME}")
    content: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "student": student, "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "exercises": [asdict(_item(name, entry)) for name, entry in progress.items()], "numbers": [],
    }  # fmt: skip
    return json.dumps({**content, "sha256": digest(canonical(content))}, ensure_ascii=False, indent=1) + "\n"


def _item(name: str, e: Entry) -> Item:
    return Item(name, e.solved, e.attempts, e.hints, e.solution, e.answer or (digest(e.code) if e.code else ""))


def read_result(path: Path) -> Result:
    """Read and check a file. Raises HandgradError with the reason why it does not count."""
    stored = read_json(path, MAX_BYTES)
    if stored.get("format") != FORMAT:
        own = stored.get("format") == 1 and isinstance(stored.get("exercises"), dict)
        hint = f": it is handgrad's own record, so write one with handgrad learn {option('export')}" if own else ""
        raise HandgradError(f"is not a result of handgrad learn{hint}")
    if stored.get("version") != VERSION:
        raise HandgradError(f"is a result of another version of handgrad, {str(stored.get('version'))[:20]}")
    given = {key: type(value) for key, value in stored.items()}
    if given != FIELDS or len(stored["student"]) > MAX_NAME:
        raise HandgradError("is damaged: its fields are not those of a result")
    content = {key: value for key, value in stored.items() if key != "sha256"}
    if digest(canonical(content)) != stored["sha256"]:
        raise HandgradError("was changed after it was written: its content does not have its hash")
    exercises, numbers = _items(stored["exercises"]), _items(stored["numbers"])
    unknown = [item.name for item in exercises if item.name not in COURSE]
    if unknown:
        raise HandgradError(f"has an exercise that this version does not know: {unknown[0]!r}")
    _time(stored["written"])
    return Result(stored["student"], stored["written"], exercises, numbers, stored["sha256"])


def _items(stored: list[Any]) -> tuple[Item, ...]:
    wanted = {name: type(value) for name, value in asdict(Item("")).items()}
    if len(stored) > MAX_ITEMS:
        raise HandgradError(f"is damaged: it has {len(stored):,} entries; the limit is {MAX_ITEMS:,}")
    found: dict[str, Item] = {}
    for one in stored:
        if not isinstance(one, dict) or {key: type(value) for key, value in one.items()} != wanted:
            raise HandgradError("is damaged: the fields of an exercise are not those of a result")
        item = Item(**one)
        counts = item.attempts, item.hints
        if item.name in found or not 0 < len(item.name) <= MAX_NAME or not all(0 <= x <= MAX_COUNT for x in counts):
            raise HandgradError("is damaged: an exercise is there twice, or has a count that is not possible")
        if item.solved:
            _time(item.solved)
        if item.solved and not (item.attempts and item.answer):
            raise HandgradError(f"contradicts itself: {item.name!r} is solved without an answer")
        found[item.name] = item
    return tuple(found.values())


def _time(text: str) -> None:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise HandgradError(f"is damaged: {text[:40]!r} is not a time") from None

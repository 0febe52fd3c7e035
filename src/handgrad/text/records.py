"""Files of examples → one record for each example: what a line, a row or an item of a list holds, under our names.

.jsonl and .json hold objects, one on a line or all in one list; .csv, .tsv and .parquet hold rows; a .txt file is one text.
A record of another tool's is turned into ours:

    {"instruction": "…", "input": "…", "output": "…"}                      Alpaca
    {"conversations": [{"from": "human", "value": "…"}, …]}               ShareGPT

What cannot be read takes the place of its record, as a HandgradError, and reading goes on behind it.
"""

import csv
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import HandgradError, printable, shown
from ..files.reading import BLANKS, MB, open_regular, parse_json, parse_next
from ..formatting import plural
from . import corpus

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
MARK = b"\xef\xbb\xbf"  # some editors put it before UTF-8 text
WHOLE = 2000 * MB  # of a file that is one JSON list or one text
NAMES = ("messages", "prompt", "completion", "text", "instruction", "input", "output", "conversations", "system")
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


_BLANKS = re.compile(f"[{BLANKS}]*")


class Place(NamedTuple):
    """Where something was read; lines are counted from 1."""

    file: Path
    line: int

    def mistake(self, what: object) -> HandgradError:
        return HandgradError(f"{self.file}, line {self.line}: {what}")


Read = tuple[Place, Any]  # a record, or the HandgradError that says why there is none


def find(sources: Iterable[str]) -> list[Path]:
    """Files, folders, patterns, and "-" for standard input → the files; of a folder, those that may hold examples."""
    files: list[Path] = []
    for source in sources:
        found = corpus.find([str(corpus.from_stdin()) if source == "-" else source])
        if Path(source).expanduser().is_dir():
            found = [file for file in found if file.suffix in SUFFIXES]
            if not found:
                raise HandgradError(f"the folder {source} holds no file called {', '.join(f'*{s}' for s in SUFFIXES)}")
        files += found
    return list(dict.fromkeys(files))


def records(files: Iterable[Path], progress: Callable[[int], None] = lambda count: None) -> Iterator[Read]:
    """What the files hold, in order. `progress` is told how many bytes were read."""
    for file in files:
        if file.suffix == ".parquet":
            yield from _parquet(file, progress)
        elif file.suffix in (".csv", ".tsv"):
            yield from _rows(file, progress)
        else:
            with open_regular(file) as opened:
                begin = opened.read(1 << 16).removeprefix(MARK).lstrip()[:1]
            if begin == b"[" and file.suffix != ".jsonl":
                yield from _items(file, _whole(file, progress))
            elif file.suffix == ".txt" and begin != b"{":
                yield Place(file, 1), {"text": _whole(file, progress)}
            else:
                yield from _lines(file, progress)


def _lines(file: Path, progress: Callable[[int], None]) -> Iterator[Read]:
    for number, raw in corpus.lines_of(file):
        place = Place(file, number)
        try:
            line = _decoded(raw, file, number)
            if line.strip():
                yield place, _parsed(line.rstrip(), place)
        except HandgradError as mistake:
            yield place, mistake
        progress(len(raw or b""))


def _parsed(line: str, place: Place) -> Any:
    try:
        return parse_json(line, f"{place.file}, line {place.line}")
    except HandgradError as mistake:
        if place.file.suffix in (".jsonl", ".json"):
            raise
        raise HandgradError(f"{mistake}; leave out what is not, as in --data 'folder/*.jsonl'") from None


def _whole(file: Path, progress: Callable[[int], None]) -> str:
    with open_regular(file) as opened:
        raw = opened.read(WHOLE + 1)
    if len(raw) > WHOLE:
        raise HandgradError(f"{file} is larger than {WHOLE // MB:,} MB: divide it, or write one example on each line")
    progress(len(raw))
    return _decoded(raw, file, 1)


def _items(file: Path, text: str) -> Iterator[Read]:
    """One after the other, so that the text of the list is in memory, and not all it stands for."""
    at, line, counted = text.index("[") + 1, 1, 0

    def here() -> Place:
        nonlocal line, counted
        line, counted = line + text.count("\n", counted, at), at
        return Place(file, line)

    at = _after_blanks(text, at)
    while text[at : at + 1] != "]":
        place = here()
        value, at = parse_next(text, at, f"{file}, the item of line {place.line}")
        yield place, value
        at = _after_blanks(text, at)
        if text[at : at + 1] == ",":
            at = _after_blanks(text, at + 1)
            if text[at : at + 1] == "]":
                raise here().mistake("an item has to follow the last comma of the list")
        elif text[at : at + 1] != "]":
            raise here().mistake("the list needs , or ] here")
    at = _after_blanks(text, at + 1)
    if at < len(text):
        raise here().mistake("something follows the list")


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()


def _decoded(raw: bytes | None, file: Path, line: int) -> str:
    if raw is None:
        raise HandgradError(f"{file}, line {line} {corpus.TOO_LONG}")
    try:
        return (raw.removeprefix(MARK) if line == 1 else raw).decode()
    except UnicodeDecodeError as reason:
        line += reason.object.count(b"\n", 0, reason.start)
        raise HandgradError(f"{file}, line {line} is not UTF-8 text: convert it") from None


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rows(file: Path, progress: Callable[[int], None]) -> Iterator[Read]:
    """The first row names the fields. Cells are divided by the comma, semicolon or tab that is most frequent in it."""

    def lines() -> Iterator[str]:
        for number, raw in corpus.lines_of(file):
            yield _decoded(raw, file, number)
            progress(len(raw or b""))

    first = next(lines(), "")
    csv.field_size_limit(corpus.LONGEST_LINE)
    rows = csv.reader(lines(), delimiter=max(",;\t", key=first.count), strict=True)
    names: list[str] | None = None
    while True:
        place = Place(file, rows.line_num + 1)
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as reason:
            yield place, place.mistake(f"is no row of a table: {printable(str(reason))}")
            continue
        if names is None:
            names = [name.strip() for name in cells]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise place.mistake(f"two columns are called {shown(twice)}: rename one of them")
        elif cells and len(cells) != len(names):
            yield place, place.mistake(f"it has {plural(len(cells), 'cell')}, and the first row {len(names)}")
        elif cells:
            yield place, dict(zip(names, cells, strict=True))


def _parquet(file: Path, progress: Callable[[int], None]) -> Iterator[Read]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise HandgradError(
            f"reading {file} needs the package pyarrow: pip install pyarrow, or write the file as .jsonl"
        ) from None
    with open_regular(file) as opened:
        try:
            table = parquet.ParquetFile(opened)
            number = 0
            for batch in table.iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    number += 1
                    yield Place(file, number), record
        except (ValueError, OSError, RuntimeError) as reason:  # pyarrow's errors are of these kinds
            if isinstance(reason, HandgradError):
                raise
            raise HandgradError(f"{file} is not a parquet file: {printable(str(reason))}") from None
    progress(file.stat().st_size)


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def field_names(given: Iterable[str]) -> dict[str, str]:
    """prompt=question, … → {"prompt": "question", …}: our name, and the data's."""
    names: dict[str, str] = {}
    for pair in given:
        ours, equals, theirs = pair.partition("=")
        if not equals or not theirs or ours not in NAMES:
            raise HandgradError(
                f"--field {pair}: give a name of ours and the data's, as prompt=question; ours are {', '.join(NAMES)}"
            )
        if ours in names:
            raise HandgradError(f"--field {pair}: {ours} is {names[ours]} already")
        names[ours] = theirs
    return names


def renamed(place: Place, record: Any, names: dict[str, str]) -> Any:
    """The record under our names. If names are given, it has no other fields."""
    if not names or not isinstance(record, dict):
        return record
    missing = [theirs for theirs in names.values() if theirs not in record]
    if missing:
        raise place.mistake(f"it has no {missing[0]!r} (--field): it has {', '.join(record) or 'nothing'}")
    return {ours: record[theirs] for ours, theirs in names.items()}


def ours(place: Place, record: dict[str, Any], chat: bool) -> dict[str, Any]:
    """Alpaca's and ShareGPT's records as messages, or, without a chat template, as prompt and completion."""
    has = {name for name, value in record.items() if value is not None}
    if "conversations" in has and not has & {"messages", "prompt", "completion"}:
        return {"messages": [*_system(record), *_turns(place, record["conversations"])]}
    if has >= {"instruction", "output"} and not has & {"messages", "prompt", "completion"}:
        for name in ("instruction", "input", "output"):
            if not isinstance(record.get(name) or "", str):
                raise place.mistake(f"{name} is {shown(record[name])}, not a string")
        asked = "\n\n".join(part for part in (record["instruction"], record.get("input")) if part)
        if not chat:
            return {"prompt": f"{asked}\n\n", "completion": record["output"]}
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": record["output"]}]
        return {"messages": [*_system(record), *turns]}
    return record


def _system(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def _turns(place: Place, turns: Any) -> list[Any]:
    if not isinstance(turns, list):
        raise place.mistake(f"conversations is {shown(turns)}, not a list")
    messages = []
    for i, turn in enumerate(turns, 1):
        if isinstance(turn, dict) and "from" in turn and "value" in turn:
            role = ROLES.get(str(turn["from"]))
            if role is None:
                raise place.mistake(f"turn {i} is from {shown(turn['from'])}: it can be {', '.join(ROLES)}")
            turn = {"role": role, "content": turn["value"]}
        messages.append(turn)
    return messages

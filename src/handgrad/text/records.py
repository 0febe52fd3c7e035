"""Read the records of fine-tuning files: one per line, table row or list item.

.jsonl and .json contain objects, one per line or all in one list; .csv, .tsv and .parquet contain rows; a .txt file is one
text. Records of other tools are converted:

    {"instruction": "…", "input": "…", "output": "…"}                      Alpaca
    {"conversations": [{"from": "human", "value": "…"}, …]}               ShareGPT

A record that cannot be read is yielded as a HandgradError, and reading continues with the next one.
"""

import csv
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import HandgradError, option, printable, shown
from ..files.reading import MB, WHITESPACE, check_regular, open_regular, parse_json, parse_next, read_at_most
from ..formatting import plural
from ..sandbox import client, worker
from . import corpus

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it before UTF-8 text
MAX_FILE = 2000 * MB  # bytes of a file that is one JSON list or one text
FIELDS = ("messages", "prompt", "completion", "text", "instruction", "input", "output", "conversations", "system")
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip

_WHITESPACE = re.compile(f"[{WHITESPACE}]*")


class Location(NamedTuple):
    """The file and line of a record; lines are counted from 1, rows of .parquet too."""

    file: Path
    line: int

    def error(self, message: str) -> HandgradError:
        return HandgradError(f"{self.file}, line {self.line}: {message}")


Entry = tuple[Location, Any]  # a record, or the HandgradError that says why it cannot be read


def find(sources: Iterable[str]) -> list[Path]:
    """List the files that the given files, folders and patterns name; "-" is standard input. Of a folder, those with one of
    SUFFIXES."""
    files: list[Path] = []
    for source in sources:
        found = corpus.find([str(corpus.from_stdin()) if source == "-" else source])
        if Path(source).expanduser().is_dir():
            found = [file for file in found if file.suffix in SUFFIXES]
            if not found:
                raise HandgradError(
                    f"the folder {source} contains no file named {', '.join(f'*{s}' for s in SUFFIXES)}"
                )
        files += found
    return list(dict.fromkeys(files))


def records(files: Iterable[Path], progress: Callable[[int], None] = lambda count: None) -> Iterator[Entry]:
    """Yield the records of the files in order. `progress` gets the number of bytes read."""
    for file in files:
        if file.suffix == ".parquet":
            yield from _parquet(file, progress)
        elif file.suffix in (".csv", ".tsv"):
            yield from _rows(file, progress)
        else:
            with open_regular(file) as opened:
                first = opened.read(1 << 16).removeprefix(BYTE_ORDER_MARK).lstrip()[:1]
            if first == b"[" and file.suffix != ".jsonl":
                yield from _items(file, _read_all(file, progress))
            elif file.suffix == ".txt" and first != b"{":
                yield Location(file, 1), {"text": _read_all(file, progress)}
            else:
                yield from _lines(file, progress)


def _lines(file: Path, progress: Callable[[int], None]) -> Iterator[Entry]:
    for number, raw in corpus.read_lines(file):
        location = Location(file, number)
        try:
            line = _decode(raw, file, number)
            if line.strip():
                yield location, _parse(line.rstrip(), location)
        except HandgradError as error:
            yield location, error
        progress(len(raw or b""))


def _parse(line: str, location: Location) -> Any:
    try:
        return parse_json(line, f"{location.file}, line {location.line}")
    except HandgradError as error:
        if location.file.suffix in (".jsonl", ".json"):
            raise
        raise HandgradError(
            f"{error.message}; exclude other files by a pattern, as in {option('data', 'folder/*.jsonl')}"
        ) from None


def _read_all(file: Path, progress: Callable[[int], None]) -> str:
    with open_regular(file) as opened:
        raw = read_at_most(opened, MAX_FILE + 1)
    if len(raw) > MAX_FILE:
        raise HandgradError(f"{file} is larger than {MAX_FILE // MB:,} MB: split it, or write one example per line")
    progress(len(raw))
    return _decode(raw, file, 1)


def _items(file: Path, text: str) -> Iterator[Entry]:
    """Yield the items of a JSON list, parsed one at a time to save memory."""
    at, line, counted = text.index("[") + 1, 1, 0  # position, its line, position up to which lines are counted

    def here() -> Location:
        nonlocal line, counted
        line, counted = line + text.count("\n", counted, at), at
        return Location(file, line)

    at = _skip_whitespace(text, at)
    while text[at : at + 1] != "]":
        location = here()
        value, at = parse_next(text, at, f"{file}, the item on line {location.line}")
        yield location, value
        at = _skip_whitespace(text, at)
        if text[at : at + 1] == ",":
            at = _skip_whitespace(text, at + 1)
            if text[at : at + 1] == "]":
                raise here().error("the list ends with a comma: an item must follow it")
        elif text[at : at + 1] != "]":
            raise here().error("expected , or ] after an item of the list")
    at = _skip_whitespace(text, at + 1)
    if at < len(text):
        raise here().error("unexpected text after the list")


def _skip_whitespace(text: str, at: int) -> int:
    found = _WHITESPACE.match(text, at)
    assert found is not None
    return found.end()


def _decode(raw: bytes | None, file: Path, line: int) -> str:
    if raw is None:
        raise HandgradError(f"{file}, line {line} {corpus.TOO_LONG}")
    try:
        return (raw.removeprefix(BYTE_ORDER_MARK) if line == 1 else raw).decode()
    except UnicodeDecodeError as reason:
        line += reason.object.count(b"\n", 0, reason.start)
        raise HandgradError(f"{file}, line {line} is not UTF-8 text: convert it") from None


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rows(file: Path, progress: Callable[[int], None]) -> Iterator[Entry]:
    """Yield the rows of .csv or .tsv. The first row names the fields; the separator is the most frequent in it of comma,
    semicolon and tab."""

    def lines() -> Iterator[str]:
        for number, raw in corpus.read_lines(file):
            yield _decode(raw, file, number)
            progress(len(raw or b""))

    first = next(lines(), "")
    csv.field_size_limit(corpus.MAX_LINE)
    rows = csv.reader(lines(), delimiter=max(",;\t", key=first.count), strict=True)
    names: list[str] | None = None
    while True:
        location = Location(file, rows.line_num + 1)
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as reason:
            yield location, location.error(f"not a valid table row: {printable(str(reason))}")
            continue
        if names is None:
            names = [name.strip() for name in cells]
            counts = Counter(names)
            duplicate = next((name for name in names if counts[name] > 1), None)
            if duplicate is not None:
                raise location.error(f"two columns are named {shown(duplicate)}: rename one of them")
        elif cells and len(cells) != len(names):
            yield location, location.error(f"the row has {plural(len(cells), 'cell')}, the first row has {len(names)}")
        elif cells:
            yield location, dict(zip(names, cells, strict=True))


def _parquet(file: Path, progress: Callable[[int], None]) -> Iterator[Entry]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise HandgradError(
            f"reading {file} needs the package pyarrow: pip install pyarrow, or write the file as .jsonl"
        ) from None
    check_regular(file)
    # A few bytes can describe a cell of gigabytes. So the file is decoded in the sandbox first, and then row by row.
    found = client.call("scan", str(file), file.stat().st_size, file=str(file.absolute()))
    if "error" in found:
        raise HandgradError(f"{file} is not a parquet file: {printable(found['error'])}")
    with open_regular(file) as opened:
        try:
            table = parquet.ParquetFile(opened, buffer_size=worker.PAGE)
            number = 0
            for batch in table.iter_batches(batch_size=worker.ROWS):
                for i in range(batch.num_rows):
                    number += 1
                    yield Location(file, number), batch.slice(i, 1).to_pylist()[0]
        except (ValueError, OSError, RuntimeError) as reason:  # the base classes of pyarrow's errors
            if isinstance(reason, HandgradError):
                raise
            raise HandgradError(f"{file} is not a parquet file: {printable(str(reason))}") from None
    progress(file.stat().st_size)


# ── fields ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def field_names(given: Iterable[str]) -> dict[str, str]:
    """Parse --field options: prompt=question, … → {"prompt": "question", …}, a known field and its name in the data."""
    names: dict[str, str] = {}
    for pair in given:
        field, equals, column = pair.partition("=")
        if not equals or not column or field not in FIELDS:
            raise HandgradError(
                f"{option('field', pair)}: give a known field and its name in the data, as prompt=question; known are"
                f" {', '.join(FIELDS)}"
            )
        if field in names:
            raise HandgradError(f"{option('field', pair)}: {field} is already mapped to {names[field]}")
        names[field] = column
    return names


def rename_fields(location: Location, record: Any, names: dict[str, str]) -> Any:
    """The record with only the fields in `names`, under their known names; unchanged if `names` is empty."""
    if not names or not isinstance(record, dict):
        return record
    missing = [column for column in names.values() if column not in record]
    if missing:
        raise location.error(
            f"the field {missing[0]!r} ({option('field')}) is missing; the record has"
            f" {', '.join(record) or 'no fields'}"
        )
    return {field: record[column] for field, column in names.items()}


def convert(location: Location, record: dict[str, Any], chat: bool) -> dict[str, Any]:
    """Convert Alpaca and ShareGPT records to messages, or Alpaca to prompt and completion if `chat` is False. Other records
    are returned unchanged."""
    has = {name for name, value in record.items() if value is not None}
    if "conversations" in has and not has & {"messages", "prompt", "completion"}:
        return {"messages": [*system_message(record), *_turns(location, record["conversations"])]}
    if has >= {"instruction", "output"} and not has & {"messages", "prompt", "completion"}:
        for name in ("instruction", "input", "output"):
            if not isinstance(record.get(name) or "", str):
                raise location.error(f"{name} is {shown(record[name])}, not a string")
        instruction = "\n\n".join(part for part in (record["instruction"], record.get("input")) if part)
        if not chat:
            return {"prompt": f"{instruction}\n\n", "completion": record["output"]}
        turns = [{"role": "user", "content": instruction}, {"role": "assistant", "content": record["output"]}]
        return {"messages": [*system_message(record), *turns]}
    return record


def system_message(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The system prompt of a record as a message, if it has one."""
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def _turns(location: Location, turns: Any) -> list[Any]:
    if not isinstance(turns, list):
        raise location.error(f"conversations is {shown(turns)}, not a list")
    messages = []
    for i, turn in enumerate(turns, 1):
        if isinstance(turn, dict) and "from" in turn and "value" in turn:
            role = ROLES.get(str(turn["from"]))
            if role is None:
                raise location.error(f"turn {i} is from {shown(turn['from'])}; allowed: {', '.join(ROLES)}")
            turn = {"role": role, "content": turn["value"]}
        messages.append(turn)
    return messages

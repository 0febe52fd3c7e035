"""The results of a class: read from a folder, and shown as a page without scripts."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..errors import HandgradError, for_command_line, printable
from ..formatting import plural
from ..web.document import document
from .course import COURSE
from .result_file import Item, Result, read_result

MAX_FILES = 2000
MAX_NAME = 4096  # characters of a path, none of which is left out
CANNOT = (
    "A hash shows that a file was changed after it was written. It is no signature: attempts and hints are counted on the"
    " student's own machine, and a program can write a file with any content and the hash that fits. To be sure of an"
    " answer, ask for its file: handgrad learn judges it, and its SHA-256 begins with the eight digits below a ✔."
)
EQUAL = "The same file, character by character. Short answers may be equal by chance."
STYLE = """
body{max-width:1200px}.scroll{overflow-x:auto}.scroll:focus-visible{outline:2px solid currentColor}
th{text-align:left;padding:2px 12px 2px 0;vertical-align:bottom;font-weight:600}caption{text-align:left;color:var(--soft)}
tbody th,td.count{white-space:nowrap}tbody tr{border-top:1px solid var(--line)}td:first-child{color:inherit}
td small{color:var(--soft);display:block}li{overflow-wrap:anywhere}
"""


@dataclass(frozen=True)
class Class:
    """The results that count by their files, the files that do not with the reason, and what a teacher should look at."""

    results: dict[str, Result]
    problems: dict[str, str]
    notes: tuple[str, ...]

    def solved(self, result: Result) -> str:
        return f"{sum(bool(item.solved) for item in result.exercises)} of {len(COURSE)}"

    def numbers(self, result: Result) -> str:
        return (
            f"{sum(bool(item.solved) for item in result.numbers)} of {len(result.numbers)}" if result.numbers else "–"
        )


def collect(folder: Path) -> Class:
    """Read every .json file in a folder and the folders in it."""
    if not folder.is_dir():
        raise HandgradError(f"{folder} is not a folder: put the result files of the class into one")
    files = sorted(path for path in folder.rglob("*.json") if path.is_symlink() or not path.is_dir())
    if not files or len(files) > MAX_FILES:
        raise HandgradError(
            f"{folder} has {plural(len(files), '.json file')}; expected 1 to {MAX_FILES:,} result files"
        )
    results: dict[str, Result] = {}
    problems: dict[str, str] = {}
    first: dict[str, str] = {}  # the file with this content
    for path in files:
        name = printable(path.relative_to(folder).as_posix(), MAX_NAME)  # it may have bytes that are no text
        try:
            if path.is_symlink():
                raise HandgradError("is a link, not a file")
            result = read_result(path)
            if result.sha256 in first:
                raise HandgradError(f"has the same content as {first[result.sha256]}")
            first[result.sha256] = name
            results[name] = result
        except HandgradError as reason:
            where = printable(str(path), MAX_NAME)
            problems[name] = for_command_line(reason).removeprefix(f"{where} ").replace(where, "it")
    return Class(results, problems, tuple(_notes(results)))


def _notes(results: dict[str, Result]) -> Iterator[str]:
    by_student = defaultdict(list)
    for name, result in results.items():
        by_student[result.student].append(name)
    for student, names in by_student.items():
        if len(names) > 1:
            yield f"{len(names)} files of {student or 'students without a name'}: {', '.join(names)}. Each has its own line."
    for exercise in COURSE:
        equal = defaultdict(list)
        for name, result in results.items():
            item = result.exercise(exercise)
            if item.solved and not item.solution:
                equal[item.answer].append(name)
        for names in equal.values():
            if len(names) > 1:
                yield f"The same answer to {exercise}: {', '.join(names)}."


def class_page(found: Class, name: str) -> str:
    """The page: a line for each student, and below it what does not count and why. All texts of files are escaped."""
    title = f"handgrad learn: {name}"
    head = "".join(f'<th scope="col">{escape(exercise)}</th>' for exercise in COURSE)
    rows = "".join(_row(found, file, result) for file, result in sorted(found.results.items(), key=_by_student))
    table = (
        '<div class="scroll" tabindex="0" role="region" aria-label="Results"><table>'
        "<caption>✔ solved, with its attempts, hints (h) and whether the solution was shown (s); … tried.</caption>"
        f'<thead><tr><th scope="col">student</th><th scope="col">solved</th><th scope="col">numbers by hand</th>{head}'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    lead = f"{plural(len(found.results), 'result')}, {plural(len(found.problems), 'file')} that do not count"
    parts = [f"<main><h1>{escape(title)}</h1>", f'<p class="lead">{lead}</p>', table if rows else ""]
    if found.problems:
        parts.append(
            "<h2>Files that do not count</h2>" + _list(f"{name} {why}." for name, why in found.problems.items())
        )
    if found.notes:
        parts.append(f"<h2>To look at</h2>{_list(found.notes)}<p>{escape(EQUAL)}</p>")
    return document(title, f"{''.join(parts)}<h2>What this shows</h2><p>{escape(CANNOT)}</p></main>", STYLE)


def _by_student(one: tuple[str, Result]) -> tuple[str, str]:
    return one[1].student.casefold(), one[0]


def _list(lines: Iterator[str] | tuple[str, ...]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _row(found: Class, file: str, result: Result) -> str:
    who = f'<th scope="row">{escape(result.student or "(no name)")}<br><small>{escape(file)}</small></th>'
    counts = "".join(f'<td class="count">{text}</td>' for text in (found.solved(result), found.numbers(result)))
    return f"<tr>{who}{counts}{''.join(f'<td>{_cell(result.exercise(name))}</td>' for name in COURSE)}</tr>"


def _cell(item: Item) -> str:
    if not (item.attempts or item.hints or item.solution):
        return "–"
    used = f"{item.attempts}{f' · {item.hints} h' if item.hints else ''}{' · s' if item.solution else ''}"
    when = f"<small>{escape(item.solved[:10])}</small><small>{escape(item.answer[:8])}</small>" if item.solved else ""
    return f"{'✔' if item.solved else '…'} {used}{when}"

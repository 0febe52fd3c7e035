"""The course in the terminal: the list of exercises, a judged answer, hints."""

import math
from collections.abc import Iterable, Mapping

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..errors import printable
from ..formatting import number, plural
from ..learn.classroom import Class
from ..learn.course import COURSE
from ..learn.exercise import Exercise
from ..learn.grading import Grade, Part
from ..learn.progress import Entry

FEW = 8  # values of an answer that are all listed; of more, only those that are not right
MARKS = {"right": ("✔", "green"), "wrong": ("✘", "bold red"), "unwritten": ("·", "dim")}


def course(progress: Mapping[str, Entry]) -> list[RenderableType]:
    """The list of exercises with what is solved, and the command for the next one."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for i, (name, exercise) in enumerate(COURSE.items(), 1):
        entry = progress[name]
        mark = Text("✔", style="green") if entry.solved else Text("·", style="dim")
        table.add_row(
            mark, Text(f"{i:>2}"), Text(name, style="bold"), Text(exercise.title), Text(_state(entry), style="dim")
        )
    solved = sum(bool(entry.solved) for entry in progress.values())
    left = [name for name, entry in progress.items() if not entry.solved]
    end = f"Next: handgrad learn {left[0]}" if left else "You have written every backward pass of a transformer."
    return [
        Text("Write the backward pass yourself, from a softmax to a whole block.\n"),
        Padding(table, (0, 0, 0, 2), expand=False),
        Text(f"\n{solved} of {len(COURSE)} solved. {end}"),
    ]


def _state(entry: Entry) -> str:
    words = ["solved"] if entry.solved else []
    words += [plural(entry.attempts, "attempt")] if entry.attempts else []
    words += [plural(entry.hints, "hint")] if entry.hints else []
    return ", ".join([*words, *(["solution seen"] if entry.solution else [])])


def judged(exercise: Exercise, grade: Grade, where: str, exactly: bool = True) -> list[RenderableType]:
    """What the grader found in the answer in the file `where`. Not exactly: without the term that is missing."""
    lines: list[RenderableType] = [Text(f"{exercise.name}: {where}", style="bold")]
    if grade.problem is not None:
        place = "" if grade.problem.line is None else f"line {grade.problem.line}: "
        mark, style = MARKS["unwritten" if grade.unfinished else "wrong"]
        lines.append(Text(f"\n{mark} {place}{grade.problem.message}", style=style))
        if grade.source:
            lines.append(Text(f"    {grade.source}", style="dim"))
    else:
        lines += _parts(grade, exactly)
    if grade.printed:
        lines += [
            Text("\nIt printed:", style="dim"),
            Padding(Text(grade.printed.rstrip("\n")), (0, 0, 0, 4), expand=False),
        ]
    lines += [Text(f"\nNote: {note}.", style="yellow") for note in grade.notes]
    return lines


def _parts(grade: Grade, exactly: bool) -> Iterable[RenderableType]:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "", "against autograd", "against finite differences"):
        table.add_column(name, justify="right" if "against" in name else "left", no_wrap=True)
    many = len(grade.parts) > FEW
    for part in grade.parts:
        if not many or part.state == "wrong":
            mark, style = MARKS[part.state]
            cells = [part.name, _error(part.error), _error(part.difference)]
            if part.state == "unwritten":
                cells = [part.name, "not written yet", ""]
            table.add_row(Text(mark, style=style), *(Text(cell) for cell in cells))
    yield Text()
    if table.row_count:
        yield table
    for state, words in (("right", "right"), ("unwritten", "not written yet")):
        count = sum(part.state == state for part in grade.parts)
        mark, style = MARKS[state]
        if many and count:
            yield Text(f"{mark}  {plural(count, 'gradient')} {words}", style=style)
    if (first := grade.first_wrong) is not None:
        yield from _wrong(grade, first, exactly)
    if any(part.state != "unwritten" for part in grade.parts):
        yield Text(f"\nJudged on {len(grade.cases)} sets of numbers: {'; '.join(grade.cases)}.", style="dim")


def _wrong(grade: Grade, first: Part, exactly: bool) -> Iterable[RenderableType]:
    wrong = [part for part in grade.parts if part.state == "wrong" and part.diagnosis is not None]
    explained = [
        part for part in reversed(wrong) if part is first or (part.diagnosis and part.diagnosis.kind != "other")
    ]
    yield Text()
    for part in explained[:FEW]:
        yield Text.assemble((part.name, "bold"), f" {part.said(exactly)}.{_place(part)}")
    if len(wrong) > len(explained):
        yield Text(f"Begin with {first.name}; the others may be wrong because of it.", style="dim")


def _place(part: Part) -> str:
    if part.place is None or part.yours is None or part.right is None:
        return ""
    where = f"{part.name}[{', '.join(map(str, part.place))}]"
    return f" {where} is {number(part.yours)}, right is {number(part.right)}."


def _error(x: float | None) -> str:
    if x is None:
        return "–"
    return "0" if x == 0 else f"{x:.1e}" if math.isfinite(x) else "wrong shape"


def hints(exercise: Exercise, shown: int) -> list[RenderableType]:
    """The first hints of an exercise."""
    parts: list[RenderableType] = []
    for i, hint in enumerate(exercise.hints[:shown], 1):
        parts.append(Text.assemble((f"Hint {i} of {len(exercise.hints)}", "bold"), f"\n{hint}\n"))
    more = shown < len(exercise.hints)
    again = f"handgrad learn {exercise.name} {'--hint' if more else '--solution'}"
    return [*parts, Text(f"{'The next one' if more else 'A solution'}: {again}", style="dim")]


def of_class(found: Class) -> list[RenderableType]:
    """A line for each student, then the files that do not count."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("student", "solved", "numbers by hand", "file"):
        table.add_column(name)
    for file, result in found.results.items():
        cells = result.student, found.solved(result), found.numbers(result), file
        table.add_row(*(Text(printable(cell)) for cell in cells))
    problems = [Text(printable(f"{name} {why}."), style="yellow") for name, why in found.problems.items()]
    notes = [Text(printable(note)) for note in found.notes]
    return [table, *problems, *notes] if found.results else [*problems, Text("No result counts.")]

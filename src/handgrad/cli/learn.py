"""`handgrad learn`"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import HandgradError, option
from ..files.atomic import check_writable, write_text
from ..files.reading import read_text
from . import console
from .console import JsonOption

if TYPE_CHECKING:
    from ..learn.exercise import Exercise
    from ..learn.progress import Progress

FOLDER = Path("learn")
MAX_BYTES = 1_000_000


def learn(
    exercise: Annotated[
        str | None, typer.Argument(help="Name of an exercise, such as layernorm. [default: list all]")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with your answer. [default: learn/EXERCISE.py]")
    ] = None,
    hint: Annotated[bool, typer.Option("--hint", help="Show the next hint.")] = False,
    solution: Annotated[bool, typer.Option("--solution", help="Show a solution.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the numbers on which an answer is judged.")] = 0,
    json_file: JsonOption = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write your results to a file for your teacher.")
    ] = None,
    student: Annotated[str, typer.Option(metavar="NAME", help="Your name in that file.")] = "",
    collect: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Show the result files of a class, which are in this folder.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the results of the class as a page.")
    ] = None,
) -> None:
    """Write the backward pass yourself: twelve exercises, from a softmax to a whole block.

    The first call for an exercise writes a file to edit, later calls judge it: against autograd and finite differences, on
    numbers of different shapes. A wrong gradient gets a diagnosis: a factor, a sign, a transpose, a missing term or sum;
    which one, after two hints.

    Your code runs in a separate process, without files and network, and with limits of time and memory. Solved exercises
    are remembered in your data folder ($HANDGRAD_DATA, or ~/.local/share/handgrad).

    Exit status 1 if an answer is wrong.

      handgrad learn
      handgrad learn softmax
      handgrad learn softmax --hint
      handgrad learn --export learn.json --student "Ada"
      handgrad learn --collect results --html class.html
    """
    from ..display import course_tables
    from ..learn.course import find
    from ..learn.progress import Progress

    console.check_json_target(json_file)
    progress = Progress()
    if collect is not None or export is not None or html is not None or student:
        alone = exercise is None and file is None and not hint and not solution and json_file is None
        _exchange(collect, html, export, student, progress, alone)
        return
    if exercise is None:
        if file is not None or hint or solution or json_file is not None:
            raise HandgradError("name an exercise: handgrad learn softmax; handgrad learn lists them")
        for part in course_tables.course(progress.read()):
            console.out.print(part)
        return
    chosen = find(exercise)
    if hint and solution:
        raise HandgradError("--hint and --solution exclude each other: choose one")
    if hint:
        entry = progress.hint_shown(chosen)
        for part in course_tables.hints(chosen, entry.hints):
            console.out.print(part)
    elif solution:
        progress.solution_shown(chosen)
        console.say(chosen.solution().rstrip("\n"))
    else:
        _write_or_judge(chosen, FOLDER / f"{chosen.name}.py" if file is None else file, seed, json_file, progress)
    if progress.damaged is not None:
        console.note(f"{progress.path} could not be read; it was kept as {progress.damaged.name} and a new one begun.")


def _exchange(
    folder: Path | None, html: Path | None, export: Path | None, student: str, progress: "Progress", alone: bool
) -> None:
    """Write the results of a student, or read those of a class."""
    from ..display import course_tables
    from ..learn.classroom import class_page, collect
    from ..learn.result_file import result_text

    if not alone or (folder is None) == (export is None) or (html and folder is None) or (student and export is None):
        raise HandgradError(
            f"write your results with {option('export', 'learn.json')} and {option('student')}, or read those of a class"
            f" with {option('collect', 'FOLDER')} and {option('html')}, without other options"
        )
    if export is not None:
        check_writable(export)
        write_text(export, result_text(student, progress.read()))
        console.say(f"Wrote {export}.")
        return
    assert folder is not None
    if html is not None:
        check_writable(html)
    found = collect(folder)
    for part in course_tables.of_class(found):
        console.out.print(part, highlight=False)
    if html is not None:
        write_text(html, class_page(found, folder.resolve().name))
        console.note(f"wrote {html}")


def _write_or_judge(exercise: "Exercise", path: Path, seed: int, json_file: str | None, progress: "Progress") -> None:
    from ..learn.course import COURSE, file_text, number

    if not path.exists():
        if json_file is not None:
            raise HandgradError(f"{path} does not exist, so there is nothing to judge: write it without --json first")
        if path.parent == FOLDER:
            FOLDER.mkdir(exist_ok=True)
        check_writable(path)
        write_text(path, file_text(exercise))
        console.say(f"Exercise {number(exercise)} of {len(COURSE)}: {exercise.title}\n\n{exercise.task()}\n")
        console.say(f"Wrote {path}. Edit the body of backward, then run the same command again.")
        return
    _judge(exercise, path, seed, json_file, progress)


def _judge(exercise: "Exercise", path: Path, seed: int, json_file: str | None, progress: "Progress") -> None:
    import torch

    from ..display import course_tables
    from ..learn.as_json import grade_json
    from ..learn.course import COURSE
    from ..learn.grading import grade

    torch.set_num_threads(1)  # the matrices are tiny: a second thread would only wait
    code = read_text(path, MAX_BYTES)
    made = grade(exercise, code, seed=seed)
    exactly = True
    try:
        exactly = progress.judged(exercise, code, made).told_exactly
    except (HandgradError, OSError) as reason:  # the judgment is worth more than its record
        console.note(f"progress was not saved: {reason}")
    if not console.write_json(json.dumps(grade_json(made), ensure_ascii=False, indent=1), json_file):
        for part in course_tables.judged(exercise, made, str(path), exactly):
            console.out.print(part, highlight=False)
        if not exactly and any(part.said(True) != part.said(False) for part in made.parts):
            console.say("\nAfter two hints it says what exactly is wrong.")
        _say_next(exercise, list(COURSE), made.passed, made.unfinished, path)
    if not made.passed and not made.unfinished:
        raise typer.Exit(1)


def _say_next(exercise: "Exercise", names: list[str], passed: bool, unfinished: bool, path: Path) -> None:
    here = f"handgrad learn {exercise.name}"
    if passed:
        later = names[names.index(exercise.name) + 1 :]
        after = (
            f"Next: handgrad learn {later[0]}" if later else "That was the last one: you have written a whole block."
        )
        console.out.print(f"\nSolved. {after}", style="bold green", highlight=False)
    elif unfinished:
        console.say(f"\nReplace each ... in {path} and run the command again. For a hint: {here} --hint")
    else:
        console.say(f"\nFor a hint: {here} --hint")

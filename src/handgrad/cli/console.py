"""The terminal: standard output, standard error, and `--json`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console

from ..files.atomic import check_writable, write_text

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

JsonOption = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="JSON output file, or - for stdout.")]


def say(text: str) -> None:
    """Print plain text: no wrapping, markup or highlighting."""
    out.print(text, highlight=False, soft_wrap=True, markup=False)


def note(text: str) -> None:
    """Print a remark to stderr; nothing if it is empty."""
    if text:
        err.print(text, style="dim", highlight=False, soft_wrap=True, markup=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that something long is running, and for how long."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if not err.is_terminal:
        yield
        return
    with Progress(SpinnerColumn(), TextColumn(what), TimeElapsedColumn(), console=err, transient=True) as spinner:
        spinner.add_task(what, total=None)
        yield


def check_json_target(target: str | None) -> None:
    """Raise if `--json` names a file that cannot be written."""
    if target is not None and target != "-":
        check_writable(Path(target))


def write_json(text: str, target: str | None) -> bool:
    """Write JSON to a file or to stdout. Returns False if `--json` was not given."""
    if target is None:
        return False
    if target == "-":
        sys.stdout.write(text + "\n")
    else:
        write_text(Path(target), text + "\n")
        err.print(f"wrote {target}", highlight=False)
    return True


class Report(Protocol):
    """What a command that checks something found; it prints itself."""

    @property
    def passed(self) -> bool: ...

    def summary(self) -> str: ...

    def to_json(self) -> str: ...


def conclude(report: Report, json_target: str | None) -> None:
    """Print a report, or write it as JSON, and exit with status 1 if anything failed."""
    if not write_json(report.to_json(), json_target):
        out.print(report)
    elif not report.passed:
        err.print(report.summary(), style="bold red", highlight=False)
    if not report.passed:
        raise typer.Exit(1)

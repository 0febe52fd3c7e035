"""The terminal: standard output, standard error, and `--json`."""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console

from ..errors import HandgradWarning, for_command_line
from ..files.atomic import check_writable, write_text

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

JsonOption = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="JSON output file, or - for stdout.")]


def open_streams() -> None:
    """Make the standard streams usable: a closed one (`>&-`) is replaced by /dev/null, before another file gets its number,
    and what the encoding of the locale cannot express is written as a question mark."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError):
                stream.reconfigure(errors="replace")


def say(text: str) -> None:
    """Print plain text: no wrapping, markup or highlighting."""
    out.print(for_command_line(text), highlight=False, soft_wrap=True, markup=False)


def note(text: str) -> None:
    """Print a remark to stderr; nothing if it is empty."""
    if text:
        err.print(for_command_line(text), style="dim", highlight=False, soft_wrap=True, markup=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that something long is running, and for how long."""
    from ..proof.check_report import spinner

    with spinner(what, err):
        yield


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Within the context our warnings are printed as a line to stderr, equal ones once."""
    with warnings.catch_warnings():
        show, shown = warnings.showwarning, set[str]()

        def show_line(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if not issubclass(category, HandgradWarning):
                show(message, category, *rest)
            elif (line := for_command_line(message)) not in shown:
                shown.add(line)
                err.print(f"warning: {line}", style="yellow", highlight=False, soft_wrap=True, markup=False)

        warnings.simplefilter("always", HandgradWarning)
        warnings.showwarning = show_line  # type: ignore[assignment]
        yield


def warn(text: str) -> None:
    """Print a warning to stderr; nothing if it is empty."""
    if text:
        err.print(for_command_line(text), style="bold yellow", highlight=False, soft_wrap=True, markup=False)


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

"""`Report`: each check of a verification with its oracle, error and tolerance, as a table, HTML or JSON; and `Printed`, what
all reports of checks have in common."""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, track
from rich.table import Table
from rich.text import Text

from ..formatting import percent

T = TypeVar("T")
Watch = Callable[[Sequence[str]], Iterable[str]]

# by whether something passed; None: it does not apply
MARKS = {True: ("✔", "green"), False: ("✘", "bold red"), None: ("–", "dim")}
COLORS = {True: ("good", "#2a7a3f"), False: ("bad", "#b3261e"), None: ("none", "#777")}


class Printed(ABC):
    """A report that prints as text and converts to JSON."""

    @property
    @abstractmethod
    def passed(self) -> bool:
        """Whether everything is right."""

    @abstractmethod
    def summary(self) -> str:
        """One sentence."""

    @abstractmethod
    def as_dict(self) -> dict[str, object]:
        """All it found, as JSON has it."""

    @abstractmethod
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult: ...

    def __repr__(self) -> str:
        title = getattr(self, "title", "")
        return f"<{type(self).__name__}: {title}{': ' if title else ''}{self.summary()}>"

    def __str__(self) -> str:
        console = Console(width=120, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=False)


def progress_bar(what: str) -> Callable[[Sequence[T]], Iterable[T]]:
    """Wrap a sequence in a progress bar on stderr that disappears at the end; no bar if stderr is not a terminal."""
    err = Console(stderr=True, emoji=False)
    return lambda sequence: track(sequence, what, console=err, transient=True) if err.is_terminal else sequence


@contextmanager
def spinner(what: str, err: Console | None = None) -> Iterator[None]:
    """Show on a terminal that something long is running, and for how long."""
    err = err or Console(stderr=True, emoji=False)
    if not err.is_terminal:
        yield
        return
    with Progress(SpinnerColumn(), TextColumn(what), TimeElapsedColumn(), console=err, transient=True) as shown:
        shown.add_task(what, total=None)
        yield


@dataclass(frozen=True)
class Result:
    """One check and its measured error."""

    id: str
    section: str
    equation: str
    statement: str
    oracle: str
    error: float
    tolerance: float
    passed: bool
    note: str = ""
    seconds: float = 0.0


def run_check(
    id: str, section: str, equation: str, statement: str, oracle: str, tolerance: float, measure: Callable[[], object]
) -> Result:
    """Run `measure`, which returns an error or (error, note), and compare with the tolerance. An exception is a failure
    with the exception as its note."""
    start = time.perf_counter()
    note = ""
    try:
        outcome = measure()
        if isinstance(outcome, tuple):
            outcome, note = outcome
        error = float(outcome)  # type: ignore[arg-type]
    except Exception as reason:
        error, note = math.inf, f"{type(reason).__name__}: {reason}".splitlines()[0]
    passed = error <= tolerance  # false for NaN too
    return Result(id, section, equation, statement, oracle, error, tolerance, passed, note, time.perf_counter() - start)


@dataclass(repr=False)
class Report(Printed):
    """Results in order. Prints as a table, displays as HTML in a notebook, and converts to JSON."""

    title: str
    checks: list[Result] = field(default_factory=list)
    expected: Sequence[str] = ()  # ids of the checks that must be present
    left_out: list[str] = field(default_factory=list)  # what was not checked, and why

    @property
    def failed(self) -> list[Result]:
        return [c for c in self.checks if not c.passed]

    @property
    def missing(self) -> list[str]:
        present = {c.id for c in self.checks}
        return [id for id in self.expected if id not in present]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and not self.failed and not self.missing

    @property
    def seconds(self) -> float:
        return sum(c.seconds for c in self.checks)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.checks)

    def __len__(self) -> int:
        return len(self.checks)

    def __getitem__(self, id: str) -> Result:
        for c in self.checks:
            if c.id == id:
                return c
        raise KeyError(id)

    def as_dict(self) -> dict[str, object]:
        # JSON has no infinity: `passed` is false, and `note` gives the reason
        rows = [asdict(c) | ({} if math.isfinite(c.error) else {"error": None}) for c in self.checks]
        counts = {"passed": len(self.checks) - len(self.failed), "failed": len(self.failed), "missing": self.missing}
        return {"checks": rows, **counts, "left_out": self.left_out}

    def summary(self) -> str:
        n = len(self.checks)
        worst = max((c.error / c.tolerance for c in self.checks if c.tolerance > 0), default=0.0)
        if self.failed:
            return f"{len(self.failed)} of {n} checks FAILED in {self.seconds:.1f} s: {_names([c.id for c in self.failed])}"
        if self.missing:
            return f"FAILED: {len(self.missing)} of {len(self.expected)} checks did not run: {_names(self.missing)}"
        what = "the only check" if n == 1 else f"all {n} checks"
        closest = "its error is" if n == 1 else "the largest error is"
        return f"{what} passed in {self.seconds:.1f} s; {closest} {percent(worst)} of its tolerance"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold")
        sizes, room = _columns(self.checks, options.max_width)
        yield _table(sizes, room, show_header=True)
        section = None
        for c in self.checks:
            if c.section != section:
                section = c.section
                yield Text(f"\n{section}", style="bold magenta")
            mark, color = MARKS[c.passed]
            # a misprint shows its measured errors, a failure its reason, everything else the statement alone
            show_note = c.note and (not c.passed or c.note.startswith("printed"))
            statement = Text(f"{c.note} — {c.statement}" if show_note else c.statement)
            cells: dict[str, Text | str] = {
                "": Text(mark, style=color),
                "check": Text(c.id, style="" if c.passed else color),
                "eq.": c.equation,
                "statement": statement,
                "oracle": c.oracle,
                "error": Text(_number(c.error), style=color),
                "limit": _number(c.tolerance),
                "ms": f"{1e3 * c.seconds:.0f}",
            }
            table = _table(sizes, room)
            table.add_row(*(cells[str(column.header)] for column in table.columns))
            yield table
            if not room and statement.plain:
                statement.stylize("dim")
                yield Padding(statement, (0, 0, 0, 3))
        for reason in self.left_out:
            yield Text(f"\nNot checked: {reason}", style="dim")
        yield Text(f"\n{self.summary()}", style="bold green" if self.passed else "bold red")

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{x}</th>" for x in ("", "check", "eq.", "statement", "oracle", "error", "limit"))
        rows = ([c.id, c.equation, c.statement, c.oracle, _number(c.error), _number(c.tolerance)] for c in self.checks)
        body = "".join(html_row(c.passed, *cells) for c, cells in zip(self.checks, rows, strict=True))
        return (
            f"<p><b>{escape(self.title)}</b><br>{escape(self.summary())}</p>"
            + "".join(f"<p>Not checked: {escape(reason)}</p>" for reason in self.left_out)
            + f"<details{' open' if self.failed else ''}><summary>{len(self.checks)} checks</summary>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"
        )


def colored(passed: bool | None, text: str) -> str:
    """Text in the color of its result, as HTML."""
    kind, color = COLORS[passed]
    return f'<span class="{kind}" style="color:{color}">{escape(text)}</span>'


def html_row(passed: bool | None, *cells: str) -> str:
    """A row of a table that begins with the mark of its result."""
    mark = colored(passed, MARKS[passed][0])
    return f"<tr><td>{mark}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _names(ids: list[str]) -> str:
    return ", ".join(ids[:8]) + (" …" if len(ids) > 8 else "")


def _number(x: float) -> str:
    if x == 0:
        return "0"
    if not math.isfinite(x):
        return "∞"
    return f"{x:.1e}"


def _columns(checks: list[Result], width: int) -> tuple[dict[str, int], int]:
    """Widths of the columns that fit, and the width left for the statement (0: it goes below the row). The least important
    columns are dropped until the rest fits; a long name is folded, a number is never truncated."""
    sizes = {
        "": 1,
        "check": min(max((len(c.id) for c in checks), default=5), max(24, width - 40)),
        "eq.": max((len(c.equation) for c in checks), default=3),
        "oracle": max((len(c.oracle) for c in checks), default=6),
        "error": 7,
        "limit": 7,
        "ms": max(4, *(len(f"{1e3 * c.seconds:.0f}") for c in checks)) if checks else 4,
    }
    for name in ("ms", "eq.", "oracle", "limit"):
        if sum(sizes.values()) + 2 * len(sizes) > width or sizes[name] == 0:
            del sizes[name]
    sizes = {name: max(size, len(name)) for name, size in sizes.items()}
    room = width - sum(sizes.values()) - 2 * len(sizes) - 2
    longest = max((len(c.statement) for c in checks), default=0)
    return sizes, room if room >= min(40, longest) else 0


def _table(sizes: dict[str, int], room: int, show_header: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=show_header)
    for name in ("", "check", "eq.", "statement", "oracle", "error", "limit", "ms"):
        if name == "statement" and room:
            table.add_column(name, width=room)
        elif name in sizes:
            right = name in ("error", "limit", "ms")
            wraps = name == "check"
            table.add_column(name, no_wrap=not wraps, width=sizes[name], justify="right" if right else "left")
    return table

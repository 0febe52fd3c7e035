"""The report: what was checked, by which oracle, with what error. Prints as a table, shows in a notebook, writes JSON."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from html import escape

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Result:
    """One check and what came out of it."""

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


def judge(
    id: str, section: str, equation: str, statement: str, oracle: str, tolerance: float, measure: Callable[[], object]
) -> Result:
    """Run one measurement. It returns an error, or an error and a note; raising counts as failing, with the reason."""
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


@dataclass
class Report:
    """The results, in order. Prints as a table, shows as HTML in a notebook, writes itself as JSON."""

    title: str
    checks: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        return [c for c in self.checks if not c.passed]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and not self.failed

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

    def to_json(self) -> str:
        def plain(c: Result) -> dict[str, object]:
            row = asdict(c)
            if not math.isfinite(c.error):
                row["error"] = None  # JSON has no infinity; `passed` is false and `note` has the reason
            return row

        counts = {"passed": len(self.checks) - len(self.failed), "failed": len(self.failed)}
        return json.dumps({"checks": [plain(c) for c in self.checks], **counts}, indent=1, ensure_ascii=False)

    def summary(self) -> str:
        n = len(self.checks)
        worst = max((c.error / c.tolerance for c in self.checks if c.tolerance > 0), default=0.0)
        if self.failed:
            names = ", ".join(c.id for c in self.failed[:8]) + (" …" if len(self.failed) > 8 else "")
            return f"{len(self.failed)} of {n} checks FAILED in {self.seconds:.1f} s: {names}"
        return f"all {n} checks passed in {self.seconds:.1f} s; the closest came to {worst:.0%} of its tolerance"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - max((len(c.id) for c in self.checks), default=5) - 62  # what the other columns take
        table = Table(box=box.SIMPLE_HEAD, title=Text(self.title, style="bold"), title_justify="left", pad_edge=False)
        table.add_column("", no_wrap=True)
        table.add_column("check", no_wrap=True)
        table.add_column("eq.", no_wrap=True)
        if room >= 20:
            table.add_column("statement", overflow="ellipsis", no_wrap=True, width=room)
        table.add_column("oracle", no_wrap=True)
        for name in ("error", "limit", "ms"):
            table.add_column(name, justify="right", no_wrap=True)
        section = None
        for c in self.checks:
            if c.section != section:
                section = c.section
                table.add_section()
                heading = Text(section, style="bold magenta", overflow="ellipsis")
                table.add_row("", "", "", heading) if room >= 20 else table.add_row("", heading)
            colour = "green" if c.passed else "bold red"
            statement = c.statement if c.passed or not c.note else f"{c.note} — {c.statement}"
            table.add_row(
                Text("✔" if c.passed else "✘", style=colour),
                Text(c.id, style="" if c.passed else colour),
                c.equation,
                *([Text(statement)] if room >= 20 else []),
                c.oracle,
                Text(_number(c.error), style=colour),
                _number(c.tolerance),
                f"{1e3 * c.seconds:.0f}",
            )
        yield table
        yield Text(self.summary(), style="bold red" if self.failed else "bold green")

    def __str__(self) -> str:
        console = Console(width=120, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def _repr_html_(self) -> str:
        def row(c: Result) -> str:
            colour = "#2a7a3f" if c.passed else "#b3261e"
            cells = [c.id, c.equation, c.statement, c.oracle, _number(c.error), _number(c.tolerance)]
            mark = f'<td style="color:{colour}">{"✔" if c.passed else "✘"}</td>'
            return "<tr>" + mark + "".join(f"<td>{escape(x)}</td>" for x in cells) + "</tr>"

        head = "".join(f"<th>{x}</th>" for x in ("", "check", "eq.", "statement", "oracle", "error", "limit"))
        body = "".join(row(c) for c in self.checks)
        return (
            f"<p><b>{escape(self.title)}</b><br>{escape(self.summary())}</p>"
            f"<details{' open' if self.failed else ''}><summary>{len(self.checks)} checks</summary>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"
        )


def _number(x: float) -> str:
    if x == 0:
        return "0"
    if not math.isfinite(x):
        return "∞"
    return f"{x:.1e}"

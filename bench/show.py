"""Tables and progress in the terminal."""

import math
from collections.abc import Callable
from types import TracebackType

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import SCENARIOS, WITH_MODEL
from .machine import Machine
from .row import Row
from .scenarios import Part


class Watch:
    """A progress bar over the whole run; lines where there is no terminal."""

    def __init__(self, parts: list[Part], console: Console):
        self.parts, self.console, self.last = parts, console, -1
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(),
        )
        # no refresh in a thread: measuring forks this process
        self.bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self.task = self.bar.add_task("", total=len(parts))

    def __enter__(self) -> "Watch":
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def tell(self, i: int, contender: str, done: float) -> None:
        """Show which contender of which part runs, and the share of the part that is done."""
        part = self.parts[i]
        text = f"{part.scenario}: {part.case}"
        if not self.console.is_terminal:
            if i != self.last:
                self.console.print(f"{i + 1} of {len(self.parts)}  {text}", highlight=False, markup=False)
            self.last = i
            return
        self.bar.update(self.task, completed=i + done, description=f"{text} · {contender}"[: self.console.width // 2])
        self.tick()

    def tick(self) -> None:
        if self.console.is_terminal:
            self.bar.refresh()

    def print(self, rows: list[Row], size: str, machine: Machine, out: Console) -> None:
        """Print a table above the bar."""
        if not rows:
            return
        self.bar.stop()
        show(rows, size, machine, out)
        if self.console.is_terminal:
            self.bar.start()


def summary(rows: list[Row], err: Console) -> bool:
    """Print what failed, ours in red and peers as notes; return whether anything of ours did."""
    failed = [row for row in rows if row.has_failed]
    for row in rows:
        if row.problem and not row.has_failed:
            err.print(f"note: {_where(row)}", highlight=False, markup=False, soft_wrap=True)
    for row in failed:
        err.print(_where(row), style="red", highlight=False, markup=False, soft_wrap=True)
    if failed:
        total = sum(row.is_ours for row in rows)
        text = f"handgrad bench: {len(failed)} of {total} measurements of handgrad failed"
        err.print(text, style="bold red", highlight=False, soft_wrap=True)
    return bool(failed)


def _where(row: Row) -> str:
    return f"{row.scenario}, {row.case}, {row.contender}: {row.problem}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "case": lambda r: r.case,
    "contender": lambda r: r.contender,
    "tokens/s": lambda r: number(r.tokens / r.seconds, "{:,.0f}") if r.scenario in WITH_MODEL else "",
    "best": lambda r: seconds(r.seconds),
    "median": lambda r: seconds(r.median),
    "GFLOP/s": lambda r: number(r.gflops, "{:,.0f}"),
    "ratio": lambda r: number(r.ratio, "{:.2f}×"),
    "error": lambda r: number(r.gradient_error, "{:.2e}") if r.worst == r.worst else "",
    "worst tensor": lambda r: number(r.worst, "{:.2e}"),
    "cosine": lambda r: number(r.cosine, "{:.5f}") if r.worst == r.worst else "",
    "of torch's products": lambda r: number(r.mfu, "{:.2f}×"),
    "of bound": lambda r: number(r.of_bound, "{:.0%}"),
    "predicted": lambda r: seconds(r.predicted_seconds),
    "memory": lambda r: f"{r.memory / 1e6:,.0f} MB" if r.memory else "",
    "of peer's": lambda r: number(r.memory_ratio, "{:.2f}"),
    "above torch": lambda r: f"{r.above_torch / 1e6:,.0f} MB" if r.above_torch else "",
    "of idle speed": lambda r: number(r.of_idle, "{:.0%}"),
    "of peer's ": lambda r: number(r.above_torch_ratio, "{:.2f}"),
    "per token": lambda r: number(r.bytes_per_token / 1e3, "{:,.1f} kB"),
    "predicted ": lambda r: f"{r.predicted_memory / 1e6:,.0f} MB" if r.memory and r.predicted_memory else "",
    "problem": lambda r: r.problem,
}
OPTIONAL = ("median", "predicted", "predicted ", "of torch's products")  # hidden in this order on a narrow terminal


def show(rows: list[Row], size: str, machine: Machine, out: Console) -> None:
    """Print a table of a scenario, without empty columns and those that do not fit."""
    scenario = rows[0].scenario
    filled = {name: cells for name, f in COLUMNS.items() if any(cells := [f(row) for row in rows])}
    table = layout(rows, filled)
    hidden = []
    for name in OPTIONAL:
        if Measurement.get(out, out.options.update(max_width=1000), table).maximum > out.width and name in filled:
            del filled[name]
            hidden.append(name.strip())
            table = layout(rows, filled)
    out.print(f"{scenario}: {SCENARIOS[scenario]}", style="bold", highlight=False)
    out.print(table)
    notes = [row.note for row in rows if row.note]
    if scenario == "train":
        notes.append("ratio: best step of eager autograd ÷ best step of this one")
    if "of torch's products" in filled:
        notes.append(
            "of torch's products: best time of the matmuls alone ÷ best time of loss and gradients, without AdamW"
        )
    if "predicted" in filled or "predicted " in filled:
        notes.append("predicted: by handgrad plan, from trial steps timed now")
    if hidden:
        notes.append(f"hidden columns: {', '.join(dict.fromkeys(hidden))}; --json has all figures")
    notes += mixed_notes(rows)
    errors = [
        row.gradient_error for row in rows if not (math.isnan(row.gradient_error) or row.is_rounded or row.worst > 0)
    ]
    if errors:
        notes.append(f"results compared before timing: largest relative error {max(errors):.1e}")
    if size == "tiny":
        notes.append("tiny: these figures only show that the scenario runs")
    for note in dict.fromkeys([*notes, machine.state]):
        out.print(note, style="dim", highlight=False)
    if machine.busy:
        out.print("busy machine: do not publish", style="bold red", highlight=False)


def mixed_notes(rows: list[Row]) -> list[str]:
    """What mixed precision gains in each case over handgrad's float32 and the fastest peer that rounds, and how far the
    gradients of both are from float32."""
    notes = []
    for row in rows:
        beside = [other for other in rows if other.case == row.case]
        if row.cosine == row.cosine and row.worst != row.worst:
            text = f"relative error of all gradients {row.gradient_error:.1e}, cosine {row.cosine:.5f}"
            notes.append(f"{row.case}, {row.contender}: {text}")
        if row.is_mixed and row.seconds > 0 and not beside[0].is_mixed:
            peers = [other for other in beside if other.is_rounded and not other.is_ours and other.seconds > 0]
            rivals = [beside[0], *sorted(peers, key=lambda other: other.seconds)[:1]]
            parts = [f"{x.seconds / row.seconds:.2f}× {x.contender}" for x in rivals if x.seconds > 0]
            measured = [other for other in peers if other.memory and row.memory]
            for other in sorted(measured, key=lambda other: other.memory)[:1]:
                parts.append(f"{row.memory / other.memory:.3f} of the memory of {other.contender}")
            notes.append(f"{row.case}, {row.contender}: {', '.join(parts)}")
    return notes


def layout(rows: list[Row], filled: dict[str, list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in filled:
        left = name in ("case", "contender", "problem")
        table.add_column(name, no_wrap=name not in ("case", "problem"), justify="left" if left else "right")
    case = None
    for i, row in enumerate(rows):
        if case is not None and row.case != case:
            table.add_section()
        cells = [cells[i] for cells in filled.values()]
        if row.case == case:
            cells[0] = ""
        case = row.case
        table.add_row(*cells, style="bold" if row.contender == "handgrad" else "")
    return table


def seconds(x: float) -> str:
    return "" if math.isnan(x) else f"{x:.2f} s" if x >= 1 else f"{1e3 * x:.1f} ms"


def number(x: float, form: str) -> str:
    return "" if math.isnan(x) else form.format(x)

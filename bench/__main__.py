"""python -m bench [SCENARIO …] [--model MODEL] [--quick | --tiny] [--json FILE] [--plot FILE.svg]"""

import argparse
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import track
from rich.table import Table

from . import SCENARIOS, WITH_MODEL

if TYPE_CHECKING:
    from .measure import Machine
    from .scenarios import Row

err = Console(stderr=True)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    from handgrad.errors import HandgradError

    try:
        run(options)
    except (HandgradError, ImportError, OSError) as mistake:
        err.print(f"handgrad bench: {mistake}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the options, without importing torch."""
    width = min(80, shutil.get_terminal_size().columns)
    lines = (
        textwrap.fill(f"{name:<18}{text}", width, initial_indent="  ", subsequent_indent=20 * " ")
        for name, text in SCENARIOS.items()
    )
    parser = argparse.ArgumentParser(
        prog="handgrad bench",
        description="Speed and memory side by side with other libraries, in one run.",
        epilog="\n".join(["scenarios:", *lines]),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=20, width=width),
    )
    parser.add_argument("scenario", nargs="*", metavar="SCENARIO", help="scenario to measure (default: all)")
    parser.add_argument(
        "--model", metavar="MODEL", default="",
        help=f"model of {' and '.join(WITH_MODEL)}: smollm2, a .gguf file or a directory, on real instructions (default:"
        " GPT-2 124M, random weights, on pieces of text); with --tiny a tiny Llama",
    )  # fmt: skip
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", help="smaller sizes, a few minutes")
    size.add_argument(
        "--tiny", dest="size", action="store_const", const="tiny",
        help="tiny models, one round, seconds: only shows that every scenario runs",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="JSON file for all figures and the machine's load; - is stdout")
    parser.add_argument(
        "--plot", metavar="FILE", help="SVG file for a plot of ratios, and of time and memory over tokens"
    )
    parser.set_defaults(size="full")
    options = parser.parse_args(arguments)
    for name in options.scenario:
        if name not in SCENARIOS:
            parser.error(f"unknown scenario {name!r}; choose from {', '.join(SCENARIOS)}")
        if options.model and name not in WITH_MODEL:
            parser.error(f"--model is an option of {' and '.join(WITH_MODEL)}, not of {name}")
    return options


def run(options: argparse.Namespace) -> None:
    from handgrad.files.atomic import check_writable, write_text

    from .explain import browser
    from .measure import Machine
    from .picture import draw
    from .scenarios import Row, as_json
    from .scenarios import run as measure
    from .sizes import SIZES

    size, machine = replace(SIZES[options.size], base=options.model), Machine.now()
    for target in (options.json, options.plot):
        if target not in (None, "-"):
            check_writable(Path(target))
    chosen = list(dict.fromkeys(options.scenario)) or [
        name for name in (WITH_MODEL if options.model else SCENARIOS) if name != "explain" or browser() is not None
    ]
    out = Console(stderr=options.json == "-")  # stdout is reserved for JSON
    if not out.is_terminal:
        out.width = 140
    warn(machine)
    rows: list[Row] = []
    for name in chosen:
        found = measure(name, size, lambda rounds, name=name: watch(rounds, name))
        show(found, size.name, machine, out)
        rows += found
    if not options.scenario and not options.model and "explain" not in chosen:
        err.print("explain was skipped: Chromium is not installed", style="red", highlight=False)
    if options.json == "-":
        sys.stdout.write(as_json(rows, machine, size) + "\n")
    elif options.json:
        write_text(Path(options.json), as_json(rows, machine, size) + "\n")
    if options.plot:
        write_text(Path(options.plot), draw(rows, machine))
    warn(machine)


def warn(machine: "Machine") -> None:
    """Print the machine's warning: before the figures, and again below them."""
    if machine.warning:
        err.print(machine.warning, style="bold white on red", highlight=False)


def watch(rounds: Iterable[int], name: str) -> Iterable[int]:
    return track(list(rounds), name, console=err, transient=True) if err.is_terminal else rounds


COLUMNS: dict[str, Callable[["Row"], str]] = {
    "case": lambda r: r.case,
    "contender": lambda r: r.contender,
    "tokens/s": lambda r: f"{r.tokens / r.seconds:,.0f}" if r.scenario in WITH_MODEL else "",
    "best": lambda r: seconds(r.seconds),
    "median": lambda r: seconds(r.median),
    "ratio": lambda r: number(r.ratio, "{:.2f}×"),
    "of matmul peak": lambda r: number(r.mfu, "{:.0%}"),
    "predicted": lambda r: seconds(r.predicted_seconds),
    "memory": lambda r: f"{r.memory / 1e6:,.0f} MB" if r.memory else "",
    "of peer's": lambda r: number(r.memory_ratio, "{:.2f}"),
    "above torch": lambda r: f"{r.above_torch / 1e6:,.0f} MB" if r.above_torch else "",
    "of peer's ": lambda r: number(r.above_torch_ratio, "{:.2f}"),
    "per token": lambda r: number(r.bytes_per_token / 1e3, "{:,.1f} kB"),
    "predicted ": lambda r: f"{r.predicted_memory / 1e6:,.0f} MB" if r.memory and r.predicted_memory else "",
}
OPTIONAL = ("median", "predicted", "predicted ", "of matmul peak")  # hidden in this order on a narrow terminal


def show(rows: list["Row"], size: str, machine: "Machine", out: Console) -> None:
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
        if "of matmul peak" in filled:
            notes.append(
                "of matmul peak: best time of the matmuls alone ÷ best time of loss and gradients, without AdamW"
            )
    if hidden:
        notes.append(f"hidden columns: {', '.join(dict.fromkeys(hidden))}; --json has all figures")
    errors = [row.gradient_error for row in rows if not math.isnan(row.gradient_error)]
    if errors:
        notes.append(f"results compared before timing: largest relative error {max(errors):.1e}")
    if size == "tiny":
        notes.append("tiny: these figures only show that the scenario runs")
    for note in dict.fromkeys([*notes, machine.state]):
        out.print(note, style="dim", highlight=False)
    if machine.busy:
        out.print("busy machine: do not publish", style="bold red", highlight=False)


def layout(rows: list["Row"], filled: dict[str, list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in filled:
        left = name in ("case", "contender")
        table.add_column(name, no_wrap=name != "case", justify="left" if left else "right")
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


if __name__ == "__main__":
    main()

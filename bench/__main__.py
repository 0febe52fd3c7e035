"""python -m bench [SCENARIO …] [--quick] [--json FILE] [--plot FILE.svg]"""

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from handgrad.errors import HandgradError
from handgrad.files import check_writable, write_text

from .picture import draw
from .scenarios import SCENARIOS, Row, as_json, run

err = Console(stderr=True)
console = Console() if Console().is_terminal else Console(width=140)


def main() -> None:
    parser = argparse.ArgumentParser(prog="handgrad bench", description="Side by side with the peers, in one run.")
    parser.add_argument("scenario", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; all unless given")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, a few minutes")
    parser.add_argument("--json", metavar="FILE", help="write every figure")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the ratios, and how time and memory grow")
    options = parser.parse_args()
    try:
        unknown = [name for name in options.scenario if name not in SCENARIOS]
        if unknown:
            raise HandgradError(f"no scenario is called {unknown[0]!r}; choose from {', '.join(SCENARIOS)}")
        for target in (options.json, options.plot):
            if target is not None:
                check_writable(Path(target))
        rows: list[Row] = []
        for name in options.scenario or SCENARIOS:
            rows += run(name, options.quick, lambda rounds, name=name: watch(rounds, name))
            show([row for row in rows if row.scenario == name])
        if options.json:
            write_text(Path(options.json), as_json(rows) + "\n")
        if options.plot:
            write_text(Path(options.plot), draw(rows))
    except (HandgradError, ImportError) as mistake:
        err.print(f"handgrad bench: {mistake}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)


def watch(rounds: Iterable[int], name: str) -> Iterable[int]:
    return track(list(rounds), name, console=err, transient=True) if err.is_terminal else rounds


def show(rows: list[Row]) -> None:
    """One table a scenario; columns nobody has figures for are left out."""
    title = f"{rows[0].scenario}: {SCENARIOS[rows[0].scenario]}"
    table = Table(title=f"[bold]{title}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    columns = {
        "case": lambda r: r.case,
        "contender": lambda r: r.contender,
        "best": lambda r: seconds(r.seconds),
        "median": lambda r: seconds(r.median),
        "ratio": lambda r: number(r.ratio, "{:.2f}×"),
        "of bound": lambda r: number(r.of_bound, "{:.0%}"),
        "predicted": lambda r: seconds(r.predicted_seconds),
        "memory": lambda r: f"{r.memory / 1e6:,.0f} MB" if r.memory else "",
        "of peer's": lambda r: number(r.memory_ratio, "{:.2f}"),
        "predicted ": lambda r: f"{r.predicted_memory / 1e6:,.0f} MB" if r.memory and r.predicted_memory else "",
    }
    filled = {name: cells for name, f in columns.items() if any(cells := [f(row) for row in rows])}
    for name in filled:
        table.add_column(name, no_wrap=True, justify="left" if name in ("case", "contender") else "right")
    case = None
    for i, row in enumerate(rows):
        if case is not None and row.case != case:
            table.add_section()
        cells = [filled[name][i] for name in filled]
        if row.case == case:
            cells[0] = ""
        case = row.case
        table.add_row(*cells, style="bold" if row.contender == "handgrad" else "")
    console.print(table)
    for note in dict.fromkeys(row.note for row in rows if row.note):
        console.print(note, style="dim", highlight=False)
    if rows[0].scenario == "train":
        console.print(
            f"{torch.get_num_threads()} threads; ratio: eager autograd's best whole step ÷ this one's;", style="dim"
        )
        console.print(
            "of bound: the bare matrix products' best ÷ this one's loss and gradients, without AdamW", style="dim"
        )


def seconds(x: float) -> str:
    return "" if math.isnan(x) else f"{x:.2f} s" if x >= 1 else f"{1e3 * x:.1f} ms"


def number(x: float, form: str) -> str:
    return "" if math.isnan(x) else form.format(x)


if __name__ == "__main__":
    main()

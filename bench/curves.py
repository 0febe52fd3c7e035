"""Loss curves in float32 and in mixed precision on top of each other: the same model, data, order and optimizer.

    python -m bench.curves [--only nano|smollm2|gpt2] [--steps 500] [--out build/curves] [--svg FILE.svg]

A small model on Shakespeare, adapters of SmolLM2 on real instructions, and GPT-2's shape from random weights on Shakespeare.
Prints the last validation loss of both precisions, its relative difference, and the largest relative difference of the
training loss, smoothed over 25 steps. A run that OUT has is not repeated. Exit status 1 if a validation loss differs by more
than 0.5 %.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import handgrad as hg
from handgrad.checks import MIXED
from handgrad.errors import HandgradError
from handgrad.files.atomic import check_writable, write_text
from handgrad.formatting import loss, number, percent
from handgrad.machine import configure_runtime
from handgrad.model.precision import why_not_mixed
from handgrad.text.downloads import fetch
from handgrad.training.lifecycle import Result

from .picture import BLUE, MARGIN, ORANGE, WIDTH, Sheet

STEPS, WINDOW, MOST = 500, 25, 0.005  # steps; those of a mean; largest difference of the validation loss
FLOAT32 = "float32"
COLORS = {FLOAT32: BLUE, MIXED: ORANGE}
WIDTHS = {FLOAT32: 4.0, MIXED: 1.4}  # the thin line is drawn on the thick one
COMMON: dict[str, Any] = {
    "seed": 0, "log_every": 1, "eval_every": 10**6, "save_every": 10**6, "eval_batches": 32, "sample_tokens": 0,
    "quiet": True,
}  # fmt: skip
Run = dict[str, Any]  # training losses of all steps, and the validation loss in the end


def instructions(**options: Any) -> Result:
    return hg.finetune("smollm2", fetch("instructions")[0], rank=16, batch_examples=2, **options)


RUNS: dict[str, Callable[..., Result]] = {
    "nano": partial(hg.train, model="nano"),
    "smollm2": instructions,
    "gpt2": partial(hg.train, model="gpt2", n_context=128, batch_tokens=128, lr=3e-4),
}
TITLES = {
    "nano": "small model, Shakespeare", "smollm2": "SmolLM2, LoRA, instructions", "gpt2": "GPT-2 124M, Shakespeare",
}  # fmt: skip


def take(train: Callable[..., Result], folder: Path, **options: Any) -> Run:
    """Train in a temporary folder; the losses."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        result = train(out=Path(scratch) / "run", **{**COMMON, **options})
        if not result.outcome.finished:
            raise HandgradError(f"stopped after {result.job.step} of {options['steps']} steps")
        records = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return {"losses": [r["loss"] for r in records if "loss" in r], "validation": result.outcome.val_loss}


def taken(path: Path, train: Callable[..., Result], **options: Any) -> Run:
    """The run that an earlier command stored in `path`, or a new one."""
    if not path.exists():
        write_text(path, json.dumps(take(train, path.parent, **options)) + "\n")
    found: Run = json.loads(path.read_text())
    return found


def both(name: str, train: Callable[..., Result], steps: int, folder: Path) -> dict[str, Run]:
    """The run in each precision."""
    paths = {precision: folder / f"{name}-{precision}-{steps}.json" for precision in COLORS}
    return {precision: taken(path, train, steps=steps, precision=precision) for precision, path in paths.items()}


def smoothed(losses: list[float]) -> list[float]:
    """The mean of each step and those before it, at most WINDOW."""
    parts = (losses[max(0, i - WINDOW) : i] for i in range(1, len(losses) + 1))
    return [sum(part) / len(part) for part in parts]


def apart(a: float, b: float) -> float:
    """The relative difference of b from a."""
    return abs(b - a) / a


def furthest(pair: dict[str, Run]) -> float:
    """The largest relative difference of the smoothed losses."""
    a, b = (smoothed(pair[precision]["losses"]) for precision in COLORS)
    return max(map(apart, a, b))


def table(found: dict[str, dict[str, Run]]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "steps", *COLORS, "difference", "largest of the smoothed training loss"):
        made.add_column(column, justify="right" if column else "left")
    for name, pair in found.items():
        a, b = (pair[precision]["validation"] for precision in COLORS)
        steps = len(pair[MIXED]["losses"])
        made.add_row(TITLES[name], str(steps), loss(a), loss(b), percent(apart(a, b)), percent(furthest(pair)))
    return made


def draw(found: dict[str, dict[str, Run]]) -> str:
    """A panel for every pair of runs, side by side."""
    sheet = Sheet()
    sheet.heading("Training loss in float32 and in mixed precision", f"mean of {WINDOW} steps; the same data in both")
    width = (WIDTH - 2 * MARGIN) / len(found)
    for i, (name, pair) in enumerate(found.items()):
        panel(sheet, MARGIN + i * width, width, name, pair)
    sheet.y += 310
    return sheet.svg()


def panel(sheet: Sheet, left: float, width: float, name: str, pair: dict[str, Run]) -> None:
    curves = {precision: smoothed(pair[precision]["losses"]) for precision in COLORS}
    values = [x for curve in curves.values() for x in curve]
    low, high, steps = min(values), max(values), len(curves[MIXED])
    a, b, top, floor = left + 38, left + width - 16, sheet.y + 16, sheet.y + 226
    sheet.text(left, sheet.y + 4, f"{TITLES[name]}: loss", "s")
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = floor - share * (floor - top)
        sheet.line(a, y, b, y, "g")
        sheet.text(a - 6, y + 4, number(low + share * (high - low)), "t", "end")
    for at, anchor in ((1, "start"), (steps, "end")):
        sheet.text(a if at == 1 else b, floor + 16, str(at), "t", anchor)
    sheet.text((a + b) / 2, floor + 16, "step", "t", "middle")
    for row, (precision, curve) in enumerate(curves.items()):
        points = [*list(enumerate(curve))[:: max(1, steps // 150)], (steps - 1, curve[-1])]
        line = " ".join(
            f"{a + (b - a) * i / max(1, steps - 1):.1f},{floor - (floor - top) * (x - low) / (high - low):.1f}"
            for i, x in points
        )
        style = f'stroke="{COLORS[precision]}" stroke-width="{WIDTHS[precision]}" stroke-linejoin="round"'
        sheet.parts.append(f'<polyline points="{line}" fill="none" {style}/>')
        y = floor + 40 + 18 * row
        sheet.bar(a, y - WIDTHS[precision] / 2 - 4, 18, WIDTHS[precision], COLORS[precision])
        sheet.text(a + 26, y, f"{precision}: validation loss {loss(pair[precision]['validation'])}")
    sheet.text(a, floor + 78, f"largest distance of the curves {percent(furthest(pair))}", "t")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(RUNS), help="one of the runs; may be repeated")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each run (default: {STEPS})")
    parser.add_argument("--out", type=Path, default=Path("build/curves"), help="folder for the losses of all runs")
    parser.add_argument("--svg", type=Path, help="file for the picture")
    options = parser.parse_args(arguments)
    if reason := why_not_mixed():
        parser.error(f"there is nothing to compare: {reason}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.svg:
            check_writable(options.svg)
        found = {
            name: both(name, train, options.steps, options.out)
            for name, train in RUNS.items()
            if name in (options.only or RUNS)
        }
        if options.svg:
            write_text(options.svg, draw(found))
    except HandgradError as mistake:
        parser.error(str(mistake))
    Console(width=110).print(table(found), highlight=False)
    last = [[pair[precision]["validation"] for precision in COLORS] for pair in found.values()]
    return int(any(apart(*pair) > MOST for pair in last))


if __name__ == "__main__":
    configure_runtime()
    sys.exit(main())

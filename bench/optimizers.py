"""The validation loss of AdamW and of Muon after the same steps, each at its best learning rate of a few.

    python -m bench.optimizers [--model nano] [--steps 500] [--seeds 3] [--lr 4e-3,8e-3] [--out build/optimizers]

Trains on Shakespeare with one thread. Every learning rate is tried with the first seed; the best one of each optimizer is
then run with the other seeds. A run that OUT has is not repeated.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich import box
from rich.console import Console
from rich.table import Table

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.formatting import loss, number
from handgrad.machine import configure_runtime

from .curves import STEPS, taken

OPTIMIZERS = ("AdamW", "Muon")


@dataclass(frozen=True)
class Runs:
    """The runs of a model, stored in a folder."""

    model: str
    steps: int
    folder: Path

    def validation(self, optimizer: str, lr: float, seed: int) -> float:
        """The validation loss in the end."""
        path = self.folder / f"{self.model}-{optimizer}-{lr:g}-{seed}-{self.steps}.json"
        options = {"model": self.model, "steps": self.steps, "optimizer": optimizer, "lr": lr, "seed": seed}
        return float(taken(path, hg.train, threads=1, **options)["validation"])

    def table(self, rates: Sequence[float], seeds: int) -> Table:
        made = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, title=f"{self.model}, {self.steps} steps", title_justify="left"
        )
        of_seeds = [f"seed {seed}" for seed in range(seeds)]
        for column in ("", *(f"lr {number(lr)}" for lr in rates), "best lr", *of_seeds, "mean"):
            made.add_column(column, justify="right" if column else "left")
        for optimizer in OPTIMIZERS:
            tried = {lr: self.validation(optimizer, lr, 0) for lr in rates}
            best = min(tried, key=lambda lr: tried[lr])
            found = [self.validation(optimizer, best, seed) for seed in range(seeds)]
            made.add_row(optimizer, *map(loss, tried.values()), number(best), *map(loss, found), loss(mean(found)))
        return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.optimizers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="nano", help="a preset (default: nano)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each run (default: {STEPS})")
    parser.add_argument("--seeds", type=int, default=3, help="runs at the best learning rate (default: 3)")
    parser.add_argument("--lr", default="4e-3,8e-3", help="learning rates, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("build/optimizers"), help="folder for the losses of all runs")
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        runs = Runs(options.model, options.steps, options.out)
        made = runs.table([float(lr) for lr in options.lr.split(",")], options.seeds)
    except (HandgradError, ValueError) as mistake:
        parser.error(str(mistake))
    Console(width=110).print(made, highlight=False)
    return 0


if __name__ == "__main__":
    configure_runtime()
    sys.exit(main())

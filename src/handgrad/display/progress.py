"""How a run is shown: live on a terminal, plain lines elsewhere."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.table import Table
from rich.text import Text

from .. import adapters
from ..formatting import clock, number, percent, plural, size
from ..text.examples import Examples, Summary
from ..text.tokenizer import Tokenizer
from ..training.job import Job
from .examples import report as examples_report

T = TypeVar("T")
TICKS = "▁▂▃▄▅▆▇█"


class Lines:
    """One line for each thing that happened: for logs."""

    def __init__(self, console: Console):
        self.console = console
        self.job: Job | None = None

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def examples(self, summary: Summary, examples: Examples, tokenizer: Tokenizer) -> None:
        for part in examples_report(summary, examples, tokenizer, min(100, shutil.get_terminal_size().columns)):
            self.console.print(part)

    def reading(self, total: int) -> Callable[[int], None]:
        return lambda characters: None

    def begin(self, job: Job) -> None:
        self.job = job
        for line in describe(job):
            self.say(line)

    def show(self, record: dict[str, Any]) -> None:
        if "val_loss" in record:
            self.say(f"step {record['step']:>7,}  validation loss {record['val_loss']:.4f}")
        else:
            self.say(
                f"step {record['step']:>7,}  loss {record['loss']:.4f}  lr {number(record['lr'])}"
                f"  |∂| {_number(record['grad_norm'], '.3f')}  {record['tokens_per_second']:,.0f} tokens/s"
                f"  {_percent(record.get('mfu'))} of matmul peak  {size(record['memory'])}"
            )

    def end(self) -> None:
        pass


class Silent(Lines):
    """For every process but the first."""

    def say(self, text: str) -> None:
        pass

    def examples(self, summary: Summary, examples: Examples, tokenizer: Tokenizer) -> None:
        pass


class Board(Lines):
    """A table that changes in place, with a small curve of the loss."""

    def __init__(self, console: Console):
        super().__init__(console)
        self.losses: list[float] = []
        self.latest: dict[str, Any] = {}
        self.evaluations: list[tuple[int, float]] = []
        self.sample = ""
        self.live: Live | None = None
        self.bar: Progress | None = None

    def reading(self, total: int) -> Callable[[int], None]:
        columns = (TextColumn("reading the text"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console, transient=True)
        task = self.bar.add_task("", total=total)
        self.bar.start()
        return lambda characters: self.bar.advance(task, characters) if self.bar is not None else None

    def say(self, text: str) -> None:
        self._close_bar()
        super().say(text)

    def examples(self, summary: Summary, examples: Examples, tokenizer: Tokenizer) -> None:
        self._close_bar()
        super().examples(summary, examples, tokenizer)

    def begin(self, job: Job) -> None:
        self._close_bar()
        super().begin(job)
        self.live = Live(self._draw(), console=self.console, refresh_per_second=4, transient=False)
        self.live.start()

    def show(self, record: dict[str, Any]) -> None:
        if "val_loss" in record:
            self.evaluations.append((record["step"], record["val_loss"]))
            self.sample = record["sample"]
        else:
            self.latest = record
            self.losses.append(record["loss"])
        if self.live is not None:
            self.live.update(self._draw())

    def end(self) -> None:
        self._close_bar()
        if self.live is not None:
            self.live.stop()

    def _close_bar(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _draw(self) -> Panel:
        assert self.job is not None
        r, job = self.latest, self.job
        facts = Table(box=None, show_header=False, pad_edge=False)
        for _ in range(3):
            facts.add_column(style="dim", no_wrap=True)
            facts.add_column(no_wrap=True, min_width=9)
        of = f" of {job.recipe.steps:,}" if job.recipe.steps else ""
        best = min((loss for _, loss in self.evaluations), default=None)
        cells = [
            ("step", f"{r.get('step', job.step):,}{of}"),
            ("loss", _number(r.get("loss"), ".4f")),
            ("validation", _number(self.evaluations[-1][1] if self.evaluations else None, ".4f")),
            ("learning rate", number(r["lr"]) if r else "–"),
            ("gradient norm", _number(r.get("grad_norm"), ".3f")),
            ("best", _number(best, ".4f")),
            ("tokens/s", _number(r.get("tokens_per_second"), ",.0f")),
            ("of matmul peak", _percent(r.get("mfu"))),
            ("peak memory", size(r["memory"]) if r else "–"),
        ]
        for i in range(0, 9, 3):
            facts.add_row(*(part for cell in cells[i : i + 3] for part in cell))
        width = max(10, self.console.width - 6)
        ahead = self._left()
        left = f"time left {clock(ahead) if ahead is not None else '–'}"
        curve = Text(sparkline(self.losses, width), style="dark_orange3")
        parts: list[Table | Text] = [facts, curve, Text(left, style="dim")]
        if self.sample:
            shown = self.sample.replace("\n", " ⏎ ")
            parts.append(Text(shown[: 2 * width], style="italic", overflow="ellipsis"))
        return Panel(Group(*parts), title="training", box=box.ROUNDED, border_style="dim")

    def _left(self) -> float | None:
        assert self.job is not None
        done = self.job.progress
        return (1 - done) / done * self.job.seconds if done > 0 else None


def describe(job: Job) -> list[str]:
    o, r, m = job.options, job.recipe, job.model.config
    parameters = list(job.model.parameters())
    count, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    until = plural(r.steps, "step") if r.steps else plural(r.minutes or 0, "minute")
    part = f"; {trained:,} of them train ({percent(trained / count)})" if trained < count else ""
    if job.adapter_ranks:
        count -= sum(p.numel() for adapter in adapters.adapters_of(job.model).values() for p in adapter.factors())
        part = f"; {trained:,} beside them train ({percent(trained / count)})"
    shape = f"{plural(m.n_blocks, 'block')} of width {m.d_model:,}, context {m.n_context:,}"
    return [
        f"model: {plural(count, 'parameter')}, {shape}{part}",
        f"training: {until} of {job.training.describe_size(job.batch)}, {o.optimizer} at {number(r.lr)}, {o.dtype}",
    ]


def sparkline(values: list[float], width: int) -> str:
    """The values as a row of small bars, averaged into as many as fit."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    return "".join(TICKS[round((v - low) / (high - low) * 7) if high > low else 0] for v in means)


def _number(x: float | None, form: str) -> str:
    return "–" if x is None else format(x, form)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def watch(what: str) -> Callable[[Sequence[T]], Iterable[T]]:
    """A progress bar on stderr around a sequence, gone when it is done."""
    err = Console(stderr=True, emoji=False)
    return lambda sequence: track(sequence, what, console=err, transient=True) if err.is_terminal else sequence

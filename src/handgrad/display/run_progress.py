"""The progress of a run: a live panel on a terminal, plain lines elsewhere."""

import shutil
from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .. import lora
from ..errors import for_command_line
from ..formatting import clock, count, loss, number, percent, plural, size
from ..text.examples import Examples, Summary
from ..text.tokenizer import Tokenizer
from ..training.job import Job
from ..training.loop import Sample
from .data_summary import report as examples_report

TICKS = "▁▂▃▄▅▆▇█"


class Lines:
    """Prints one line per event, for logs and pipes."""

    def __init__(self, console: Console, named: Callable[[str], str] = for_command_line):
        self.console, self.named = console, named  # how options are called
        self.job: Job | None = None

    def say(self, text: str) -> None:
        self.console.print(self.named(text), highlight=False, soft_wrap=True, markup=False)

    def examples(self, summary: Summary, examples: Examples, tokenizer: Tokenizer) -> None:
        width = min(100, shutil.get_terminal_size().columns)
        for part in examples_report(summary, examples, tokenizer, width, self.named):
            self.console.print(part)

    def reading(self, total: int) -> Callable[[int], None]:
        return lambda characters: None

    def begin(self, job: Job) -> None:
        self.job = job
        for line in describe(job):
            self.say(line)

    def show(self, record: dict[str, Any]) -> None:
        if "val_loss" in record:
            self.say(f"step {record['step']:>6,}  validation loss {loss(record['val_loss'])}")
        else:
            names = (("balance_loss", "balance loss"), ("z_loss", "z-loss"))
            routers = "".join(f"  {name} {loss(record[key])}" for key, name in names if key in record)
            self.say(
                f"step {record['step']:>6,}  loss {loss(record['loss'])}{routers}  lr {number(record['lr']):<8}"
                f"  grad norm {_or_dash(number, record['grad_norm']):<6}  {count(record['tokens_per_second'])} tok/s"
                f"  {_or_dash(percent, record.get('mfu'))} of matmul peak  {size(record['memory'])}"
            )

    def end(self) -> None:
        pass


class Silent(Lines):
    """Prints nothing: for all processes but the first."""

    def say(self, text: str) -> None:
        pass

    def examples(self, summary: Summary, examples: Examples, tokenizer: Tokenizer) -> None:
        pass


class Board(Lines):
    """A live panel: the latest metrics, a curve of the loss, the latest sample."""

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
            self.sample = Sample(record["sample"], record["prompt"]).marked() if record["sample"] else ""
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
        best = min((val_loss for _, val_loss in self.evaluations), default=None)
        cells = [
            ("step", f"{r.get('step', job.step):,}{of}"),
            ("loss", _or_dash(loss, r.get("loss"))),
            ("validation", _or_dash(loss, self.evaluations[-1][1] if self.evaluations else None)),
            ("learning rate", number(r["lr"]) if r else "–"),
            ("gradient norm", _or_dash(number, r.get("grad_norm"))),
            ("best", _or_dash(loss, best)),
            ("tokens/s", _or_dash(count, r.get("tokens_per_second"))),
            ("of matmul peak", _or_dash(percent, r.get("mfu"))),
            ("peak memory", size(r["memory"]) if r else "–"),
        ]
        for i in range(0, 9, 3):
            facts.add_row(*(part for cell in cells[i : i + 3] for part in cell))
        width = max(10, self.console.width - 6)
        left = f"time left {_or_dash(clock, self._seconds_left())}"
        curve = Text(sparkline(self.losses, width), style="dark_orange3")
        parts: list[Table | Text] = [facts, curve, Text(left, style="dim")]
        if self.sample:
            shown = self.sample.replace("\n", " ⏎ ")
            parts.append(Text(shown[: 2 * width], style="italic", overflow="ellipsis"))
        return Panel(Group(*parts), title="training", box=box.ROUNDED, border_style="dim")

    def _seconds_left(self) -> float | None:
        assert self.job is not None
        done = self.job.progress
        return (1 - done) / done * self.job.seconds if done > 0 else None


def describe(job: Job) -> list[str]:
    """Lines about a job: its model, how it is trained, and what its examples have in common."""
    o, r, m = job.options, job.recipe, job.model.config
    total, trained = job.model.size, sum(p.numel() for p in job.model.parameters() if p.requires_grad)
    until = plural(r.steps, "step") if r.steps else plural(r.minutes or 0, "minute")
    part = f"; {trained:,} of them trainable ({percent(trained / total)})" if trained < total else ""
    if job.adapter_ranks:
        total -= sum(p.numel() for adapter in lora.adapters_of(job.model).values() for p in adapter.factors())
        part = f"; {trained:,} trainable in the adapter ({percent(trained / total)})"
    shape = f"{plural(m.n_blocks, 'block')} of width {m.d_model:,}, context {m.n_context:,}"
    return [
        f"model: {plural(total, 'parameter')}, {shape}{part}",
        f"training: {until} of {job.training.describe_size(job.batch)}, {o.optimizer}, lr {number(r.lr)},"
        f" {'mixed precision' if job.model.operand is not None else o.dtype}",
        *([f"data: {job.sharing}"] if job.sharing is not None else []),
    ]


def sparkline(values: list[float], width: int) -> str:
    """The values as a row of small bars, averaged so that at most `width` remain."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    return "".join(TICKS[round((v - low) / (high - low) * 7) if high > low else 0] for v in means)


def _or_dash(form: Callable[[float], str], x: float | None) -> str:
    return "–" if x is None else form(x)

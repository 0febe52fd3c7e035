"""A run of train or finetune by its options: begun or resumed, carried out, concluded."""

import math
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from rich.console import Console

from ..display.plan import plan_of_job, step_table
from ..display.progress import Board, Lines, Silent, describe
from ..errors import HandgradError, MissingError
from ..files.reading import read_text
from ..formatting import plural, seconds
from ..plan.timing import predict
from ..training.config import SHAPE, TrainOptions
from ..training.distributed import Ranks
from ..training.job import Job
from ..training.lifecycle import Prepare, Request, Result, dry_run, execute
from .options import several

C = TypeVar("C", bound=TrainOptions)
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)
OPTIONS_BYTES = 64_000  # of a file of options


def run_command(given: dict[str, Any], kind: type[C], prepare: Prepare[C]) -> None:
    """A run by the options that were typed, in every process of it; then what it came to."""
    given = {name: value for name, value in given.items() if value is not None and value != []}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    ranks = Ranks()
    try:
        only_plan = given.pop("dry_run", False)
        request = _request(given, kind, prepare)
        display: Lines = Silent(out) if not ranks.first else Board(out) if out.is_terminal else Lines(out)
        if only_plan:
            job = dry_run(request, ranks, display)
            if ranks.first:
                _print_rehearsal(job, display)
            return
        result = execute(request, ranks, display)
        if ranks.first:
            _print_result(result)
    except HandgradError as mistake:
        mistake.silent = not ranks.is_mine(str(mistake))
        raise
    finally:
        ranks.shutdown()


def _request(given: dict[str, Any], kind: type[C], prepare: Prepare[C]) -> Request[C]:
    folder, resume, file = given.pop("out", None), given.pop("resume", False), given.pop("config", None)
    from_file = _read_config(file, kind) if file is not None else {}
    folder = folder or from_file.pop("out", None)
    shape = dict(from_file.pop("shape", ())) | {name: given.pop(name) for name in SHAPE if name in given}
    options = {**from_file, **given, **({"shape": tuple(sorted(shape.items()))} if shape else {})}
    return Request(kind, prepare, options, folder, resume)


def _print_rehearsal(job: Job, display: Lines) -> None:
    """What training would be, and what it would take."""
    for line in describe(job):
        display.say(line)
    plan = plan_of_job(job)
    out.print(step_table(plan, out.width))
    if job.recipe.steps is not None:
        total = f"{plural(job.recipe.steps, 'step')}, about {seconds(job.recipe.steps * predict(plan))}"
        display.say(f"dry run: nothing was trained; {total} without evaluations")


def _print_result(result: Result) -> None:
    job, outcome = result.job, result.outcome
    if outcome.finished:
        loss = f", validation loss {outcome.val_loss:.4f}" if outcome.val_loss is not None else ""
        if outcome.val_loss is None and math.isfinite(outcome.loss):
            loss = f", loss {outcome.loss:.4f}"
        if outcome.val_loss is not None and job.best < outcome.val_loss:
            loss += f", the best {job.best:.4f}"
        early = ", because the validation loss no longer fell" if outcome.early else ""
        out.print(f"finished after {plural(outcome.step, 'step')}{early}{loss}", highlight=False)
    else:
        resume = f"handgrad {job.options.command} --resume --out {result.folder}"
        out.print(
            f"stopped after {plural(outcome.step, 'step')}; continue with: {resume}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    if result.text:
        out.rule(f"what it writes after {plural(outcome.step, 'step')}", style="dim")
        out.print(result.text, highlight=False, markup=False, soft_wrap=True)
        out.rule(style="dim")
    if result.base_was_better:
        err.print(
            f"The model was better before training: its validation loss was {job.initial:.4f}, the best after it is"
            f" {job.best:.4f}. What is delivered is the best trained step; try a smaller --lr, fewer steps or more data.",
            style="bold yellow", highlight=False,
        )  # fmt: skip
    what = "adapter" if job.model.adapter is not None else "model"
    for name, place in ((what, result.place), ("report", result.folder / "report.html")):
        out.print(f"{name:<8}{place}", highlight=False, soft_wrap=True, markup=False)


class _PlainYAML(yaml.SafeLoader):
    """Without aliases, by which a small file can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(f"line {alias.start_mark.line + 1} refers to another line by *: write it out")
        return super().compose_node(parent, index)


def _read_config(file: Path, kind: type[TrainOptions]) -> dict[str, Any]:
    """Options from a file, under the names they have on the command line."""
    if file.suffix not in (".toml", ".yaml", ".yml"):
        raise HandgradError(f"{file} must be a .toml or .yaml file")
    try:
        text = read_text(file, OPTIONS_BYTES)
        raw = tomllib.loads(text) if file.suffix == ".toml" else yaml.load(text, _PlainYAML) or {}
    except MissingError:
        raise HandgradError(f"there is no file {file}") from None
    except HandgradError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as reason:  # ValueError: dates, digits, and TOML's own
        raise HandgradError(f"{file} cannot be read: {reason}") from None
    if not isinstance(raw, dict):
        example = "steps = 500" if file.suffix == ".toml" else "steps: 500"
        raise HandgradError(f"{file} must hold options, one per line: {example}")
    hints = kind.types()
    known = set(hints) - {"shape"}
    options: dict[str, Any] = {}
    shape: dict[str, Any] = {}
    folder = None
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name == "out" and isinstance(value, str):
            folder = Path(value)
        elif name in SHAPE:
            shape[name] = value
        elif name in known and several(hints[name]):
            options[name] = tuple(value) if isinstance(value, list) else (value,)
        elif name in known:
            options[name] = _number(value) if float in (hints[name], *get_args(hints[name])) else value
        else:
            raise HandgradError(
                f"{file}: there is no option {key!r}; there are {', '.join(sorted({*known, *SHAPE, 'out'}))}"
            )
    try:
        kind.parse(options)
    except HandgradError as mistake:
        raise HandgradError(f"{file}: {mistake}") from None
    return {**options, "shape": shape, **({"out": folder} if folder else {})}


def _number(value: object) -> object:
    """YAML reads 1e-3 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value

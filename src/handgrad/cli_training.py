"""A run of train or finetune by its options: begun or resumed, carried out, concluded."""

import importlib.util
import math
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from rich.console import Console

from .cli_options import SHAPE, several
from .config import FinetuneConfig, TrainConfig
from .display import Board, Lines, Silent
from .distributed import Ranks
from .errors import HandgradError
from .files import write_folder, write_text
from .run import RUNS, Checkpoint, Run, model_folder, newest_run
from .run_report import report
from .train import Display, Job, Outcome, config_from, sample, settings_of
from .train import train as run_loop

C = TypeVar("C", bound=TrainConfig)
Prepare = Callable[[C, Ranks, Display, Checkpoint | None], Job]
out = Console(emoji=False)


def carry_out(given: dict[str, Any], kind: type[C], prepare: Prepare[C]) -> None:
    """A run by the options that were typed: prepared, then trained by the one loop; in every process of it."""
    given = {name: value for name, value in given.items() if value is not None and value != []}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    ranks = Ranks()
    try:
        _carry_out(given, kind, prepare, ranks)
    finally:
        ranks.leave()


def _carry_out(given: dict[str, Any], kind: type[C], prepare: Prepare[C], ranks: Ranks) -> None:
    folder, resume, file = given.pop("out", None), given.pop("resume", False), given.pop("config", None)
    shape = {name: given.pop(name) for name in SHAPE if name in given}
    display: Lines = Silent(out) if not ranks.first else Board(out) if out.is_terminal else Lines(out)
    checkpoint: Checkpoint | None = None
    if resume:
        found = folder or newest_run()
        if found is None:
            raise HandgradError(f"there is no run to resume in {RUNS}/: name its folder with --out")
        run = Run(found)
        settings = replace(config_from(run.settings(), kind), **_only_the_end(given, shape, file))
        ranks.together(run.hold)
        for broken in run.damaged():
            display.say(f"{broken} is damaged and is left aside")
        checkpoint = next(run.whole(), None)
        at = (
            f"step {checkpoint.step:,} ({checkpoint.folder})" if checkpoint else "the beginning: no checkpoint is there"
        )
        display.say(f"resuming {run.folder} from {at}")
    else:
        from_file = _read_config(file, kind) if file is not None else {}
        folder = folder or from_file.pop("out", None)
        shape = dict(from_file.pop("shape", ())) | shape
        settings = kind(**{**from_file, **given, "shape": tuple(sorted(shape.items()))})
        run = Run(Path(ranks.agree(lambda: str(folder or _next_run(settings.model)))))
        ranks.together(run.check_free)
    if settings.tensorboard:
        _need_tensorboard()
    try:
        job = prepare(settings, ranks, display, checkpoint)
        if settings.patience is not None and job.validation is None:
            raise HandgradError("--patience needs examples to validate on: give --val-share or --val-data")
        if resume and job.ended:
            remedy = "make it longer with --steps, --epochs or --minutes"
            if job.progress < 1:
                remedy = "be more patient with --patience"
            raise HandgradError(f"{run.folder} is at step {job.step:,} already, and ends there: {remedy}")
        ranks.together(lambda: _begin(job, run, resume))
        display.begin(job)
        outcome = run_loop(job, run, ranks, _tensorboard(run, display) if job.config.tensorboard else display)
    finally:
        display.end()
        run.release()
    if ranks.first:
        _conclude(job, run, outcome)


def _begin(job: Job, run: Run, resume: bool) -> None:
    if resume:
        run.go_on(settings_of(job), job.step if job.resumed else -1)
    else:
        run.create(settings_of(job))
        run.hold()


def _conclude(job: Job, run: Run, outcome: Outcome) -> None:
    write_text(run.folder / "report.html", report(run))
    if outcome.finished:
        loss = f", validation loss {outcome.val_loss:.4f}" if outcome.val_loss is not None else ""
        if math.isfinite(job.best) and outcome.val_loss is not None and job.best < outcome.val_loss:
            loss += f", the best {job.best:.4f}"
        early = ", because the validation loss no longer fell" if outcome.early else ""
        out.print(f"finished after {outcome.step:,} steps{early}{loss}", highlight=False)
    else:
        resume = f"handgrad {job.config.command} --resume --out {run.folder}"
        out.print(
            f"stopped after {outcome.step:,} steps; go on with: {resume}", highlight=False, soft_wrap=True, markup=False
        )
    written = sample(job)
    if written:
        out.rule(f"what it writes after {outcome.step:,} steps", style="dim")
        out.print(written, highlight=False, markup=False, soft_wrap=True)
        out.rule(style="dim")
    places = [("report", run.folder / "report.html")]
    if isinstance(job.config, FinetuneConfig):
        places.append(("model" if job.config.full else "adapter", _deliver(job, run)))
    else:
        places.append(("model", outcome.checkpoint))
    for what, place in reversed(places):
        out.print(f"{what:<8}{place}", highlight=False, soft_wrap=True, markup=False)


def _deliver(job: Job, run: Run) -> Path:
    """The best checkpoint without what only training needs, under a name that does not change."""
    best = model_folder(run.folder)
    place = run.folder / ("model" if job.model.adapter is None else "adapter")

    def fill(partial: Path) -> None:
        for file in best.iterdir():
            if file.name not in ("optimizer.safetensors", "training.json"):
                shutil.copy2(file, partial / file.name)

    write_folder(place, fill)
    return place


def _only_the_end(given: dict[str, Any], shape: dict[str, int], file: Path | None) -> dict[str, Any]:
    """A run that goes on may be made longer or watched differently; what it computes stays as it was."""
    free = {
        "steps",
        "epochs",
        "minutes",
        "log_every",
        "eval_every",
        "save_every",
        "keep",
        "patience",
        "sample_tokens",
        "tensorboard",
    }
    fixed = sorted((set(given) | set(shape)) - free)
    if fixed or file is not None:
        what = "--config" if file is not None else f"--{fixed[0].replace('_', '-')}"
        raise HandgradError(f"{what} cannot change when a run is resumed: leave it out, or begin a new run")
    lengths = {name: None for name in ("steps", "epochs", "minutes") if {"steps", "epochs", "minutes"} & set(given)}
    return lengths | given


def _read_config(file: Path, kind: type[TrainConfig]) -> dict[str, Any]:
    """Options from a file, under the names they have on the command line."""
    if not file.is_file():
        raise HandgradError(f"there is no file {file}")
    if file.suffix not in (".toml", ".yaml", ".yml"):
        raise HandgradError(f"{file} must be a .toml or .yaml file")
    try:
        text = file.read_text(encoding="utf-8")
        raw = tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text) or {}
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as reason:
        raise HandgradError(f"{file} cannot be read: {reason}") from None
    if not isinstance(raw, dict):
        example = "steps = 500" if file.suffix == ".toml" else "steps: 500"
        raise HandgradError(f"{file} must hold options, one per line: {example}")
    hints = get_type_hints(kind)
    known = {f.name for f in fields(kind)} - {"shape"}
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
        kind(**options)
    except HandgradError as mistake:
        raise HandgradError(f"{file}: {mistake}") from None
    return {**options, "shape": shape, **({"out": folder} if folder else {})}


def _number(value: object) -> object:
    """YAML reads 1e-3 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _next_run(model: str) -> Path:
    name = Path(model).name or "run"
    return next(RUNS / f"{name}-{i}" for i in range(1, 1 << 30) if not (RUNS / f"{name}-{i}").exists())


class _Both:
    """What the display is told, TensorBoard is told as well."""

    def __init__(self, display: Lines, writer: Any):
        self.display, self.writer = display, writer

    def show(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(name, value, record["step"])
        self.writer.flush()
        self.display.show(record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.display, name)


def _need_tensorboard() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise HandgradError("--tensorboard needs the package tensorboard: pip install tensorboard")


def _tensorboard(run: Run, display: Lines) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return _Both(display, SummaryWriter(str(run.folder / "tensorboard")))

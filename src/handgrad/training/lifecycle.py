"""The life of a run: find its folder, lock it, create it or continue it, train, conclude.

The same for `train` and `finetune`, from the command line and from Python. The first process decides and writes; the
others learn its decisions. The order is what makes a run safe to kill at any moment: lock, then run.json, then work, then
the conclusion (report, adapter), which is repeated whenever a run that has ended is resumed.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..errors import HandgradError
from ..files import manifest
from ..files.atomic import write_folder, write_text
from ..files.reading import check_unicode
from ..formats.run_folder import OPTIMIZER, RUNS, Checkpoint, newest_run
from ..model.gpt import GPT
from . import tensorboard
from .config import TrainOptions
from .distributed import Ranks
from .job import Display, Job, settings_of
from .loop import Outcome, sample, train
from .report import report
from .run import LockedError, Run

C = TypeVar("C", bound=TrainOptions)
Prepare = Callable[[C, Ranks, Display, Checkpoint | None], Job]
LENGTHS = ("steps", "epochs", "minutes")
# what may change when a run is resumed: how long it is and how it is watched, not what it computes
FREE = {*LENGTHS, "log_every", "eval_every", "save_every", "keep", "patience", "sample_tokens", "tensorboard"}
PATHS = {"data", "val_data", "model", "chat_template"}


@dataclass(frozen=True)
class Request(Generic[C]):
    """What a user asks for: fields of a configuration, by name, and what to do with them."""

    kind: type[C]
    prepare: Prepare[C]
    options: dict[str, Any] = field(default_factory=dict)
    out: Path | None = None  # the next free folder in runs/ unless given
    resume: bool = False  # create the run, or continue it if it is there


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path
    job: Job
    outcome: Outcome
    path: Path  # of the model or the adapter
    text: str  # what the model writes, "" if it was not asked to

    @property
    def val_loss(self) -> float | None:
        """Of the model or adapter in `path`."""
        return self.job.best if math.isfinite(self.job.best) else None

    @property
    def model(self) -> GPT:
        return self.job.model

    @property
    def base_was_better(self) -> bool:
        return self.job.initial < self.job.best < math.inf


@dataclass(frozen=True)
class _Start:
    """What the first process found in the folder and decided."""

    folder: str
    fresh: bool
    settings: dict[str, Any]
    checkpoint: str | None
    says: list[str]


def dry_run(request: Request[C], ranks: Ranks, display: Display) -> Job:
    """Prepare everything and stop: the data is read, the model made, nothing is written but the cache."""
    options = request.kind.parse(request.options)
    if request.out is not None:
        _check_free(Run(request.out), request.resume)
    return request.prepare(options, ranks, display, None)


def execute(request: Request[C], ranks: Ranks, display: Display) -> Result:
    """Create the run, or continue it, train and conclude, in every process."""
    if request.options.get("tensorboard"):
        tensorboard.check_installed()
    locked: list[Run] = []

    def enter() -> str:
        run, start = _enter(request)
        locked.append(run)
        return json.dumps(asdict(start))

    start = _Start(**json.loads(ranks.broadcast(enter)))
    run = locked[0] if ranks.first else Run(Path(start.folder))
    fresh = start.fresh
    try:
        for line in start.says:
            display.say(line)
        options = _options(request, start)
        checkpoint = run.checkpoint(Path(start.checkpoint), contents=False) if start.checkpoint else None
        job = request.prepare(options, ranks, display, checkpoint)
        if options.patience is not None and job.validation is None:
            raise HandgradError("--patience needs examples to validate on: give --val-share or --val-data")
        settings = {**start.settings, **settings_of(job)}
        _check_same_data(start.settings, settings, run.folder)
        _check_not_shorter(request, job, start)
        ranks.run_on_first(lambda: _begin(run, job, settings))
        fresh = False
        if job.ended:
            outcome = Outcome(job.step, True, job.progress < 1, math.nan, None)
        else:
            if options.tensorboard and ranks.first:
                display = tensorboard.WithTensorBoard(display, run.folder)
            display.begin(job)
            outcome = train(job, run, ranks, display)
        path = Path(ranks.broadcast(lambda: str(conclude(job, run))))
        return Result(run.folder, job, outcome, path, sample(job) if ranks.first else "")
    finally:
        display.end()
        if ranks.first:
            run.abandon() if fresh else run.release()


def _enter(request: Request[C]) -> tuple[Run, _Start]:
    """In the first process: find the folder, lock it, look at what is there, and write run.json of a new run."""
    request.kind.parse(request.options)  # wrong options are named before anything is written
    for name, value in {**request.options, "out": str(request.out or "")}.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                check_unicode(text, f"--{name.replace('_', '-')}")
    resume = request.resume or _is_restart()
    run = _locked(request, resume)
    fresh = run.is_empty()
    if not fresh and not resume:
        run.release()
        raise HandgradError(f"{run.folder} was started by another process just now: choose another --out")
    try:
        if fresh:
            says = [f"{run.folder} holds no run yet: starting one"] if request.resume and request.out else []
            given = json.loads(json.dumps(request.options))
            settings = {"command": request.kind.command, "launch": _launch(), "given": given}
            run.sweep()
            run.create(settings)
            settings = run.settings()
            found = None
        else:
            settings = run.settings()
            if settings.get("command") != request.kind.command:
                raise HandgradError(
                    f"{run.folder} was started by handgrad {settings.get('command')}: resume it with that command"
                )
            _check_fixed(request, settings)
            found, reasons = run.newest()
            run.sweep()
            says = [f"left aside: {reason}" for reason in reasons]
            if (damage := run.damage()) is not None:
                says.append(f"{damage}; its settings are taken from the newest checkpoint")
            at = f"step {found.step:,} ({found.folder})" if found else "the beginning: it has no checkpoint"
            says.append(f"resuming {run.folder} from {at}")
            for folder in run.folders():
                if found and folder > found.folder:
                    run.set_aside(folder)
    except BaseException:
        run.abandon() if fresh else run.release()
        raise
    return run, _Start(str(run.folder), fresh, settings, str(found.folder) if found else None, says)


def _locked(request: Request[C], resume: bool) -> Run:
    """The folder that is meant, locked."""
    if request.out is not None:
        run = Run(request.out)
        _check_free(run, resume)
        run.lock()
        return run
    if resume:
        found = newest_run(launch=None if request.resume else _launch())
        if found is not None:
            run = Run(found)
            run.lock()
            return run
        if request.resume:
            raise HandgradError(f"there is no run to resume in {RUNS}/: name its folder with --out")
    name = Path(str(request.options.get("model", request.kind.model))).name or "run"
    for i in range(1, 1 << 30):
        run = Run(RUNS / f"{name}-{i}")
        if run.folder.exists():
            continue
        with contextlib.suppress(LockedError):  # another process has just taken this name
            run.lock()
            return run
    raise AssertionError("unreachable")


def _check_free(run: Run, resume: bool) -> None:
    """Raise, before anything is touched, if a run cannot be created or continued in this folder."""
    if not run.folder.exists() or (run.folder.is_dir() and run.is_empty()):
        return
    is_run = run.folder.is_dir() and ((run.folder / "run.json").exists() or bool(run.folders()))
    if not is_run:
        raise HandgradError(f"{run.folder} exists already and is not the folder of a run: choose another --out")
    if not resume:
        raise HandgradError(f"{run.folder} exists already: choose another --out, or continue it with --resume")


def _is_restart() -> bool:
    """Whether torchrun has started this group again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) > 0


def _launch() -> str | None:
    return os.environ.get("TORCHELASTIC_RUN_ID")


def _options(request: Request[C], start: _Start) -> C:
    """The configuration of the run, with what the user may change."""
    recorded = _from_json(start.settings.get("training") or start.settings["given"])
    changes = {name: value for name, value in request.options.items() if name in FREE}
    if set(changes) & set(LENGTHS):
        recorded |= dict.fromkeys(LENGTHS)
    try:
        return request.kind.parse({**recorded, **changes})
    except TypeError as reason:
        raise HandgradError(f"{start.folder}/run.json does not describe a run of this version: {reason}") from None


def _from_json(options: dict[str, Any]) -> dict[str, Any]:
    raw = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    if "shape" in raw:
        raw["shape"] = tuple((name, value) for name, value in raw["shape"])
    return raw


def _check_fixed(request: Request[C], settings: dict[str, Any]) -> None:
    """Options that are given again must be what they were."""
    for name in request.options:
        if name not in FREE and not _unchanged(request, name, settings):
            what = f"--{name.replace('_', '-')}" if name != "shape" else "the shape of the model"
            raise HandgradError(f"{what} cannot change when a run is resumed: leave it out, or start a new run")


def _unchanged(request: Request[C], name: str, settings: dict[str, Any]) -> bool:
    """Whether an option is what the run was started with, or what that was resolved to."""
    value = json.loads(json.dumps(request.options[name]))
    before = [settings.get("given", {}).get(name), (settings.get("training") or {}).get(name)]
    return value in before or (name in PATHS and _absolute(value) in map(_absolute, before))


def _absolute(value: Any) -> list[str]:
    return [str(Path(x).expanduser().absolute()) for x in (value if isinstance(value, list) else [value]) if x]


def _check_same_data(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    for what, name in (("tokens", "data"), ("validation", "data for validation")):
        if before.get(what, now[what]) != now[what]:
            raise HandgradError(f"the {name} is not what {folder} began with: bring it back, or start a new run")


def _check_not_shorter(request: Request[C], job: Job, start: _Start) -> None:
    """A run that has ended can be concluded again, or made longer, but not shorter."""
    changed = [n for n in (*LENGTHS, "patience") if n in request.options and not _unchanged(request, n, start.settings)]
    planned = (start.settings.get("training") or {}).get("steps")
    if "steps" in changed and planned is not None and request.options["steps"] < planned:
        raise HandgradError(f"{start.folder} runs until step {planned:,}: --steps can only make it longer")
    if job.ended and changed:
        remedy = "make it longer with --steps, --epochs or --minutes" if job.progress >= 1 else "raise --patience"
        raise HandgradError(f"{start.folder} is at step {job.step:,} already, and ends there: {remedy}")


def _begin(run: Run, job: Job, settings: dict[str, Any]) -> None:
    run.configure(settings)
    run.forget_after(job.step if job.resumed else -1)


def conclude(job: Job, run: Run) -> Path:
    """Write what a run leaves for its user: report.html, and for fine-tuning the best result under a fixed name. Returns
    the folder of the model or adapter. It can be repeated at any time."""
    write_text(run.folder / "report.html", report(run), follow=False)
    run.prune(job.options.keep)
    best = run.best().folder
    if not job.options.exports_result:
        return best
    path = run.folder / ("model" if job.model.adapter is None else "adapter")

    def fill(partial: Path) -> None:
        for file in best.iterdir():
            if file.name not in (OPTIMIZER, manifest.FILE):
                shutil.copyfile(file, partial / file.name)
        manifest.write(partial)

    write_folder(path, fill, follow=False)
    return path

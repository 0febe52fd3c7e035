"""The life of a run: choose and lock its folder, create or resume it, train, conclude.

The same for `train` and `finetune`, from the command line and from Python. The first process decides and writes; the
others receive its decisions. The order makes a run safe to kill at any time: lock, run.json, training, then the conclusion
(report and result), which is repeated whenever a finished run is resumed.
"""

import contextlib
import glob
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..checks import MIXED
from ..errors import HandgradError, option
from ..files import manifest
from ..files.atomic import write_folder, write_text
from ..files.reading import check_unicode
from ..formats.run_folder import OPTIMIZER, RUNS, Checkpoint, newest_run
from ..kernels import library, mixed_products
from ..lora import gguf_export
from ..model.gpt import GPT
from ..model.precision import why_not_mixed, without_mixing
from ..per_example.outliers import Outlying
from . import checkpoint as checkpoint_files
from . import example_report, tensorboard
from .config import LENGTH_OPTIONS, VALIDATION, TrainOptions
from .distributed import Ranks
from .job import Display, Job, settings_of
from .loop import Outcome, Sample, sample, train
from .run import LockedError, Run
from .run_report import report
from .threads import Threads

C = TypeVar("C", bound=TrainOptions)
Prepare = Callable[[C, Ranks, Display, Checkpoint | None], Job]
LENGTHS = ("steps", "epochs", "minutes")
GGUF_ADAPTER = "adapter.gguf"
# options that may change on resume, because they do not change what is computed: length, logging, threads, waiting
FREE = {
    *LENGTHS,
    "log_every",
    "eval_every",
    "save_every",
    "keep",
    "patience",
    "sample_tokens",
    "tensorboard",
    "threads",
    "follow_load",
    "peer_timeout",
}
FLOAT32 = "float32"  # recorded instead of what multiplies where mixed precision is not possible
PATHS = {"data", "val_data", "model", "chat_template"}


@dataclass(frozen=True)
class Request(Generic[C]):
    """A run that a user asks for: its options by name, and the function that prepares it."""

    kind: type[C]
    prepare: Prepare[C]
    options: dict[str, Any] = field(default_factory=dict)
    out: Path | None = None  # default: the next free folder in runs/
    resume: bool = False  # create the run, or continue it if it exists


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    folder: Path
    job: Job
    outcome: Outcome
    path: Path  # of the model or the adapter
    sample: Sample  # of the model; empty if none was asked for
    outlying: Outlying | None = None  # examples that fit the others least, if measured

    @property
    def val_loss(self) -> float | None:
        """Of the model or adapter in `path`."""
        return self.job.best if math.isfinite(self.job.best) else None

    @property
    def model(self) -> GPT:
        return self.job.model

    @property
    def text(self) -> str:
        """The sample, its prompt included."""
        return self.sample.text

    @property
    def base_was_better(self) -> bool:
        return self.job.initial < self.job.best < math.inf


@dataclass(frozen=True)
class _Start:
    """What the first process found in the folder and decided, for all processes."""

    folder: str
    new: bool
    settings: dict[str, Any]
    checkpoint: str | None
    messages: list[str]


def dry_run(request: Request[C], ranks: Ranks, display: Display) -> Job:
    """Prepare the job and stop. Nothing is written except the cache of tokens."""
    options = request.kind.parse(request.options)
    if request.out is not None:
        _check_free(Run(request.out), request.resume)
    return request.prepare(options, ranks, display, None)


def execute(request: Request[C], ranks: Ranks, display: Display) -> Result:
    """Create or resume the run, train, and conclude. Called in every process."""
    if request.options.get("tensorboard"):
        tensorboard.check_installed()
    locked: list[Run] = []

    def enter() -> str:
        run, start = _enter(request)
        locked.append(run)
        return json.dumps(asdict(start))

    start = _Start(**json.loads(ranks.broadcast(enter)))
    run = locked[0] if ranks.first else Run(Path(start.folder))
    new = start.new
    try:
        for line in start.messages:
            display.say(line)
        options = _options(request, start)
        products = ""
        if options.precision == MIXED:
            here = ranks.broadcast(lambda: FLOAT32 if why_not_mixed() else mixed_products.choice())
            options, products, line = _keep_products(options, start, here)
            if line:
                display.say(line)
        ranks.set_timeout(options.peer_timeout)
        checkpoint = run.checkpoint(Path(start.checkpoint), contents=False) if start.checkpoint else None
        job = request.prepare(options, ranks, display, checkpoint)
        if options.patience is not None and job.validation is None:
            raise HandgradError(f"{option('patience')} {VALIDATION}")
        example_report.check_influence(job)
        settings = {**start.settings, **settings_of(job)}
        _check_same_data(start.settings, settings, run.folder)
        _check_not_shorter(request, job, start)
        if not job.ended:
            library.prepare(job.model.dtype, display.say)  # before steps are timed
            if job.model.operand is not None:
                library.prepare(job.model.operand, display.say)
        with (
            mixed_products.using(products),
            Threads(job, ranks, display.say, start.settings.get("threads")) as threads,
        ):
            if not job.resumed:
                settings["threads"] = threads.number  # of the first step
                if options.precision == MIXED:
                    settings["mixed_products"] = products  # what multiplies
            ranks.run_on_first(lambda: _begin(run, job, settings))
            new = False
            if job.ended:
                display.say(f"{run.folder} is complete: extend it with {LENGTH_OPTIONS}")
                outcome = Outcome(job.step, True, job.progress < 1, math.nan, None)
            else:
                if options.tensorboard and ranks.first:
                    display = tensorboard.WithTensorBoard(display, run.folder)
                display.begin(job)
                if how := threads.describe():
                    display.say(how)
                outcome = train(job, run, ranks, display, threads)
            if outcome.finished:
                ranks.run_on_first(lambda: example_report.write_influence(job, run, display.say))
            path = Path(ranks.broadcast(lambda: str(conclude(job, run))))
            job.model.text_source = str(path.absolute())
            job.model.tokenizer = job.tokenizer
            outlying = example_report.outlying(job, run) if ranks.first else None
            return Result(run.folder, job, outcome, path, sample(job) if ranks.first else Sample(), outlying)
    finally:
        display.end()
        if ranks.first:
            run.abandon() if new else run.release()


def _enter(request: Request[C]) -> tuple[Run, _Start]:
    """In the first process: choose and lock the folder, read its state, and write run.json of a new run."""
    request.kind.parse(request.options)  # raise before anything is written
    for name, value in {**request.options, "out": str(request.out or "")}.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                check_unicode(text, option(name))
    resume = request.resume or _is_restart()
    run = _locked(request, resume)
    new = run.is_empty()
    if not new and not resume:
        run.release()
        raise HandgradError(f"{run.folder} has just been created by another process: choose another {option('out')}")
    try:
        if new:
            messages = [f"{run.folder} contains no run: starting a new one"] if request.resume and request.out else []
            given = json.loads(json.dumps(request.options))
            settings = {
                "command": request.kind.command,
                "launch": _launch(),
                "given": given,
                "started_in": str(Path.cwd()),
            }
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
            messages = [f"skipped: {reason}" for reason in reasons]
            if (damage := run.damage()) is not None:
                messages.append(f"{damage}; using the settings in the newest checkpoint")
            at = f"step {found.step:,} ({found.folder})" if found else "the beginning (no checkpoint)"
            messages.append(f"resuming {run.folder} from {at}")
            for folder in run.folders():
                if found and folder > found.folder:
                    checkpoint_files.set_aside(folder)
    except BaseException:
        run.abandon() if new else run.release()
        raise
    return run, _Start(str(run.folder), new, settings, str(found.folder) if found else None, messages)


def _locked(request: Request[C], resume: bool) -> Run:
    """The requested, resumed or next free run folder, locked."""
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
            raise HandgradError(f"no run to resume in {RUNS}/: name its folder with {option('out')}")
    name = Path(str(request.options.get("model", request.kind.model))).name or "run"
    for i in range(1, 1 << 30):
        run = Run(RUNS / f"{name}-{i}")
        if run.folder.exists():
            continue
        with contextlib.suppress(LockedError):  # another process took this name
            run.lock()
            return run
    raise AssertionError("unreachable")


def _check_free(run: Run, resume: bool) -> None:
    """Raise if a run can be neither created nor continued in this folder."""
    if not run.folder.exists() or (run.folder.is_dir() and run.is_empty()):
        return
    is_run = run.folder.is_dir() and ((run.folder / "run.json").exists() or bool(run.folders()))
    if not is_run:
        raise HandgradError(f"{run.folder} exists and is not a run folder: choose another {option('out')}")
    if not resume:
        raise HandgradError(
            f"{run.folder} exists: choose another {option('out')}, or continue it with {option('resume', True)}"
        )


def _is_restart() -> bool:
    """Whether torchrun has restarted this group after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) > 0


def _launch() -> str | None:
    return os.environ.get("TORCHELASTIC_RUN_ID")


def _options(request: Request[C], start: _Start) -> C:
    """The recorded options of the run, with the changes that resuming allows."""
    training = start.settings.get("training")
    recorded = _from_json({**request.kind.unrecorded, **training} if training else start.settings["given"])
    recorded = {name: value for name, value in recorded.items() if name in request.kind.types()}
    changes = {name: value for name, value in request.options.items() if name in FREE}
    if set(changes) & set(LENGTHS):
        recorded |= dict.fromkeys(LENGTHS)
    if set(changes) & {"threads", "follow_load"}:
        recorded |= {"threads": None, "follow_load": False}
    try:
        return request.kind.parse({**recorded, **changes})
    except TypeError as reason:
        raise HandgradError(f"{start.folder}/run.json was not written by this version: {reason}") from None


def _keep_products(options: C, start: _Start, here: str) -> tuple[C, str, str]:
    """The options of a run in mixed precision, what computes its products, and a line for the user, or \"\". A new run
    computes as this machine does (`here`); a resumed one as it was started, if that is possible here."""
    started = start.settings.get("mixed_products", here)
    differ = f": the bits differ from those that {start.folder} would have where it was started"
    if line := without_mixing(options.precision):
        return options, FLOAT32, line + (differ if started != FLOAT32 else "")
    if started == FLOAT32:
        line = (
            f"{start.folder} was started on a machine without products of bfloat16, in float32: it continues in float32"
        )
        return replace(options, precision=None), "", line
    if started == mixed_products.TORCH and not mixed_products.torch_rounds():
        line = f"{start.folder} was started with torch's products of rounded operands; this machine has only ours"
        return options, mixed_products.OWN, line + differ
    return options, started, ""


def _from_json(options: dict[str, Any]) -> dict[str, Any]:
    raw = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    if "shape" in raw:
        raw["shape"] = tuple((name, value) for name, value in raw["shape"])
    return raw


def _check_fixed(request: Request[C], settings: dict[str, Any]) -> None:
    """Raise if a fixed option differs from the recorded one."""
    for name in request.options:
        if name not in FREE and not _unchanged(request, name, settings):
            what = option(name) if name != "shape" else "the model's shape"
            raise HandgradError(f"{what} cannot change when a run is resumed: leave it out, or start a new run")


def _unchanged(request: Request[C], name: str, settings: dict[str, Any]) -> bool:
    """Whether an option equals the recorded one, as given or as decided."""
    value = json.loads(json.dumps(request.options[name]))
    given, decided = settings.get("given", {}).get(name), (settings.get("training") or {}).get(name)
    if name not in PATHS:
        return value in (given, decided)
    there = Path(settings.get("started_in", "."))
    return _absolute(value, Path()) in (_absolute(given, there), _absolute(decided, there))


def _absolute(value: Any, folder: Path) -> list[str]:
    """The paths as seen from a folder; what is no file there may be the name of a model, or standard input."""
    paths = {x: folder / Path(x).expanduser() for x in (value if isinstance(value, list) else [value]) if x}
    return [str(path.resolve()) if path.exists() or glob.has_magic(x) else x for x, path in paths.items()]


def _check_same_data(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    for what, name in (("tokens", "data"), ("validation", "validation data")):
        if before.get(what, now[what]) != now[what]:
            raise HandgradError(
                f"the {name} differs from what {folder} was started with: restore it, or start a new run"
            )


def _check_not_shorter(request: Request[C], job: Job, start: _Start) -> None:
    """Raise if a resumed run would become shorter."""
    changed = [n for n in (*LENGTHS, "patience") if n in request.options and not _unchanged(request, n, start.settings)]
    planned = (start.settings.get("training") or {}).get("steps")
    if "steps" in changed and planned is not None and request.options["steps"] < planned:
        raise HandgradError(f"{start.folder} runs until step {planned:,}: {option('steps')} can only extend it")
    if job.ended and changed:
        remedy = f"extend it with {LENGTH_OPTIONS}" if job.progress >= 1 else f"raise {option('patience')}"
        raise HandgradError(f"{start.folder} is at step {job.step:,} and ends there: {remedy}")


def _begin(run: Run, job: Job, settings: dict[str, Any]) -> None:
    run.configure(settings)
    run.drop_metrics_after(job.step if job.resumed else -1)


def conclude(job: Job, run: Run) -> Path:
    """Write report.html and, for fine-tuning, copy the best result to adapter/ or model/. Returns the folder of the result.
    Safe to repeat."""
    write_text(run.folder / "report.html", report(run, example_report.sections(job, run)), follow=False)
    checkpoint_files.prune(run, job.options.keep)
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
    if job.options.gguf:
        gguf_export.write(job.model.config, path, run.folder / GGUF_ADAPTER)
    return path

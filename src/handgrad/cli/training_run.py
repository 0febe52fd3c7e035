"""A run of train or finetune, from its command-line options to the lines printed at its end."""

import math
from typing import Any, TypeVar

from ..display.example_tables import outliers_table
from ..display.plan_table import step_table
from ..display.run_progress import Board, Lines, Silent, describe
from ..errors import HandgradError
from ..formatting import duration, plural
from ..formatting import loss as loss_text
from ..machine import peak_memory
from ..plan.fit import misfit
from ..plan.thread_count import using
from ..plan.timing import forecast
from ..training.config import SHAPE, TrainOptions
from ..training.distributed import Ranks
from ..training.job import Job
from ..training.lifecycle import GGUF_ADAPTER, Prepare, Request, Result, dry_run, execute
from ..training.option_file import read_option_file
from ..training.run_plan import plan_job, saved_by_mixing
from . import console

C = TypeVar("C", bound=TrainOptions)


def run_command(given: dict[str, Any], kind: type[C], prepare: Prepare[C]) -> None:
    """Start or resume a run with the given options, in every process of it, and print its result."""
    given = {name: value for name, value in given.items() if value is not None and value != []}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    ranks = Ranks()
    try:
        only_plan = given.pop("dry_run", False)
        request = _request(given, kind, prepare)
        out = console.out
        display: Lines = Silent(out) if not ranks.first else Board(out) if out.is_terminal else Lines(out)
        if only_plan:
            runtime_bytes = peak_memory()
            job = dry_run(request, ranks, display)
            if ranks.first:
                _print_dry_run(job, display, runtime_bytes)
            return
        result = execute(request, ranks, display)
        if ranks.first:
            _print_result(result)
    except HandgradError as mistake:
        mistake.silent = not ranks.should_print(mistake)
        raise
    finally:
        ranks.shutdown()


def _request(given: dict[str, Any], kind: type[C], prepare: Prepare[C]) -> Request[C]:
    """Combine the options of the command line with those of `--config`."""
    folder, resume, file = given.pop("out", None), given.pop("resume", False), given.pop("config", None)
    from_file = read_option_file(file, kind) if file is not None else {}
    folder = folder or from_file.pop("out", None)
    shape = dict(from_file.pop("shape", ())) | {name: given.pop(name) for name in SHAPE if name in given}
    options = {**from_file, **given, **({"shape": tuple(sorted(shape.items()))} if shape else {})}
    return Request(kind, prepare, options, folder, resume)


def _print_dry_run(job: Job, display: Lines, runtime_bytes: int) -> None:
    """Print what would be trained, and its predicted cost."""
    for line in describe(job):
        display.say(line)
    plan = plan_job(job)
    with using(job.options.threads):
        predicted = forecast(plan, runtime_bytes)
    console.out.print(step_table(plan, predicted, console.out.width))
    console.warn(misfit(plan, loaded=True))
    if job.recipe.steps is not None:
        total = (
            f"{plural(job.recipe.steps, 'step')} would take about {duration(job.recipe.steps * predicted.step_seconds)}"
        )
        display.say(f"dry run, nothing was trained: {total}, without evaluations")
        console.note(saved_by_mixing(job, job.recipe.steps, job.recipe.steps * predicted.step_seconds))


def _print_result(result: Result) -> None:
    job, outcome = result.job, result.outcome
    steps = plural(outcome.step, "step")
    if outcome.finished:
        loss = f", validation loss {loss_text(outcome.val_loss)}" if outcome.val_loss is not None else ""
        if outcome.val_loss is None and math.isfinite(outcome.loss):
            loss = f", loss {loss_text(outcome.loss)}"
        if outcome.val_loss is not None and job.best < outcome.val_loss:
            loss += f", best {loss_text(job.best)}"
        early = ", because the validation loss no longer fell" if outcome.early else ""
        console.say(f"finished after {steps}{early}{loss}")
    else:
        console.say(
            f"stopped after {steps}; resume with: handgrad {job.options.command} --resume --out {result.folder}"
        )
    if result.text:
        console.out.rule(f"sample after {steps}: prompt ▸ continuation", style="dim")
        console.say(result.sample.marked())
        console.out.rule(style="dim")
    if result.base_was_better:
        console.err.print(
            f"The model was better before training: its validation loss was {loss_text(job.initial)}, the best since is"
            f" {loss_text(job.best)}. The best trained step was saved; try a smaller --lr, fewer steps or more data.",
            style="bold yellow", highlight=False,
        )  # fmt: skip
    if result.outlying is not None:
        console.out.print(outliers_table(result.outlying))
    what = "adapter" if job.model.adapter is not None else "model"
    written = [(what, result.path), ("gguf", result.folder / GGUF_ADAPTER), ("report", result.folder / "report.html")]
    for name, path in written if job.options.gguf else (written[0], written[2]):
        console.say(f"{name:<8}{path}")
    if job.options.command == "finetune":
        console.note(saved_by_mixing(job, job.step, job.seconds))

"""The commands train, generate and get."""

import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Optional, get_args, get_type_hints

import torch
import typer
import yaml
from rich.console import Console
from rich.table import Table

from . import material
from .checkpoint import load
from .config import PRESETS, SCHEDULES, TrainConfig
from .display import Board, Lines, Silent
from .distributed import Ranks
from .errors import HandgradError
from .files import write_text
from .generate import generate as write_on
from .run import Checkpoint, Run, model_folder
from .run_report import report
from .tokenizer import KINDS, read
from .train import Job, Outcome, config_from, make_job, sample, settings_of
from .train import train as run_loop

RUNS = Path("runs")
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

# Every option of `train`, by panel: what it says in --help. Its type and default are those of TrainConfig.
OPTIONS = {
    "Data": {
        "data": "Text files, folders, patterns, .jsonl, or - for standard input; may be given several times."
        " \\[default: tiny Shakespeare]",
        "text_field": "Which field of a .jsonl line is the text.",
        "tokenizer": f"{KINDS}. \\[default: chars for Shakespeare, gpt2 for GPT-2's shapes, else bytes]",
        "val_share": "Share of the text, at its end, kept for validation.",
    },
    "Model": {
        "model": f"A preset ({', '.join(PRESETS)}) or a model directory to go on from.",
        "n_blocks": "Change the preset's number of blocks.",
        "d_model": "Change its width.",
        "n_heads": "Change its number of heads.",
        "n_context": "Change the longest sequence.",
        "d_hidden": "Change the width of the feed-forward layer.",
        "dtype": "float32, float64 or bfloat16.",
    },
    "How long": {
        "steps": "So many steps. \\[default: 2000]",
        "epochs": "So many times over the data.",
        "minutes": "For so long; the learning rate follows the clock.",
    },
    "How": {
        "batch_tokens": "Tokens of a step, in whole contexts; as many as you like: they are walked in pieces."
        " \\[default: 12 contexts]",
        "lr": "Highest learning rate. \\[default: 0.5/width, at most 4e-3]",
        "min_lr": "Lowest, at the end. \\[default: a tenth of it]",
        "warmup": "Steps in which it rises. \\[default: 100, at most a tenth of the run]",
        "schedule": f"{', '.join(SCHEDULES)}.",
        "optimizer": "One of torch.optim by name.",
        "weight_decay": "On matrices only.",
        "beta1": "Of optimizers that have it.",
        "beta2": "Of optimizers that have it.",
        "clip": "Largest norm of the whole gradient; 0 for none.",
        "recompute": "none, or blocks: less memory, a third more time.",
        "update_inside": "Update each layer inside the backward pass: least memory.",
        "seed": "Of the weights and of the order of the data.",
    },
    "Watching and keeping": {
        "out": "Folder of the run. \\[default: the next free one in runs/]",
        "resume": "Go on with the run in --out, or with the newest in runs/.",
        "config": "A .toml or .yaml file with these options by name; what is typed wins.",
        "log_every": "Steps between two lines of metrics.",
        "eval_every": "Steps between two evaluations.",
        "eval_batches": "Batches of an evaluation.",
        "save_every": "Steps between two checkpoints.",
        "keep": "Checkpoints kept, besides the best.",
        "sample_tokens": "Length of what it writes at evaluations; 0 for none.",
        "tensorboard": "Write events for TensorBoard as well.",
    },
}
SHAPE = ("n_blocks", "d_model", "n_heads", "n_context", "d_hidden")
KNOWN = {f.name for f in fields(TrainConfig)} - {"shape"}


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the signature that OPTIONS and TrainConfig describe. An option that is not typed is None."""
    hints = get_type_hints(TrainConfig)
    types: dict[str, Any] = {"data": list[str], "out": Path, "config": Path} | dict.fromkeys(SHAPE, int)
    parameters = []
    for panel, options in OPTIONS.items():
        for name, text in options.items():
            flag = "--" + name.replace("_", "-")
            kind = types.get(name) or (bool if name == "resume" else hints[name])
            default = getattr(TrainConfig, name, None)
            if default is not None and default != () and not isinstance(default, bool):
                text += f" \\[default: {default:g}]" if isinstance(default, float) else f" \\[default: {default}]"
            option = typer.Option(flag, help=text, rich_help_panel=panel)
            annotation = Annotated[Optional[kind], option]  # type: ignore[valid-type]  # noqa: UP045
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


@_with_options
def train(**given: Any) -> None:
    """Train a model on text, with every gradient derived by hand.

    Without any option: a small model on tiny Shakespeare, in about a minute. The folder of the run holds checkpoints that
    open in transformers, metrics.jsonl and report.html. Ctrl-C finishes the step, saves and ends; --resume goes on exactly
    there. The same command under torchrun --nproc-per-node N -m handgrad trains in N processes.
    """
    given = {name: value for name, value in given.items() if value is not None and value != []}
    out_dir, resume, config = given.pop("out", None), given.pop("resume", False), given.pop("config", None)
    shape = {name: given.pop(name) for name in SHAPE if name in given}
    if "data" in given:
        given["data"] = tuple(given["data"])
    ranks = Ranks()
    try:
        _train(given, shape, config, out_dir, resume, ranks)
    finally:
        ranks.leave()


def _train(
    given: dict[str, Any], shape: dict[str, int], file: Path | None, folder: Path | None, resume: bool, ranks: Ranks
) -> None:
    display: Lines = Silent(out) if not ranks.first else Board(out) if out.is_terminal else Lines(out)
    checkpoint: Checkpoint | None = None
    if resume:
        run = Run(folder or _newest_run())
        settings = replace(config_from(run.settings()), **_only_the_end(given, shape, file))
        ranks.together(run.hold)
        for broken in run.damaged():
            display.say(f"{broken} is damaged and is left aside")
        checkpoint = next(run.whole(), None)
        at = (
            f"step {checkpoint.step:,} ({checkpoint.folder})" if checkpoint else "the beginning: no checkpoint is there"
        )
        display.say(f"resuming {run.folder} from {at}")
    else:
        from_file = _read_config(file) if file is not None else {}
        folder = folder or from_file.pop("out", None)
        shape = dict(from_file.pop("shape", ())) | shape
        settings = TrainConfig(**{**from_file, **given, "shape": tuple(sorted(shape.items()))})
        run = Run(Path(ranks.agree(lambda: str(folder or _next_run(settings.model)))))
        ranks.together(run.check_free)
    if settings.tensorboard:
        _need_tensorboard()
    try:
        job = make_job(settings, ranks, display, checkpoint)
        if resume and job.progress >= 1:
            remedy = "make it longer with --steps, --epochs or --minutes"
            raise HandgradError(f"{run.folder} is at step {job.step:,} already, and ends there: {remedy}")
        ranks.together(lambda: _begin(job, run, resume))
        display.begin(job)
        outcome = run_loop(job, run, ranks, _tensorboard(run, display) if job.config.tensorboard else display)
    finally:
        display.end()
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
        out.print(f"finished after {outcome.step:,} steps{loss}", highlight=False)
    else:
        resume = f"handgrad train --resume --out {run.folder}"
        out.print(
            f"stopped after {outcome.step:,} steps; go on with: {resume}", highlight=False, soft_wrap=True, markup=False
        )
    written = sample(job)
    if written:
        out.rule(f"what it writes after {outcome.step:,} steps", style="dim")
        out.print(written, highlight=False, markup=False, soft_wrap=True)
        out.rule(style="dim")
    places = f"model   {outcome.checkpoint}\nreport  {run.folder / 'report.html'}"
    out.print(places, highlight=False, soft_wrap=True, markup=False)


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
        "sample_tokens",
        "tensorboard",
    }
    fixed = sorted((set(given) | set(shape)) - free)
    if fixed or file is not None:
        what = "--config" if file is not None else f"--{fixed[0].replace('_', '-')}"
        raise HandgradError(f"{what} cannot change when a run is resumed: leave it out, or begin a new run")
    lengths = {name: None for name in ("steps", "epochs", "minutes") if {"steps", "epochs", "minutes"} & set(given)}
    return lengths | given


def _read_config(file: Path) -> dict[str, Any]:
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
    hints = get_type_hints(TrainConfig)
    options: dict[str, Any] = {}
    shape: dict[str, Any] = {}
    folder = None
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name == "out" and isinstance(value, str):
            folder = Path(value)
        elif name in SHAPE:
            shape[name] = value
        elif name == "data":
            options[name] = tuple(value) if isinstance(value, list) else (value,)
        elif name in KNOWN:
            options[name] = _number(value) if float in (hints[name], *get_args(hints[name])) else value
        else:
            raise HandgradError(
                f"{file}: there is no option {key!r}; there are {', '.join(sorted({*KNOWN, *SHAPE, 'out'}))}"
            )
    try:
        TrainConfig(**options)
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
    name = Path(model).name
    return next(RUNS / f"{name}-{i}" for i in range(1, 1 << 30) if not (RUNS / f"{name}-{i}").exists())


def _newest_run() -> Path:
    runs = [path.parent for path in RUNS.glob("*/run.json")]
    if not runs:
        raise HandgradError("there is no run to resume in runs/: name its folder with --out")
    return max(runs, key=lambda path: (path / "run.json").stat().st_mtime)


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


def generate(
    model: Annotated[Path, typer.Option(help="A model directory, or the folder of a run: its best checkpoint.")],
    prompt: Annotated[str, typer.Option(help="What to begin with.")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable token each time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among so many most probable tokens only.")] = 200,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed writes the same. \\[default: new each time]")
    ] = None,
) -> None:
    """Let a model write on from a prompt, token by token."""
    if not model.is_dir():
        raise HandgradError(
            f"{model} is not a folder: give a model directory, or the folder of a run of handgrad train"
        )
    folder = model_folder(model)
    network = load(folder)
    words = read(folder)
    ids = words.encode(prompt)
    if not ids:
        raise HandgradError("the prompt is empty: give at least one character")
    limit = network.config.n_context
    if len(ids) > limit:
        err.print(
            f"the prompt has {len(ids):,} tokens; the model sees the last {limit:,}", style="dim", highlight=False
        )
    sys.stdout.write(prompt)
    shown, written = "", list[int]()
    for piece in write_on(
        network, torch.tensor([ids]), tokens, temperature=temperature, top_k=top_k, seed=seed, stream=True
    ):
        written.append(int(piece))
        if written[-1] == words.end:
            break
        text = words.decode(written)
        if not text.endswith("\ufffd"):  # the rest of this character is still to come
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write("\n")


def get(
    name: Annotated[str | None, typer.Argument(help="What to fetch; without it, what there is.")] = None,
) -> None:
    """Fetch a corpus or a vocabulary, checked and cached; without a name, list what there is and where it is kept."""
    if name is not None:
        for file in material.get(name):
            out.print(str(file), highlight=False, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "what", "from", "here"):
        table.add_column(column)
    for key, item in material.MATERIAL.items():
        here = material.place(key)
        table.add_row(key, item.what, item.package, "yes" if here.exists() else "not yet")
    out.print(table)
    out.print(f"kept in {material.cache_folder()}", style="dim", highlight=False, soft_wrap=True)

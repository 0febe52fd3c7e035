"""The commands train, generate and get."""

import importlib.util
import inspect
import math
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar, get_args, get_type_hints

import torch
import typer
import yaml
from rich.console import Console
from rich.table import Table

from . import material
from .config import PRESETS, SCHEDULES, FinetuneConfig, TrainConfig
from .display import Board, Lines, Silent
from .distributed import Ranks
from .errors import HandgradError, MissingError
from .files import write_folder, write_text
from .generate import generate as write_on
from .models import locate, open_folder, tokenizer_of
from .reading import read_text
from .run import RUNS, Checkpoint, Run, model_folder, newest_run
from .run_report import report
from .tokenizer import KINDS
from .train import Display, Job, Outcome, config_from, make_job, sample, settings_of
from .train import train as run_loop

C = TypeVar("C", bound=TrainConfig)
Prepare = Callable[[C, Ranks, Display, Checkpoint | None], Job]
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)
OPTIONS_BYTES = 64_000  # of a file of options

# Options by panel: what they say in --help. Their types and defaults are those of the configuration.
Options = dict[str, dict[str, str]]
KEEPING = {
    "out": "Folder of the run. \\[default: the next free one in runs/]",
    "resume": "Go on with the run in --out, or with the newest in runs/.",
    "config": "A .toml or .yaml file with these options by name; what is typed wins.",
    "log_every": "Steps between two lines of metrics.",
    "eval_every": "Steps between two evaluations.",
    "eval_batches": "Batches of an evaluation, at most.",
    "patience": "End after so many evaluations without a lower validation loss. \\[default: never]",
    "save_every": "Steps between two checkpoints.",
    "keep": "Checkpoints kept, besides the best.",
    "sample_tokens": "Length of what it writes at evaluations; 0 for none.",
    "tensorboard": "Write events for TensorBoard as well.",
}
LEARNING = {
    "schedule": f"{', '.join(SCHEDULES)}.",
    "optimizer": "One of torch.optim by name.",
    "weight_decay": "On matrices only.",
    "beta1": "Of optimizers that have it.",
    "beta2": "Of optimizers that have it.",
    "clip": "Largest norm of the whole gradient; 0 for none.",
    "recompute": "none, or blocks: less memory, a third more time.",
    "update_inside": "Update each layer inside the backward pass: least memory.",
}
OPTIONS: Options = {
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
        **LEARNING,
        "seed": "Of the weights and of the order of the data.",
    },
    "Watching and keeping": KEEPING
    | {
        "log_every": "Steps between two lines of metrics. \\[default: 10]",
        "eval_every": "Steps between two evaluations. \\[default: 250]",
        "save_every": "Steps between two checkpoints. \\[default: 250]",
    },
}
SHAPE = ("n_blocks", "d_model", "n_heads", "n_context", "d_hidden")


def with_options(
    all_options: Options, config: type[TrainConfig]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the signature that the options and the configuration describe. An option not typed is None."""
    return lambda command: _with_options(command, all_options, config)


def _with_options(command: Callable[..., None], all_options: Options, config: type[TrainConfig]) -> Callable[..., None]:
    hints = get_type_hints(config)
    types: dict[str, Any] = {"out": Path, "config": Path, "resume": bool} | dict.fromkeys(SHAPE, int)
    parameters = []
    for panel, options in all_options.items():
        for name, text in options.items():
            flag = "--" + name.replace("_", "-")
            kind = types.get(name) or (list[str] if _several(hints[name]) else hints[name])
            default = getattr(config, name, None)
            if default not in (None, (), "") and not isinstance(default, bool):
                default = ",".join(default) if isinstance(default, tuple) else default
                text += f" \\[default: {default:g}]" if isinstance(default, float) else f" \\[default: {default}]"
            option = typer.Option(flag, help=text, rich_help_panel=panel)
            annotation = Annotated[Optional[kind], option]  # type: ignore[valid-type]  # noqa: UP045
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _several(hint: object) -> bool:
    return hint == tuple[str, ...]


@with_options(OPTIONS, TrainConfig)
def train(**given: Any) -> None:
    """Train a model on text, with every gradient derived by hand.

    Without any option: a small model on tiny Shakespeare, in about a minute. The folder of the run holds checkpoints that
    open in transformers, metrics.jsonl and report.html. Ctrl-C finishes the step, saves and ends; --resume goes on exactly
    there. The same command under torchrun --nproc-per-node N -m handgrad trains in N processes.
    """
    carry_out(given, TrainConfig, make_job)


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


class _PlainYAML(yaml.SafeLoader):
    """Without aliases, by which a small file can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(f"line {alias.start_mark.line + 1} refers to another line by *: write it out")
        return super().compose_node(parent, index)


def _read_config(file: Path, kind: type[TrainConfig]) -> dict[str, Any]:
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
        elif name in known and _several(hints[name]):
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


def generate(
    model: Annotated[
        str, typer.Option(help="A model directory, an adapter, or the folder of a run: its best checkpoint.")
    ],
    prompt: Annotated[str, typer.Option(help="What to begin with.")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable token each time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among so many most probable tokens only.")] = 200,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed writes the same. \\[default: new each time]")
    ] = None,
) -> None:
    """Let a model write on from a prompt, token by token."""
    folder = locate(model)
    network = open_folder(folder)
    words = tokenizer_of(folder)
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

"""Options of train, and what finetune shares with them, by panel: their help. Types and defaults are the
configuration's."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ..formatting import number
from ..model.config import PRESETS
from ..training.config import SCHEDULES, SHAPE, TrainOptions

Options = dict[str, dict[str, str]]
MODEL = (
    f"A preset ({', '.join(PRESETS)}), a model directory, the folder of a run (its best checkpoint), an adapter, or a name"
    " on the hub. A preset's bare name is the preset; ./NAME is the folder."
)
KEEPING = {
    "out": "Folder of the run. [default: the next free one in runs/]",
    "resume": "Create the run in --out, or continue it if it is there. Without --out: the newest in runs/.",
    "dry_run": "Show the data and what training would take, then stop.",
    "config": "A .toml or .yaml file with these options by name; options on the command line take precedence.",
    "log_every": "Steps between two lines of metrics.",
    "eval_every": "Steps between two evaluations.",
    "eval_batches": "Largest number of batches in an evaluation.",
    "patience": "Stop after this many evaluations without a lower validation loss. [default: never]",
    "save_every": "Steps between two checkpoints.",
    "keep": "Checkpoints kept, besides the best.",
    "sample_tokens": "Length of the sample written at evaluations; 0 for none.",
    "tensorboard": "Write events for TensorBoard as well.",
}
LEARNING = {
    "schedule": f"Learning-rate schedule: {', '.join(SCHEDULES)}.",
    "optimizer": "An optimizer of torch.optim, by name.",
    "weight_decay": "Weight decay, on matrices only.",
    "beta1": "First momentum coefficient, for optimizers that have it.",
    "beta2": "Second momentum coefficient, for optimizers that have it.",
    "clip": "Largest norm of the whole gradient; 0 for no clipping.",
    "recompute": "none, or blocks: recompute blocks in the backward pass, for less memory and a third more time.",
    "update_inside": "Update each layer inside the backward pass: least memory.",
}
TRAIN: Options = {
    "Data": {
        "data": "Text files, folders, patterns, .jsonl files, or - for standard input; may be given several times."
        " [default: tiny Shakespeare]",
        "text_field": "Field of a .jsonl line that holds the text.",
        "tokenizer": "bytes, chars, gpt2, bpe:N or a tokenizer.json. [default: chars for Shakespeare, gpt2 for GPT-2's"
        " shapes, else bytes]",
        "val_share": "Share of the text, at its end, kept for validation.",
    },
    "Model": {
        "model": f"A preset ({', '.join(PRESETS)}), or a model directory or the folder of a run to start from. A preset's"
        " bare name is the preset; ./NAME is the folder.",
        "n_blocks": "Number of blocks, in place of the preset's.",
        "d_model": "Width of the stream.",
        "n_heads": "Number of heads.",
        "n_context": "Longest sequence.",
        "d_hidden": "Width of the feed-forward layer.",
        "dtype": "float32, float64 or bfloat16.",
    },
    "Length": {
        "steps": "Number of optimizer steps. [default: 2000]",
        "epochs": "Passes over the data.",
        "minutes": "Time budget in minutes; the schedule follows wall-clock time.",
    },
    "Optimization": {
        "batch_tokens": "Tokens of a step, in whole contexts; any number: they are processed in pieces."
        " [default: 12 contexts]",
        "lr": "Highest learning rate. [default: 0.5/width, at most 0.004]",
        "min_lr": "Learning rate at the end. [default: a tenth of --lr]",
        "warmup": "Steps in which the learning rate rises. [default: 100, at most a tenth of the run]",
        **LEARNING,
        "seed": "Seed of the weights and of the order of the data.",
    },
    "Logging and checkpoints": KEEPING
    | {
        "log_every": "Steps between two lines of metrics. [default: 10]",
        "eval_every": "Steps between two evaluations. [default: 250]",
        "save_every": "Steps between two checkpoints. [default: 250]",
    },
}


def with_options(
    all_options: Options, config: type[TrainOptions]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the signature that the options and the configuration describe. An option not typed is None."""
    return lambda command: _with_options(command, all_options, config)


def _with_options(
    command: Callable[..., None], all_options: Options, config: type[TrainOptions]
) -> Callable[..., None]:
    hints, defaults = config.types(), config().flat()
    types: dict[str, Any] = {"out": Path, "config": Path, "resume": bool, "dry_run": bool} | dict.fromkeys(SHAPE, int)
    parameters = []
    for panel, options in all_options.items():
        for name, text in options.items():
            flag = "--" + name.replace("_", "-")
            kind = types.get(name) or (list[str] if several(hints[name]) else hints[name])
            default = defaults.get(name)
            if default not in (None, (), "") and not isinstance(default, bool):
                shown = ",".join(default) if isinstance(default, tuple) else default
                text += f" [default: {number(shown) if isinstance(shown, float) else shown}]"
            option = typer.Option(flag, help=text, rich_help_panel=panel)
            annotation = Annotated[Optional[kind], option]  # type: ignore[valid-type]  # noqa: UP045
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def several(hint: object) -> bool:
    return hint == tuple[str, ...]

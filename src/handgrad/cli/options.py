"""Options shared by several commands: their help texts, and the signature of train and finetune.

Types and defaults come from the options' classes in `training.config`.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ..formatting import number
from ..model.config import PRESETS
from ..training.config import SCHEDULES, SHAPE, TrainOptions, is_list

Options = dict[str, dict[str, str]]  # help text by option, by panel

NewFolder = Annotated[Path, typer.Option("--out", help="Folder to write; it must not exist yet.")]
FORMAT = typer.Option(
    help="How prompts are formatted, chat or raw: as messages in the model's chat template, or as they are. [default: as the"
    " model was fine-tuned; otherwise chat if it has a chat template]"
)
StoredDtype = Annotated[
    str | None, typer.Option(help="Data type to store: float64, float32, bfloat16 or float16. [default: unchanged]")
]
PRECISION = (
    "Precision: float32, or mixed, which is faster on processors that multiply bfloat16: products of operands rounded to it,"
    " everything else in float32. [default: that of the data type]"
)
Precision = Annotated[str | None, typer.Option("--precision", help=PRECISION)]
MODEL = (
    f"A preset ({', '.join(PRESETS)}), a model directory, a .gguf file, one of `handgrad get`, a run folder (its best"
    " checkpoint), an adapter, or a name on the hub. A preset's bare name is the preset; ./NAME is the folder."
)
PRESET = "[default: the preset's]"
MODEL_SHAPE = {
    "n_blocks": f"Number of blocks. {PRESET}",
    "d_model": f"Width of the residual stream. {PRESET}",
    "n_heads": f"Number of attention heads. {PRESET}",
    "n_context": f"Context length in tokens. {PRESET}",
    "d_hidden": f"Width of the feed-forward layer. {PRESET}",
}
COMMON_OPTIMIZATION = {
    "schedule": f"Learning-rate schedule: {', '.join(SCHEDULES)}.",
    "optimizer": "Name of an optimizer of torch.optim; with Muon, which is for the blocks' matrices, AdamW for the rest.",
    "weight_decay": "Weight decay, applied to matrices only.",
    "beta1": "Decay rate of the first moment (momentum), if the optimizer has one. Muon's own is 0.95.",
    "beta2": "Decay rate of the second moment, if the optimizer has one.",
    "clip": "Maximum norm of the gradient; 0 for no clipping.",
    "balance_loss": "Coefficient of the balance loss of a mixture's routers; 0 for none. [default: the model's]",
    "z_loss": "Coefficient of the z-loss of a mixture's routers; 0 for none. [default: the model's]",
    "recompute": "Activations to recompute in the backward pass: none, or blocks (less memory, a third more time).",
    "update_inside": "Update each layer inside the backward pass: least memory.",
    "threads": "Number of threads. [default: a resumed run's, else OMP_NUM_THREADS, else measured before the first step]",
    "follow_load": "Measure the number of threads again while training. Results may then differ in their last bits.",
}
COMMON_LOGGING = {
    "out": "Run folder. [default: the next free name in runs/]",
    "resume": "Continue the run in --out, or start it if there is none. Without --out: the newest run in runs/.",
    "dry_run": "Show the data and the predicted cost of training, then stop.",
    "config": "A .toml or .yaml file with these options by name, except --resume, --dry-run and --config; the"
    " command line takes precedence.",
    "log_every": "Steps between log lines.",
    "eval_every": "Steps between evaluations.",
    "eval_batches": "Maximum number of batches per evaluation.",
    "patience": "Evaluations without a lower validation loss after which to stop. [default: never]",
    "save_every": "Steps between checkpoints.",
    "keep": "Number of checkpoints to keep, besides the best.",
    "sample_tokens": "Length in tokens of the sample generated at each evaluation; 0 for none.",
    "peer_timeout": "Seconds that a process of a group waits for another one that does not answer.",
    "tensorboard": "Also write TensorBoard events.",
}


def with_options(panels: Options, options: type[TrainOptions]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: give a command the options of these panels as its signature. An option that is not given is None."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints, defaults = options.types(), options().flat()
        parameters = [
            _parameter(panel, name, text, hints.get(name), defaults.get(name))
            for panel, texts in panels.items()
            for name, text in texts.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


_TYPES: dict[str, Any] = {"out": Path, "config": Path, "resume": bool, "dry_run": bool} | dict.fromkeys(SHAPE, int)


def _parameter(panel: str, name: str, text: str, hint: Any, default: Any) -> inspect.Parameter:
    kind = _TYPES.get(name) or (list[str] if is_list(hint) else hint)
    if default not in (None, (), "") and not isinstance(default, bool):
        shown = ",".join(default) if isinstance(default, tuple) else default
        text += f" [default: {number(shown) if isinstance(shown, float) else shown}]"
    word = name.replace("_", "-")
    flag = f"--{word}/--no-{word}" if default is True else f"--{word}"
    option = typer.Option(flag, help=text, rich_help_panel=panel)
    annotation = Annotated[Optional[kind], option]  # type: ignore[valid-type]  # noqa: UP045
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

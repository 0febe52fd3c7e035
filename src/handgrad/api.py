"""`hg.train` and `hg.finetune`: the commands `handgrad train` and `handgrad finetune` as Python functions."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from .display.run_progress import Lines, Silent
from .errors import HandgradError, for_python, shown
from .training.config import SHAPE, FinetuneOptions, TrainOptions, is_list
from .training.distributed import Ranks
from .training.finetune import prepare as prepare_finetuning
from .training.lifecycle import Prepare, Request, Result, execute
from .training.pretrain import prepare as prepare_training

C = TypeVar("C", bound=TrainOptions)
Sources = str | Path | Iterable[str | Path]


def train(
    data: Sources = (),
    *,
    model: str | Path = "nano",
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Result:
    """Train a model on text, as `handgrad train` does.

    data      text files, folders or glob patterns; default: tiny Shakespeare
    model     a preset's name, or the folder of a model to start from
    out       run folder; default: the next free name in runs/
    resume    continue the run in `out`, or start it
    quiet     print nothing
    options   all other options of the command by name, as in steps=500, lr=1e-3, n_blocks=2

    result = hg.train("book.txt", steps=200)
    result.model, result.folder, result.val_loss
    """
    return _run(TrainOptions, prepare_training, data, model, out, resume, quiet, options)


def finetune(
    model: str | Path,
    data: Sources,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Result:
    """Fine-tune a model on examples, as `handgrad finetune` does: adapters, or with full=True all weights.

    model     a model directory, a run folder, an adapter, or a name on the hub
    data      files with examples, folders or glob patterns
    others    as in `hg.train`; also options such as rank=16, targets="c_attn,c_fc", epochs=3

    result = hg.finetune("path/to/gpt2", "examples.jsonl", rank=8)
    result.path                     the adapter's folder
    """
    return _run(FinetuneOptions, prepare_finetuning, data, model, out, resume, quiet, options)


def _run(
    kind: type[C], prepare: Prepare[C], data: Sources, model: str | Path, out: str | Path | None, resume: bool,
    quiet: bool, options: dict[str, Any],
) -> Result:  # fmt: skip
    if not isinstance(model, str | Path):
        raise HandgradError(
            f"model must be a name or the folder of a model, not of type {type(model).__name__}: hg.save it first"
        )
    if not isinstance(out, str | Path | None):
        raise HandgradError(f"out must be the path of a folder, not {shown(out)}")
    if isinstance(options.get("dtype"), torch.dtype):
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    if isinstance(options.get("field"), dict):
        options["field"] = [f"{ours}={theirs}" for ours, theirs in options["field"].items()]
    types = kind.types()
    known = set(types) - {"shape", "clock"} | (set(SHAPE) if "shape" in types else set())
    for name in options:
        if name not in known:
            raise HandgradError(f"unknown option {name!r}; available: {', '.join(sorted(known))}")
    shape = {name: options.pop(name) for name in SHAPE if name in options}
    given: dict[str, Any] = {
        name: _strings(value) if is_list(types[name]) else value for name, value in options.items()
    }
    if shape:
        given["shape"] = tuple(sorted(shape.items()))
    if sources := _strings(data):
        given["data"] = sources
    if str(model) != kind.model:
        given["model"] = str(model)
    console = Console(emoji=False)
    ranks = Ranks()
    try:
        display = Silent(console) if quiet or not ranks.first else Lines(console, for_python)
        folder = None if out is None else Path(out)
        return execute(Request(kind, prepare, given, folder, resume), ranks, display)
    finally:
        ranks.shutdown()


def _strings(value: Sources) -> tuple[str, ...]:
    """A tuple of strings from one path or several."""
    items = list(value) if isinstance(value, list | tuple | set) else [value]
    for item in items:
        if not isinstance(item, str | Path):
            raise HandgradError(f"give paths of files, not {shown(item)}: write the examples to a .jsonl file first")
    return tuple(map(str, items))

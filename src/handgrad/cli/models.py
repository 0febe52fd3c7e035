"""The commands finetune, merge and convert: models in, models and adapters out. Heavy imports wait for the command."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import HandgradError
from ..files.atomic import write_folder
from ..formatting import plural, size
from ..training.config import LOSS_ON, TOO_LONG, FinetuneOptions
from .options import KEEPING, LEARNING, Options, with_options

if TYPE_CHECKING:
    import torch

    from ..model.gpt import GPT

out = Console(emoji=False)

FINETUNE: Options = {
    "Data": {
        "data": "Files (.jsonl, .json, .csv, .parquet, .txt), folders, patterns, or - for standard input; may be given"
        " several times. A line has prompt and completion, or messages, or text, or Alpaca's or ShareGPT's fields.",
        "field": "What the data calls a field, as prompt=question; may be given several times.",
        "skip_bad": "Leave out lines that cannot be used.",
        "val_data": "Examples to validate on. [default: a share of --data]",
        "val_share": "Share of the examples, drawn by the seed, kept for validation.",
        "chat_template": "A Jinja file to write messages with. [default: the model's own]",
        "loss_on": f"{' or '.join(LOSS_ON)}: completions and assistant turns only, or prompts as well.",
        "too_long": f"{' or '.join(TOO_LONG)}: examples longer than the context lose their end and texts are split, or"
        " they are left out.",
    },
    "Model": {
        "model": "A model directory, the folder of a run, an adapter to continue, or a name on the hub.",
        "dtype": "float32, float64 or bfloat16.",
        "full": "Train all weights, not an adapter.",
        "rank": "Rank of the adapters.",
        "alpha": "The adapters' branch is multiplied by alpha/rank. [default: the rank]",
        "targets": "Layers with adapters, by name, end of name or regular expression: c_attn, mlp.c_proj, lm_head …"
        " Several with commas, or by repeating the option.",
        "rslora": "Multiply by alpha/√rank instead.",
        "dora": "Learn a magnitude for every output as well.",
        "dropout": "Share of its input that each adapter drops while training.",
        "freeze_down": "Train the adapters' up factors only (LoRA-FA).",
        "modules_to_save": "Layers trained whole and kept with the adapter: ln_f … Several as with --targets.",
    },
    "Length": {
        "epochs": "Passes over the examples. [default: 3]",
        "steps": "Number of optimizer steps.",
        "minutes": "Time budget in minutes; the schedule follows wall-clock time.",
    },
    "Optimization": {
        "batch_examples": "Examples of a step; any number: they are processed in pieces.",
        "lr": "Highest learning rate. [default: 0.0005, with --full 0.00005]",
        "min_lr": "Learning rate at the end. [default: 0]",
        "warmup": "Steps in which the learning rate rises. [default: 20, at most a tenth of the run]",
        **LEARNING,
        "seed": "Seed of the adapters, of the order of the examples, and of dropout.",
    },
    "Logging and checkpoints": KEEPING
    | {
        "log_every": "Steps between two lines of metrics. [default: a tenth of the run, at most 10]",
        "eval_every": "Steps between two evaluations. [default: a tenth of the run]",
        "save_every": "Steps between two checkpoints. [default: a tenth of the run]",
    },
}


@with_options(FINETUNE, FinetuneOptions)
def finetune(**given: Any) -> None:
    """Fine-tune a model on examples: low-rank adapters, or with --full all weights.

    Examples are packed end to end without padding, and none sees another. The loss is the mean over what is to be
    learned, however it is spread over the batch. In the end --out holds the best adapter, in PEFT's format, as adapter/
    (with --full the model, as model/), beside checkpoints, metrics.jsonl and report.html. Ctrl-C, --resume and torchrun
    work as with handgrad train.

      handgrad finetune --model path/to/gpt2 --data examples.jsonl
      handgrad finetune --model path/to/gpt2 --data examples.jsonl --rank 4 --targets c_attn,lm_head
      handgrad finetune --resume
    """
    from ..training.finetune import prepare
    from .training import run_command

    run_command(given, FinetuneOptions, prepare)


Dtype = Annotated[str | None, typer.Option(help="Store as float32, bfloat16 or float16. [default: as it was]")]


def merge(
    adapter: Annotated[str, typer.Argument(help="An adapter's directory, or the folder of a run of finetune.")],
    place: Annotated[Path, typer.Option("--out", help="Folder to write; it must not exist yet.")],
    model: Annotated[
        str | None, typer.Option(help="The model it belongs to. [default: the one the adapter names]")
    ] = None,
    dtype: Dtype = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Take the adapter out of the merged model --model again.")
    ] = False,
) -> None:
    """Fold an adapter into the weights of its model, or take it out again.

    The logits before and after are compared, with the weights rounded as they will be stored, and nothing is written if
    they differ. A tied head with an adapter becomes a separate matrix; the embedding does not change.

      handgrad merge runs/mine --out merged
      handgrad merge runs/mine --model merged --undo --out original
    """
    from .. import adapters
    from ..adapters import peft
    from ..adapters.merged_files import check_same, read_merge, write_merge
    from ..files import manifest
    from ..formats.checkpoint import load, stored_dtype, write_model
    from ..formats.models import base_of, tokenizer_folder, weights_folder
    from ..text import tokenizer

    _check_new(place)
    folder = weights_folder(adapter)
    if not adapters.is_adapter(folder):
        raise HandgradError(f"{folder} is not an adapter: there is no {peft.CONFIG}")
    if undo and model is None:
        raise HandgradError("--undo needs the merged model: name it with --model")
    base = weights_folder(model) if model is not None else base_of(folder)
    spoken = tokenizer_folder(folder) or tokenizer_folder(base)
    network = load(base, dtype=_working(base))
    store = _dtype(dtype) or stored_dtype(base)
    taken = read_merge(network, folder, base) if undo else None
    tokens = _some_tokens(network)
    if taken is not None:
        before = network.logits(tokens)
        adapters.unmerge(network, taken)
        adapters.remove(network)
        _round(network, store)
        adapters.load(network, folder, with_copies=False)
        difference = check_same(before, network.logits(tokens), store)
        adapters.remove(network)
    else:
        adapters.load(network, folder)
        before = network.logits(tokens)
        taken = adapters.merge(network)
        _round(network, store)
        difference = check_same(before, network.logits(tokens), store)

    def fill(partial: Path) -> None:
        write_model(network, partial, store, like=base)
        if spoken is not None:
            tokenizer.read(spoken).write(partial)
        if not undo:
            write_merge(taken, network, folder, partial)
        manifest.write(partial)

    write_folder(place, fill)
    what = "taken out of" if undo else "merged into"
    untied = " The head is now a separate matrix." if taken.tied and not network.config.tied else ""
    count = plural(len(taken.adapters), "adapter")
    out.print(
        f"{count} {what} {base}; logits differ by {difference:.1e}.{untied}\nmodel   {place}",
        highlight=False, soft_wrap=True, markup=False,
    )  # fmt: skip


def convert(
    model: Annotated[str, typer.Argument(help="A model directory, the folder of a run, or a name on the hub.")],
    place: Annotated[Path, typer.Option("--out", help="Folder to write; it must not exist yet.")],
    dtype: Dtype = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Largest file, as in 500MB or 2GB. [default: one file for all]")
    ] = None,
) -> None:
    """Write a model as another directory: in another dtype, in one file or several, with its tokenizer beside it.

    handgrad convert runs/book --out half --dtype bfloat16 --shard-size 500MB
    """
    from .. import adapters
    from ..files import manifest
    from ..formats.checkpoint import stored_dtype, write_model
    from ..formats.models import open_folder, tokenizer_folder, weights_folder
    from ..text import tokenizer

    _check_new(place)
    folder = weights_folder(model)
    if adapters.is_adapter(folder):
        raise HandgradError(f"{folder} is an adapter: handgrad merge makes a model of it")
    network = open_folder(folder)
    spoken = tokenizer_folder(folder)
    store = _dtype(dtype) or stored_dtype(folder)
    limit = _bytes(shard_size) if shard_size is not None else None

    def fill(partial: Path) -> None:
        write_model(network, partial, store, limit, like=folder)
        if spoken is not None:
            tokenizer.read(spoken).write(partial)
        manifest.write(partial)

    write_folder(place, fill)
    files = sorted(place.glob("*.safetensors"))
    total = size(sum(file.stat().st_size for file in files))
    out.print(
        f"{plural(len(files), 'file')} of weights, {total}, {_name(store)}\nmodel   {place}",
        highlight=False, soft_wrap=True, markup=False,
    )  # fmt: skip


def _round(model: "GPT", stored: "torch.dtype") -> None:
    """Every weight as it will be read back."""
    for p in model.parameters():
        p.data = p.data.to(stored).to(p.dtype)


def _check_new(place: Path) -> None:
    if place.exists():
        raise HandgradError(f"{place} exists already: choose another --out")


def _working(folder: Path) -> "torch.dtype":
    """What logits are compared in: float32, or float64 if the model is stored so."""
    import torch

    from ..formats.checkpoint import stored_dtype

    return torch.float64 if stored_dtype(folder) == torch.float64 else torch.float32


def _dtype(name: str | None) -> "torch.dtype | None":
    import torch

    known = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is not None and name not in known:
        raise HandgradError(f"--dtype must be {', '.join(known)}, not {name!r}")
    return None if name is None else known[name]


def _name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise HandgradError(f"--shard-size must be a size as in 500MB or 2GB, not {text!r}")
    return int(float(found[1]) * 1000 ** " KMG".index(found[2].upper() or " "))


def _some_tokens(model: "GPT") -> "torch.Tensor":
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.n_vocab, (2, min(32, model.config.n_context)), generator=generator)

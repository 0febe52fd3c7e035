"""The command line. Each command is a function; its signature and docstring are its help.

Nothing heavy is imported here: torch and all that needs it wait until a command runs.
"""

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..errors import HandgradError
from ..files.atomic import check_writable, write_text
from ..files.cache import cache_folder
from ..text import downloads
from ..training.config import TrainOptions
from . import explain, models
from .help import Command, Group
from .options import MODEL, TRAIN, with_options

if TYPE_CHECKING:
    from ..proof.report import Report

app = typer.Typer(
    name="handgrad",
    cls=Group,
    help="Train, fine-tune, run and inspect GPT-style transformers with every gradient derived by hand.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

INTERRUPTED = 130  # the status of a command that Ctrl-C ended
ModelOption = Annotated[str | None, typer.Option(help=MODEL)]
JsonOption = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON to a file, or to stdout.")]


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version as version_of

        out.print(f"handgrad {__version__}, torch {version_of('torch')}", highlight=False)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(cls=Command)
def verify(
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of shapes and values. [default: a new one]")] = None,
    only: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only these checks: E-ln-dx, 'T2-*', R1,R2 …")
    ] = None,
    json_file: JsonOption = None,
    model: ModelOption = None,
) -> None:
    """Prove every equation, number and claim of the paper on this machine.

    Runs one check for each line of the paper's ledger and one for each misprint that matters, on freshly drawn random
    shapes and values. With --model it checks every error signal and every parameter gradient of that model instead,
    against autograd and against finite differences.

    Exit status 1 if anything fails.

      handgrad verify
      handgrad verify --only 'E-ln-*,R8' --seed 5
      handgrad verify --model nano
    """
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    _check_target(json_file)
    if model is not None and only is not None:
        raise HandgradError("--only chooses among the paper's checks; with --model everything is checked")
    report = _verify_paper(seed, only) if model is None else _verify_model(model, seed)
    if not _deliver(report.to_json(), json_file):
        out.print(report)
    if json_file is not None and not report.passed:
        err.print(report.summary(), style="bold red", highlight=False)
    if not report.passed:
        raise typer.Exit(1)


def _verify_paper(seed: int, only: str | None) -> "Report":
    import torch

    from ..display.progress import watch
    from ..proof import ledger

    torch.set_num_threads(1)  # the matrices are tiny: a second thread would only wait
    return ledger.run(seed, only, watch("checking"))


def _verify_model(name: str, seed: int) -> "Report":
    """Three sequences of uneven length, with some targets ignored."""
    import torch

    from ..display.progress import watch
    from ..formats.models import find_model, open_folder
    from ..model.gpt import GPT
    from ..proof.verify import verify as verify_model

    found = find_model(name)
    _note(found.note)
    model = GPT(found.config, seed=seed) if found.folder is None else open_folder(found.folder)
    if sum(p.numel() for p in model.parameters()) < 5_000_000:
        torch.set_num_threads(1)
    lengths = [min(n, model.config.n_context) for n in (9, 1, 6)]
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.n_vocab, (sum(lengths),), generator=generator)
    targets = torch.randint(model.config.n_vocab, (sum(lengths),), generator=generator)
    targets[torch.rand(len(targets), generator=generator) < 0.2] = -100
    targets[0] = tokens[-1]
    report = verify_model(model, tokens, targets, lengths, seed=seed, watch=watch("finite differences"))
    report.title = f"{name}: {report.title} (seed {seed})"
    return report


@app.command(cls=Command)
def plan(
    model: Annotated[str, typer.Option(help=MODEL)] = "paper",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence. [default: the context]")] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float32",
    rank: Annotated[
        int, typer.Option(min=0, help="Train adapters of this rank. [default: 0, which trains all weights]")
    ] = 0,
    targets: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers with adapters, as in handgrad finetune; also q, k and v, and paper, the layers that Section 7"
            " counts. Several with commas, or by repeating the option. [default: all-linear]"
        ),
    ] = None,
    n_blocks: Annotated[int | None, typer.Option(help="Number of blocks, in place of the preset's.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the stream.")] = None,
    n_heads: Annotated[int | None, typer.Option(help="Number of heads.")] = None,
    n_vocab: Annotated[int | None, typer.Option(help="Size of the vocabulary.")] = None,
    n_context: Annotated[int | None, typer.Option(help="Longest sequence.")] = None,
    d_hidden: Annotated[int | None, typer.Option(help="Width of the feed-forward layer.")] = None,
    tied: Annotated[
        bool | None, typer.Option("--tied/--untied", help="Share the token embedding with the logits.")
    ] = None,
    logits_bias: Annotated[
        bool | None, typer.Option("--logits-bias/--no-logits-bias", help="Add a bias to the logits.")
    ] = None,
    recompute: Annotated[str, typer.Option(help="none, or blocks: recompute blocks in the backward pass.")] = "none",
    update_inside: Annotated[
        bool, typer.Option("--update-inside", help="Update each layer inside the backward pass.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Count parameters, operations and bytes of a training step before it runs, and predict its time and memory.

    With a run of handgrad finetune, or its adapter, the plan is that of training this adapter.

    The counts of the paper's Section 7 and Table 3:

      handgrad plan --model paper                   # 85,120,849; one block 7,087,872, logits 38,647,633
      handgrad plan --model paper --n-blocks 12     # 163,087,441
      handgrad plan --model gpt2                    # 124,439,808
      handgrad plan --rank 16 --targets lm_head     # 816,400 trainable
      handgrad plan --n-blocks 12 --rank 16 --targets paper     # 3,470,608 trainable
    """
    from ..display import plan
    from ..formats.models import find_model

    _check_target(json_file)
    changes = {
        "n_blocks": n_blocks, "d_model": d_model, "n_heads": n_heads, "n_vocab": n_vocab, "n_context": n_context,
        "d_hidden": d_hidden, "tied": tied, "logits_bias": logits_bias,
    }  # fmt: skip
    found = find_model(model)
    _note(found.note)
    made = plan.plan_of(
        found, {k: v for k, v in changes.items() if v is not None}, rank, tuple(targets or ()),
        batch=batch, tokens=tokens, dtype=dtype, recompute=recompute, update_inside=update_inside,
    )  # fmt: skip
    if not _deliver(plan.to_json(made), json_file):
        for table in plan.tables(made, model, out.width):
            out.print(table)


@app.command(cls=Command)
@with_options(TRAIN, TrainOptions)
def train(**given: Any) -> None:
    """Train a model on text, with every gradient derived by hand.

    Without any option: a small model on tiny Shakespeare, in about a minute. The folder of the run holds checkpoints that
    open in transformers, metrics.jsonl and report.html. Ctrl-C finishes the step, saves and ends; --resume continues
    exactly there. The same command under torchrun --nproc-per-node N -m handgrad trains in N processes.

      handgrad train
      handgrad train --data book.txt --model gpt2 --out runs/book
      handgrad train --resume --out runs/book
    """
    from ..training.pretrain import prepare
    from .training import run_command

    run_command(given, TrainOptions, prepare)


app.command(cls=Command)(models.finetune)


@app.command(cls=Command)
def generate(
    model: Annotated[
        str | None,
        typer.Option(
            help="A model directory, an adapter, the folder of a run (its best checkpoint), or a name on the hub."
            " [default: the newest run in runs/]"
        ),
    ] = None,
    prompt: Annotated[str, typer.Option(help="The text to continue, exactly as given. [default: a line feed]")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 takes the most probable token each time.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among this many most probable tokens only.")] = 200,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the samples. [default: a new one]")] = None,
) -> None:
    """Continue a prompt, token by token.

    The prompt is taken as it is: in bash, $'…' writes line feeds and tabs.

      handgrad generate --prompt "ROMEO:"
      handgrad generate --model runs/mine --prompt $'Q: why?\\nA:' --temperature 0
    """
    import torch

    from ..formats.models import open_folder, tokenizer_of, weights_folder
    from ..inference.generate import generate as write_on

    folder = weights_folder(model)
    network = open_folder(folder)
    words = tokenizer_of(folder)
    if model is None:
        _note(f"from {folder}")
    ids = words.encode(prompt)
    if not ids:
        raise HandgradError("the prompt is empty: give at least one character")
    limit = network.config.n_context
    if len(ids) > limit:
        _note(f"the prompt has {len(ids):,} tokens; the model sees the last {limit:,}")
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


app.command(cls=Command)(models.merge)
app.command(cls=Command)(models.convert)


@app.command(cls=Command)
def get(
    name: Annotated[str | None, typer.Argument(help="What to fetch. [default: list what there is]")] = None,
) -> None:
    """Fetch a corpus or a vocabulary, checked and cached; without a name, list what there is and where it is kept.

    handgrad get
    handgrad get shakespeare
    """
    if name is not None:
        for file in downloads.fetch(name):
            out.print(str(file), highlight=False, soft_wrap=True)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "what", "from", "here"):
        table.add_column(column, overflow="fold")
    for key, item in downloads.DOWNLOADS.items():
        here = downloads.cache_path(key)
        table.add_row(key, item.description, item.package, "yes" if here.exists() else "not yet")
    out.print(table)
    out.print(f"kept in {cache_folder()}", style="dim", highlight=False, soft_wrap=True)


app.command(cls=Command)(explain.explain)


@app.command(
    cls=Command,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Measure speed and memory side by side with the peers.

    Scenarios: train, memory, lora, sft, finetune, attention, products, explain; all unless named. --quick takes smaller
    sizes and --tiny the smallest, --json FILE writes every figure, --plot FILE.svg draws the ratios.

    Needs the repository, where bench/ lives, and the packages of the test extra.

      handgrad bench --quick
      handgrad bench train memory --json figures.json
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "bench" / "__main__.py").exists():
        raise HandgradError("the benchmarks are in the repository, not in the package: clone it and run `make bench`")
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "bench", *context.args]
    sys.exit(subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode)


def _note(text: str) -> None:
    if text:
        err.print(text, style="dim", highlight=False, soft_wrap=True, markup=False)


def _deliver(text: str, target: str | None) -> bool:
    """JSON to a file or to stdout. False if it was not asked for."""
    if target is None:
        return False
    if target == "-":
        sys.stdout.write(text + "\n")
    else:
        write_text(Path(target), text + "\n")
        err.print(f"wrote {target}", highlight=False)
    return True


def _check_target(target: str | None) -> None:
    if target is not None and target != "-":
        check_writable(Path(target))


def main() -> None:
    """Mistakes of the user end in one line and status 1, not in a traceback."""
    try:
        app(prog_name="handgrad")
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # by typer, which says nothing
            err.print("Interrupted. Saved checkpoints are intact.", highlight=False)
        raise
    except (HandgradError, OSError) as mistake:
        if not getattr(mistake, "silent", False):
            rank = os.environ.get("RANK", "0")
            who = "handgrad" if rank == "0" else f"handgrad, process {rank}"
            err.print(f"{who}: {mistake}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("Interrupted. Saved checkpoints are intact.", highlight=False)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()

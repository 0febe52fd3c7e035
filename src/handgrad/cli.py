"""The command line. Each command is a function; its signature is its help."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from . import __version__, cli_explain, cli_models, cli_training, ledger
from .checkpoint import load_config
from .config import PRESETS, GPTConfig, preset
from .display import watch
from .errors import HandgradError
from .files import check_writable, write_text
from .gpt import GPT
from .models import load
from .plan import BYTES, Plan, Rates, make_plan, parameters
from .report import Report
from .run import model_folder
from .verify import verify as verify_model

app = typer.Typer(
    name="handgrad",
    help="Train, fine-tune, run and see through GPT-style transformers with every gradient derived by hand.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

ModelOption = Annotated[str | None, typer.Option(help=f"A preset ({', '.join(PRESETS)}) or a model directory.")]
JsonOption = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON to a file, or to stdout.")]


def _version(show: bool) -> None:
    if show:
        out.print(f"handgrad {__version__}, torch {torch.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def verify(
    seed: Annotated[
        int | None, typer.Option(min=0, help="Draw these shapes and values again. \\[default: new ones]")
    ] = None,
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
    """
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    _check_target(json_file)
    if model is None:
        torch.set_num_threads(1)  # the matrices are tiny: a second thread would only wait
        report = ledger.run(seed, only, watch("checking"))
    elif only is not None:
        raise HandgradError("--only chooses among the paper's checks; with --model everything is checked")
    else:
        report = _verify_model(model, seed)
    if not _deliver(report.to_json(), json_file):
        out.print(report)
    if json_file is not None and not report.passed:
        err.print(report.summary(), style="bold red", highlight=False)
    if not report.passed:
        raise typer.Exit(1)


def _verify_model(name: str, seed: int) -> Report:
    """Three sequences of uneven length, with some targets ignored."""
    if name in PRESETS:
        model = GPT(preset(name), seed=seed)
    elif "/" in name or Path(name).is_dir():
        model = load(name)
    else:
        raise HandgradError(f"{name!r} is neither a preset ({', '.join(PRESETS)}) nor a directory")
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


@app.command()
def plan(
    model: ModelOption = "paper",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 1,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence. \\[default: the model's context]")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(BYTES)}.")] = "float32",
    lora_rank: Annotated[
        int, typer.Option(min=0, help="Train low-rank adapters of this rank; 0 trains everything.")
    ] = 0,
    lora_targets: Annotated[
        str, typer.Option(help="all-linear, paper (as Section 7 counts), or names: c_attn,mlp.c_fc,lm_head …")
    ] = "",
    n_blocks: Annotated[int | None, typer.Option(help="Change the number of blocks.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Change the width of the stream.")] = None,
    n_heads: Annotated[int | None, typer.Option(help="Change the number of heads.")] = None,
    n_vocab: Annotated[int | None, typer.Option(help="Change the size of the vocabulary.")] = None,
    n_context: Annotated[int | None, typer.Option(help="Change the longest sequence.")] = None,
    d_hidden: Annotated[int | None, typer.Option(help="Change the width of the feed-forward layer.")] = None,
    tied: Annotated[
        bool | None, typer.Option("--tied/--untied", help="Share the token embedding with the logits.")
    ] = None,
    logits_bias: Annotated[bool | None, typer.Option(help="A bias on the logits.")] = None,
    recompute: Annotated[str, typer.Option(help="none, or blocks: computed again on the way back.")] = "none",
    update_inside: Annotated[bool, typer.Option(help="Update each layer inside the backward pass.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Count parameters, operations and bytes of a training step before it runs, and predict its time.

    Reproduces every count of the paper's Section 7 and Table 3:

    [bold]--model paper[/] one block 7,087,872, logits 38,647,633, in all 85,120,849 ·
    [bold]--model paper --n-blocks 12[/] 163,087,441 ·
    [bold]--model gpt2[/] 124,439,808 ·
    [bold]--lora-rank 16 --lora-targets lm_head[/] 816,400 ·
    [bold]--n-blocks 12 --lora-rank 16 --lora-targets paper[/] 3,470,608
    """
    changes = {
        "n_blocks": n_blocks, "d_model": d_model, "n_heads": n_heads, "n_vocab": n_vocab, "n_context": n_context,
        "d_hidden": d_hidden, "tied": tied, "logits_bias": logits_bias,
    }  # fmt: skip
    _check_target(json_file)
    config = _config(model or "paper", {k: v for k, v in changes.items() if v is not None})
    made = make_plan(config, batch, tokens, dtype, lora_rank, lora_targets, recompute, update_inside)
    if not _deliver(json.dumps(_plan_json(made), indent=1), json_file):
        _print_plan(made, model or "paper")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def bench(context: typer.Context) -> None:
    """Measure speed and memory side by side with the peers; --quick, --json, --plot.

    Scenarios: train, memory, lora, sft, finetune, attention, products; all unless named.

    Needs the repository, where bench/ lives, and the packages of the test extra.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "bench" / "__main__.py").exists():
        raise HandgradError("the benchmarks are in the repository, not in the package: clone it and run `make bench`")
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "bench", *context.args]
    sys.exit(subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode)


app.command()(cli_training.train)
app.command()(cli_models.finetune)
app.command()(cli_training.generate)
app.command()(cli_models.merge)
app.command()(cli_models.convert)
app.command()(cli_training.get)
app.command()(cli_explain.explain)


def _config(name: str, changes: dict[str, object]) -> GPTConfig:
    if name in PRESETS:
        return preset(name, **changes)
    if Path(name).is_dir():
        if changes:
            raise HandgradError("a model directory has its shape already: shape options go with presets")
        return load_config(model_folder(Path(name)))
    raise HandgradError(f"{name!r} is neither a preset ({', '.join(PRESETS)}) nor a directory")


def _plan_json(made: Plan) -> dict[str, object]:
    c = made.config
    rows = [
        {"layer": p.layer, "symbol": p.symbol, "name": p.name, "shape": p.shape, "count": p.count,
         "times": c.n_blocks if p.layer == "block" else 1}
        for p in parameters(c)
    ]  # fmt: skip
    plain = {k: v for k, v in vars(made).items() if k != "config"}
    return {"config": vars(c), **plain, "bytes_peak": made.bytes_peak, "parameters": rows}


def _print_plan(made: Plan, name: str) -> None:
    c = made.config
    table = Table(box=box.SIMPLE_HEAD, title=f"[bold]Parameters of {name}", title_justify="left", pad_edge=False)
    for column in ("layer", "symbol"):
        table.add_column(column, no_wrap=True)
    named = out.width >= 88  # on a narrow terminal the numbers come first
    if named:
        table.add_column("name in the file", no_wrap=True)
    table.add_column("shape", justify="right", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True, min_width=13)
    totals = {
        "embedding": made.embedding, "block": made.per_block, "final norm": made.final_norm, "logits": made.logits,
    }  # fmt: skip
    for layer, subtotal in totals.items():
        for p in parameters(c):
            if p.layer == layer:
                shape = " × ".join(f"{n:,}" for n in p.shape)
                table.add_row(layer, p.symbol, *([p.name] if named else []), shape, f"{p.count:,}")
        if layer == "logits" and c.tied:
            table.add_row(layer, "w_11", *(["tied to transformer.wte.weight"] if named else []), "", "0")
        label = "one block" if layer == "block" else layer
        between = [""] * (3 if named else 2)
        table.add_row(f"[bold]{label}", *between, f"[bold]{subtotal:,}", end_section=True)
    if c.n_blocks > 1:
        table.add_row(f"[bold]{c.n_blocks} blocks", *between, f"[bold]{c.n_blocks * made.per_block:,}")
    table.add_row("[bold]total", *between, f"[bold]{made.total:,}")
    out.print(table)

    facts = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    facts.title = f"[bold]A step of {made.batch} × {made.tokens:,} tokens in {made.dtype}"
    facts.title_justify = "left"
    facts.add_column("", no_wrap=True, min_width=20)
    facts.add_column("", justify="right", no_wrap=True, min_width=14)
    facts.add_column("", style="dim", no_wrap=True, overflow="ellipsis", max_width=max(4, out.width - 46))
    share = 100 * made.trainable / made.total
    what = f"rank {made.rank} beside {', '.join(made.targets)}" if made.rank else "all of them"
    facts.add_row("trainable parameters", f"{made.trainable:,}", f"{share:.2f} % of {made.total:,}: {what}")
    facts.add_row(
        "forward", f"{made.forward_flop / 1e9:,.1f} GFLOP", "matrix products, two operations per multiply-add"
    )
    facts.add_row("backward", f"{made.backward_flop / 1e9:,.1f} GFLOP", "error signals and gradients", end_section=True)
    facts.add_row("weights", _bytes(made.bytes_weights), "")
    facts.add_row("gradients", _bytes(made.bytes_gradients), "")
    facts.add_row("optimizer state", _bytes(made.bytes_optimizer), "AdamW: two moments")
    facts.add_row("saved activations", _bytes(made.bytes_saved), "what the blocks keep for the way back")
    facts.add_row("passing buffers", _bytes(made.bytes_passing), "logits of some rows, a block on its way back")
    facts.add_row("[bold]peak", f"[bold]{_bytes(made.bytes_peak)}", "", end_section=True)
    rates = Rates.measure()
    speed = (
        f"at {rates.flop_per_second / 1e9:,.0f} GFLOP/s and {rates.bytes_per_second / 1e9:,.0f} GB/s, measured just now"
    )
    facts.add_row("a step takes about", _seconds(rates.seconds(made)), speed, end_section=True)
    facts.add_row("KV cache per token", _bytes(made.bytes_cache_per_token), "while generating")
    if out.width < 76:
        facts.columns.pop()
    out.print(facts)


def _seconds(x: float) -> str:
    return f"{x:,.2f} s" if x >= 1 else f"{1e3 * x:,.1f} ms"


def _bytes(n: int) -> str:
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.{2 if unit == 'GiB' else 1}f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def _deliver(text: str, target: str | None) -> bool:
    """JSON to a file or to stdout. False if nobody asked for it."""
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
        app()
    except (HandgradError, OSError) as mistake:
        if not getattr(mistake, "silent", False):
            rank = os.environ.get("RANK", "0")
            who = "handgrad" if rank == "0" else f"handgrad, process {rank}"
            err.print(f"{who}: {mistake}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("Interrupted. Saved checkpoints are intact.", highlight=False)
        sys.exit(130)


if __name__ == "__main__":
    main()

"""The application: its commands, `--version`, and how errors end a process."""

import os
import sys
from typing import Annotated

import typer

from .. import __version__
from ..errors import HandgradError
from . import (
    audit,
    bench,
    chat,
    console,
    convert,
    explain,
    finetune,
    generate,
    get,
    influence,
    learn,
    merge,
    plan,
    serve,
    train,
    verify,
)
from .help import Command, Group

INTERRUPTED = 130  # exit status after Ctrl-C

app = typer.Typer(
    name="handgrad",
    cls=Group,
    help="Train, fine-tune, run and inspect GPT-style transformers with every gradient derived by hand.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version as version_of

        console.out.print(f"handgrad {__version__}, torch {version_of('torch')}", highlight=False)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for command in (
    verify.verify, audit.audit, plan.plan, train.train, finetune.finetune, generate.generate, chat.chat, serve.serve,
    merge.merge, convert.convert, get.get, explain.explain, learn.learn, influence.influence,
):  # fmt: skip
    app.command(cls=Command)(command)
app.command(cls=Command, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench.bench)


def main() -> None:
    """Run a command. A user's mistake ends in one line and status 1, without a traceback."""
    console.open_streams()
    try:
        _run()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # typer exits silently
            _print_interrupted()
        raise
    except (HandgradError, OSError) as mistake:
        if not getattr(mistake, "silent", False):
            rank = os.environ.get("RANK", "0")
            who = "handgrad" if rank == "0" else f"handgrad, process {rank}"
            console.err.print(f"{who}: {mistake}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        _print_interrupted()
        sys.exit(INTERRUPTED)


def _run() -> None:
    try:
        app(prog_name="handgrad")
    except (MemoryError, RuntimeError):
        from ..plan.fit import memory_errors

        with memory_errors():
            raise


def _print_interrupted() -> None:
    console.err.print("Interrupted. Saved checkpoints are intact.", highlight=False)


if __name__ == "__main__":
    main()

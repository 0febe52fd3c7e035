"""The application: its commands, `--version`, and how errors end a process."""

import os
import re
import sys
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import HandgradError, for_command_line
from ..machine import configure_runtime
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
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
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
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help().rstrip("\n"))


for command in (
    verify.verify, audit.audit, plan.plan, train.train, finetune.finetune, generate.generate, chat.chat, serve.serve,
    merge.merge, convert.convert, get.get, explain.explain, learn.learn, influence.influence,
):  # fmt: skip
    app.command(cls=Command)(command)
app.command(cls=Command, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench.bench)


def main() -> None:
    """Run a command. A user's mistake ends in one line without a traceback: status 2 if a command or an option is
    misspelled or has a value of the wrong kind, 1 otherwise."""
    console.open_streams()
    configure_runtime()  # before a command imports torch
    try:
        status = _run()
    except (HandgradError, OSError) as mistake:
        if not getattr(mistake, "silent", False):
            _print_mistake(for_command_line(mistake))
        sys.exit(1)
    except MemoryError:  # before there was enough for the libraries that say more
        _print_mistake("not enough memory to load torch: raise the limit (ulimit -v), or free some")
        sys.exit(1)
    except typer.Abort:  # the end of standard input at a question
        sys.exit(1)
    except Exception as mistake:
        if not hasattr(mistake, "format_message"):
            raise
        _print_mistake(_usage(mistake))  # typer's own: an unknown command or option, a value of the wrong kind
        sys.exit(2)
    if status == INTERRUPTED:
        saved = " Saved checkpoints are intact." if {"train", "finetune"} & {*sys.argv[1:2]} else ""
        console.err.print(f"Interrupted.{saved}", highlight=False)
    sys.exit(status)


def _run() -> Any:
    """The status of a command: None, or a number if it ended with typer.Exit or Ctrl-C."""
    try:
        with console.warnings_in_one_line():
            return app(prog_name="handgrad", standalone_mode=False)
    except (MemoryError, RuntimeError):
        from ..plan.fit import memory_errors

        with memory_errors():
            raise


def _print_mistake(text: str) -> None:
    rank = os.environ.get("RANK", "0")
    who = "handgrad" if rank == "0" else f"handgrad, process {rank}"
    console.err.print(f"{who}: {text}", style="red", highlight=False, soft_wrap=True, markup=False)


def _usage(mistake: Any) -> str:
    """A mistake in the call, in our words, and where the right call is described."""
    text = " ".join(mistake.format_message().split()).rstrip(".")
    for theirs, ours in (("No such command ", "unknown command "), ("No such option: ", "unknown option ")):
        text = text.replace(theirs, ours)
    text = re.sub(r"^Invalid value for '(.+?)': Input should be ", r"\1 must be ", text)
    text = re.sub(r"^Missing (option|argument) ", r"missing \1 ", text)
    text = text.replace(", unable to parse string as an integer", "").replace(
        ", unable to parse string as a number", ""
    )
    path = mistake.ctx.command_path if getattr(mistake, "ctx", None) else "handgrad"
    return f"{text}{'' if text.endswith('?') else ';'} see {path} --help"


if __name__ == "__main__":
    main()

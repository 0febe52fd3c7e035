"""`handgrad get`"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ..errors import HandgradError, option
from ..files.cache import cache_folder
from ..text import downloads
from . import console


def get(
    name: Annotated[str | None, typer.Argument(help="Name of the download. [default: list all]")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Take this file, if it is the right one; fetch nothing."),
    ] = None,
    accept_terms: Annotated[bool, typer.Option("--accept-terms", help="Accept the terms of the download.")] = False,
) -> None:
    """Download a corpus, a vocabulary or a model, verified and cached; without a name, list what is available.

    A cached file that was damaged is fetched again, and an interrupted download of several parts goes on.

    handgrad get
    handgrad get shakespeare
    handgrad get qwen-coder
    handgrad get gemma3 --accept-terms
    """
    if name is None:
        _list()
        return
    if terms := downloads.open_terms(name):
        _agree(name, terms, accept_terms)
    for path in downloads.fetch(name, check_contents=True) if file is None else downloads.take(name, file):
        console.say(str(path))
    console.note(f"license: {downloads.find(name).license}")


def _agree(name: str, terms: str, accepted: bool) -> None:
    """Show the terms of a download, and raise unless the user accepts them."""
    console.err.print(terms, highlight=False, markup=False, soft_wrap=True)
    if not accepted:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise HandgradError(f"nothing was downloaded: accept these terms with {option('accept_terms', True)}")
        if not typer.confirm("Do you accept these terms?", err=True):
            raise HandgradError("nothing was downloaded, because the terms were not accepted")
    downloads.accept_terms(name)


def _list() -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "content", "license", "cached"):
        table.add_column(column, overflow="fold")
    for key, item in downloads.DOWNLOADS.items():
        table.add_row(key, item.description, item.license, "yes" if downloads.is_cached(key) else "no")
    console.out.print(table)
    console.out.print(f"cache: {cache_folder()}", style="dim", highlight=False, soft_wrap=True)

"""`handgrad get`"""

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ..files.cache import cache_folder
from ..text import downloads
from . import console


def get(
    name: Annotated[str | None, typer.Argument(help="Name of the download. [default: list all]")] = None,
) -> None:
    """Download a corpus, a vocabulary or a model, verified and cached; without a name, list what is available.

    A cached file that was damaged is fetched again.

    handgrad get
    handgrad get shakespeare
    handgrad get smollm2
    """
    if name is not None:
        for file in downloads.fetch(name, check_contents=True):
            console.say(str(file))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "content", "package", "cached"):
        table.add_column(column, overflow="fold")
    for key, item in downloads.DOWNLOADS.items():
        table.add_row(key, item.description, item.package, "yes" if downloads.is_cached(key) else "no")
    console.out.print(table)
    console.out.print(f"cache: {cache_folder()}", style="dim", highlight=False, soft_wrap=True)

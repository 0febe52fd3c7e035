"""`handgrad convert`"""

from typing import Annotated

import typer

from ..formatting import plural, size
from . import console
from .options import NewFolder, StoredDtype


def convert(
    model: Annotated[str, typer.Argument(help="A model directory, a run folder, or a name on the hub.")],
    folder: NewFolder,
    dtype: StoredDtype = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Maximum size of a file, as in 500MB or 2GB. [default: one file]")
    ] = None,
) -> None:
    """Write a model to a new directory: in another dtype, in one file or several, with its tokenizer.

    handgrad convert runs/book --out half --dtype bfloat16 --shard-size 500MB
    """
    from ..formats.convert import convert_model

    with console.working("writing the model"):
        done = convert_model(model, folder, dtype, shard_size)
    console.say(f"{plural(done.files, 'file')} of weights, {size(done.bytes)}, {done.dtype}")
    console.say(f"model   {folder}")

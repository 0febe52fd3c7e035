"""`handgrad convert`"""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import HandgradError, option
from ..formatting import plural, size
from . import console
from .options import StoredDtype


def convert(
    model: Annotated[
        str,
        typer.Argument(
            help="A model directory, a .gguf file, smollm2, a run folder, or a name on the hub; with --gguf, an adapter too."
        ),
    ],
    folder: Annotated[Path | None, typer.Option("--out", help="Folder to write; it must not exist yet.")] = None,
    dtype: StoredDtype = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Maximum size of a file, as in 500MB or 2GB. [default: one file]")
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(
            help="GGUF file to write instead, for llama.cpp and Ollama. An adapter is merged into its base model."
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="Type of the matrices in the GGUF file: F32, F16, BF16, Q8_0, Q6_K, Q5_K, Q5_1, Q5_0, Q4_K, Q4_K_M (Q4_K"
            " and, where rounding costs most, Q6_K), Q4_1, Q4_0, or MXFP4 for experts. [default: as stored]",
        ),
    ] = None,
) -> None:
    """Write a model to a new directory: in another dtype, in one file or several, with its tokenizer. Or to a GGUF file.

    handgrad convert runs/book --out half --dtype bfloat16 --shard-size 500MB
    handgrad convert runs/mine --gguf mine.gguf --type Q4_K_M
    """
    if (folder is None) == (gguf is None):
        raise HandgradError(f"give {option('out')} for a directory or {option('gguf')} for a GGUF file, one of them")
    if gguf is not None:
        if dtype is not None or shard_size is not None:
            raise HandgradError(
                f"{option('dtype')} and {option('shard_size')} are for a directory; for a GGUF file give {option('type')}"
            )
        _write_gguf(model, gguf, kind)
        return
    assert folder is not None
    if kind is not None:
        raise HandgradError(f"{option('type')} is for a GGUF file: give {option('gguf')}, or {option('dtype')}")
    from ..formats.convert import convert_model

    with console.working("writing the model"):
        done = convert_model(model, folder, dtype, shard_size)
    console.say(f"{plural(done.files, 'file')} of weights, {size(done.bytes)}, {done.dtype}")
    console.say(f"model   {folder}")


def _write_gguf(model: str, path: Path, kind: str | None) -> None:
    from ..formats.gguf_out import write_gguf

    with console.working("writing the GGUF file"):
        done = write_gguf(model, path, kind)
    for line in done.notes:
        console.note(line)
    types = ", ".join(f"{n} {name}" for name, n in done.types.items())
    console.say(f"{plural(sum(done.types.values()), 'tensor')}, {size(done.bytes)}: {types}")
    console.say(f"model   {path}")

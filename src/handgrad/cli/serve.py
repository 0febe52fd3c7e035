"""`handgrad serve`"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from ..errors import HandgradError
from . import console
from .generate import PRECISION, note_precision, use_fastest_threads


def serve(
    model: Annotated[
        str | None,
        typer.Option(
            help="A model directory, a GGUF file, an adapter, a run folder (its best checkpoint), one of `handgrad get`,"
            " or a name on the hub. [default: the newest run in runs/]"
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="An adapter of the model, served under this name; may be repeated."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests. [default: its folder's name]")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is for this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HANDGRAD_API_KEY", help="Key that clients must send. [default: $HANDGRAD_API_KEY, or none]"
        ),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Sequences that are computed at once.")] = 16,
    queue: Annotated[int, typer.Option(min=0, help="Sequences that wait; more are refused with status 429.")] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="New tokens that a sequence may have. [default: what the context holds]")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a request may take.")] = 600.0,
    bits: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Bits per weight, 8 or 4: faster, with less memory. [default: the weights as they are]"
        ),
    ] = None,
    precision: Annotated[str | None, PRECISION] = None,
    max_body: Annotated[int, typer.Option(min=1000, help="Bytes that a request may have.")] = 4_000_000,
) -> None:
    """Serve a model to clients of OpenAI's interface: completions, chats, structured output, tools, embeddings.

    Give a client http://127.0.0.1:8000/v1 as its base URL. Adapters of the model are served beside it, under their names, in
    the same batches. Every request is a line on the standard error. Ctrl-C stops the server.

      handgrad serve --model smollm2 --bits 8
      handgrad serve --model path/to/gpt2 --adapter mine=runs/mine --api-key secret --port 8001
    """
    if api_key is not None and (not api_key or not api_key.isascii() or not api_key.isprintable()):
        raise HandgradError("--api-key must have at least one character, and only printable ASCII")
    named = adapters_of(adapter or [])

    from ..formats.models import find_model, locate, weights_folder
    from ..serve.routes import Limits, Server, is_loopback
    from ..serve.served_models import open_models

    folder = weights_folder(model)
    base = name or Path(find_model(model).name).name
    note_precision(precision)
    models = open_models(folder, base, {called: locate(path) for called, path in named.items()}, bits, precision)
    use_fastest_threads(models.network)
    server = Server(
        models,
        host=host,
        port=port,
        api_key=api_key,
        limits=Limits(parallel, queue, max_tokens, timeout, max_body),
    )
    if not is_loopback(host):
        guard = "" if api_key else ", without a key: give --api-key"
        console.note(f"warning: other machines can reach {host}{guard}; the connection is not encrypted")
    console.say(", ".join(models.served))
    console.say(f"{server.url}v1   Press Ctrl-C to stop.")
    with suppress(KeyboardInterrupt), _log_requests():  # Ctrl-C is the normal way to stop
        server.run()


@contextmanager
def _log_requests() -> Iterator[None]:
    """Write a line per request to the standard error."""
    log, lines = logging.getLogger("handgrad.serve"), logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(lines)


def adapters_of(given: list[str]) -> dict[str, str]:
    """The folders of the adapters by name."""
    found: dict[str, str] = {}
    for text in given:
        name, separator, folder = text.partition("=")
        if not separator or not folder or not re.fullmatch(r"[\w.:/-]{1,100}", name):
            raise HandgradError(f"--adapter {text}: write NAME=DIR, for example mine=runs/mine")
        if name in found:
            raise HandgradError(f"--adapter {text}: there is an adapter {name} already; choose another name")
        found[name] = folder
    return found

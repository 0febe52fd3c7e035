"""`handgrad generate`"""

import sys
from typing import Annotated

import typer

from ..errors import HandgradError
from . import console


def generate(
    model: Annotated[
        str | None,
        typer.Option(
            help="A model directory, an adapter, a run folder (its best checkpoint), or a name on the hub."
            " [default: the newest run in runs/]"
        ),
    ] = None,
    prompt: Annotated[str, typer.Option(help="Text to continue, exactly as given. [default: a line feed]")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 always takes the most probable token.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Number of most probable tokens to sample from.")] = 200,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the samples. [default: random]")] = None,
) -> None:
    """Continue a prompt, token by token.

    The prompt is used exactly as given: in bash, $'…' writes line feeds and tabs.

      handgrad generate --prompt "ROMEO:"
      handgrad generate --model runs/mine --prompt $'Q: why?\\nA:' --temperature 0
    """
    import torch

    from ..formats.models import open_folder, tokenizer_of, weights_folder
    from ..inference.generate import generate as generate_ids
    from ..text.streaming import decode_stream

    folder = weights_folder(model)
    network = open_folder(folder)
    tokenizer = tokenizer_of(folder)
    if model is None:
        console.note(f"from {folder}")
    ids = tokenizer.encode(prompt)
    if not ids:
        raise HandgradError("the prompt is empty: give at least one character")
    limit = network.config.n_context
    if len(ids) > limit:
        console.note(f"the prompt has {len(ids):,} tokens; the model sees the last {limit:,}")
    new_ids = generate_ids(
        network, torch.tensor([ids]), tokens, temperature=temperature, top_k=top_k, seed=seed, stream=True
    )
    sys.stdout.write(prompt)
    for text in decode_stream(tokenizer, map(int, new_ids)):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")

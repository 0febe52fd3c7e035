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
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue, exactly as given. [default: a line feed]")
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option(help="Message for a chat model, put into its chat template; only the answer is printed."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 always takes the most probable token.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Number of most probable tokens to sample from.")] = 200,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the samples. [default: random]")] = None,
) -> None:
    """Continue a prompt, or answer a message, token by token.

    The prompt is used exactly as given: in bash, $'…' writes line feeds and tabs. Generation ends at the end-of-text token,
    with which chat models end an answer.

      handgrad generate --prompt "ROMEO:"
      handgrad generate --model runs/mine --prompt $'Q: why?\\nA:' --temperature 0
      handgrad generate --model smollm2 --chat "Name three primary colours." --temperature 0
    """
    import torch

    from ..formats.models import chat_template_of, open_folder, tokenizer_of, weights_folder
    from ..inference.generate import generate as generate_ids
    from ..text.streaming import decode_stream

    if prompt is not None and chat is not None:
        raise HandgradError("give --prompt, a text to continue, or --chat, a message to answer, not both")
    folder = weights_folder(model)
    text = "\n" if prompt is None else prompt
    if chat is not None:
        template = chat_template_of(folder)
        if template is None:
            raise HandgradError(f"{folder} has no chat template: give the text to continue, with --prompt")
        text = template.render([{"role": "user", "content": chat}], add_generation_prompt=True)
    network = open_folder(folder)
    tokenizer = tokenizer_of(folder)
    if model is None:
        console.note(f"from {folder}")
    ids = tokenizer.encode(text)
    if not ids:
        raise HandgradError("the prompt is empty: give at least one character")
    limit = network.config.n_context
    if len(ids) > limit:
        console.note(f"the prompt has {len(ids):,} tokens; the model sees the last {limit:,}")
    new_ids = generate_ids(
        network, torch.tensor([ids]), tokens, temperature=temperature, top_k=top_k, seed=seed, stream=True
    )
    if chat is None:
        sys.stdout.write(text)
    for piece in decode_stream(tokenizer, map(int, new_ids)):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")

"""`handgrad influence`"""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from ..errors import HandgradError
from . import console
from .console import JsonOption
from .generate import use_fastest_threads
from .options import FORMAT, Precision


def influence(
    model: Annotated[
        str,
        typer.Option(
            help="A model directory, a .gguf file, one of `handgrad get`, a run folder, an adapter, or a name on the hub."
        ),
    ],
    data: Annotated[list[str], typer.Option(help="Training examples: files, folders or glob patterns; repeatable.")],
    prompt: Annotated[str | None, typer.Option(help="Prompt of the answer to explain, with --answer.")] = None,
    answer: Annotated[str | None, typer.Option(help="The answer to explain.")] = None,
    queries: Annotated[
        str | None, typer.Option(help="A file of examples whose answers to explain, instead of --prompt and --answer.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Examples to list for each answer, helping and hindering.")] = 5,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Rank of the random adapters that the gradients of a model without one are projected onto; 0: all its"
            " weights, exact and slower. [default: 16]",
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(help="Rank by score, the product of the gradients, or by cosine, their direction alone.")
    ] = "score",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the projection.")] = 0,
    precision: Precision = None,
    format: Annotated[str | None, FORMAT] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page on which answers open.")] = None,
    json: JsonOption = None,
) -> None:
    """Rank training examples by how much they push an answer: the product of their gradients and the answer's.

    A step on an example with a positive score makes the answer more probable, one with a negative score less (TracIn, at one
    checkpoint). With an adapter, the gradients of its factors are compared. Examples and answer are formatted alike, as the
    model was fine-tuned.

      handgrad influence --model runs/mine --data examples.jsonl --prompt "2+2=" --answer "4"
      handgrad influence --model runs/mine --data examples.jsonl --queries questions.jsonl
    """
    from ..display.example_tables import influence_tables
    from ..files.atomic import check_writable, write_text
    from ..formats.models import load
    from ..per_example import page
    from ..per_example.ranking import check_by
    from ..per_example.ranking import influence as rank_examples
    from ..web.document import document

    if queries is not None and answer is not None:
        raise HandgradError("--answer and --queries both ask: give one of them")
    if queries is None and answer is None:
        raise HandgradError("give --answer (with --prompt), or --queries with a file of examples")
    if queries is not None and prompt is not None:
        raise HandgradError("--prompt goes with --answer; --queries has its own prompts")
    check_by(by)
    if html is not None:
        check_writable(html)
    console.check_json_target(json)
    network = load(model, precision=precision)
    use_fastest_threads(network)
    query = queries if queries is not None else {"prompt": prompt or "", "completion": answer}
    with console.working("comparing gradients of the examples"):
        found = rank_examples(network, data, query, rank=rank, seed=seed, format=format)
    shown = page.as_data(found, top, by)
    if html is not None:
        write_text(html, document("What pushed these answers", page.influence(shown), page.STYLE))
    if not console.write_json(dumps(shown, indent=1), json):
        console.out.print(influence_tables(found, top, by))
        if html is not None:
            console.say(f"\npage    {html}")

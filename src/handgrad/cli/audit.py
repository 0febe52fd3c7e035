"""`handgrad audit`"""

from pathlib import Path
from typing import Annotated

import typer

from . import console
from .console import JsonOption


def audit(
    model: Annotated[
        str, typer.Argument(help="A model directory, an adapter's, or a run folder (its best checkpoint).")
    ],
    adapter: Annotated[str | None, typer.Option(metavar="DIR", help="An adapter of PEFT for the model.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Files of fine-tuning examples or text. [default: random tokens]")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Data type to run it in: float64, float32, bfloat16 or float16. [default: stored]"),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="Attention of transformers: sdpa or eager. [default: sdpa where the model has it]"),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Number of sequences in the batch.")] = 3,
    tokens: Annotated[int, typer.Option(min=2, help="Maximum length of a sequence in tokens.")] = 48,
    setup: Annotated[bool, typer.Option("--setup/--no-setup", help="Also check the fine-tuning set-up.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random tokens and of the error model.")] = 0,
    json_file: JsonOption = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the report as a page.")
    ] = None,
) -> None:
    """Audit the gradients that transformers and PEFT compute for a model.

    Runs the model's own forward and backward pass and compares every activation, error signal and parameter gradient
    with the hand-derived ones in float64. Names the first layer that is wrong and how. Also checks that adapters
    train, frozen weights do not, and accumulation, padding, masked targets, merging, saving and resuming change
    nothing. From Python, hg.audit does the same for a model in memory, with whatever kernels are patched into it.

    Exit status 1 if anything is wrong.

      handgrad audit path/to/gpt2
      handgrad audit path/to/gpt2 --dtype bfloat16 --data examples.jsonl --html audit.html
      handgrad audit runs/mine
    """
    from ..auditing.model.folder import audit_folder
    from ..files.atomic import check_writable, write_text

    console.check_json_target(json_file)
    if html is not None:
        check_writable(html)
    with console.working("comparing gradients"):
        report = audit_folder(
            model, adapter=adapter, data=tuple(data or ()), dtype=dtype, attention=attention, sequences=sequences,
            tokens=tokens, setup=setup, seed=seed,
        )  # fmt: skip
    if html is not None:
        write_text(html, report.to_html())
        console.note(f"wrote {html}")
    console.conclude(report, json_file)

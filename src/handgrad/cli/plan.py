"""`handgrad plan`"""

from typing import Annotated

import typer

from . import console
from .console import JsonOption
from .generate import note_precision
from .options import COMMON_OPTIMIZATION, MODEL, MODEL_SHAPE, PRESET, Precision


def plan(
    model: Annotated[str, typer.Option(help=MODEL)] = "paper",
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 1,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence. [default: the model's context]")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type: float64, float32 or bfloat16.")] = "float32",
    precision: Precision = None,
    rank: Annotated[int, typer.Option(min=0, help="Rank of the adapters. [default: 0, train all weights]")] = 0,
    targets: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers with adapters, as in handgrad finetune; also q, k and v where one layer holds them, and paper, the"
            " layers that Section 7 counts. Separate names with commas, or repeat the option. [default: all-linear]"
        ),
    ] = None,
    n_blocks: Annotated[int | None, typer.Option(help=MODEL_SHAPE["n_blocks"])] = None,
    d_model: Annotated[int | None, typer.Option(help=MODEL_SHAPE["d_model"])] = None,
    n_heads: Annotated[int | None, typer.Option(help=MODEL_SHAPE["n_heads"])] = None,
    n_vocab: Annotated[int | None, typer.Option(help=f"Size of the vocabulary. {PRESET}")] = None,
    n_context: Annotated[int | None, typer.Option(help=MODEL_SHAPE["n_context"])] = None,
    d_hidden: Annotated[int | None, typer.Option(help=MODEL_SHAPE["d_hidden"])] = None,
    tied: Annotated[
        bool | None,
        typer.Option(
            "--tied/--untied",
            help=f"Logits weight shared with the embedding, or separate. {PRESET}",
        ),
    ] = None,
    logits_bias: Annotated[
        bool | None,
        typer.Option("--logits-bias/--no-logits-bias", help=f"Logits with or without a bias. {PRESET}"),
    ] = None,
    recompute: Annotated[
        str, typer.Option(help="Activations to recompute in the backward pass: none, or blocks.")
    ] = "none",
    update_inside: Annotated[
        bool, typer.Option("--update-inside", help="Update each layer inside the backward pass.")
    ] = False,
    optimizer: Annotated[str, typer.Option(help=COMMON_OPTIMIZATION["optimizer"])] = "AdamW",
    threads: Annotated[
        int | None, typer.Option(help="Number of threads of the trial steps. [default: torch's]")
    ] = None,
    packed: Annotated[bool, typer.Option("--packed", help="Keep the matrices of a GGUF model packed.")] = False,
    base_dtype: Annotated[
        str | None, typer.Option(help="Keep matrices in two bytes, bfloat16 or float16. [default: --dtype]")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Count parameters, operations and bytes of a training step before it runs, and predict its time and memory.

    For an adapter, or a run of handgrad finetune, it plans the training of that adapter.

    The counts of the paper's Section 7 and Table 3:

      handgrad plan --model paper                   # 85,120,849; one block 7,087,872, logits 38,647,633
      handgrad plan --model paper --n-blocks 12     # 163,087,441
      handgrad plan --model gpt2                    # 124,439,808
      handgrad plan --rank 16 --targets lm_head     # 816,400 trainable
      handgrad plan --n-blocks 12 --rank 16 --targets paper     # 3,470,608 trainable

    Any other family, as a preset or a folder:

      handgrad plan --model smollm2-shape --tokens 512                   # 134,515,008
      handgrad plan --model smollm2-shape --tokens 512 --rank 16         # 4,884,480 trainable
    """
    from ..checks import check_threads
    from ..display import plan_table
    from ..formats.models import find_model
    from ..machine import peak_memory
    from ..plan.estimate import plan_model
    from ..plan.fit import misfit
    from ..plan.thread_count import using
    from ..plan.timing import forecast

    console.check_json_target(json_file)
    check_threads(threads)
    note_precision(precision)
    changes = {
        "n_blocks": n_blocks, "d_model": d_model, "n_heads": n_heads, "n_vocab": n_vocab, "n_context": n_context,
        "d_hidden": d_hidden, "tied": tied, "logits_bias": logits_bias,
    }  # fmt: skip
    found = find_model(model)
    console.note(found.note)
    before = peak_memory()
    planned = plan_model(
        found, {k: v for k, v in changes.items() if v is not None}, rank, tuple(targets or ()),
        packed, base_dtype, precision, batch=batch, tokens=tokens, dtype=dtype, recompute=recompute,
        update_inside=update_inside, optimizer=optimizer,
    )  # fmt: skip
    if not console.write_json(plan_table.to_json(planned), json_file):
        with using(threads), console.working("timing trial steps"):
            predicted = forecast(planned, before)
        for table in plan_table.tables(planned, predicted, model, console.out.width):
            console.out.print(table)
        console.warn(misfit(planned))

"""`handgrad merge`"""

from typing import Annotated

import typer

from ..formatting import plural
from . import console
from .options import NewFolder, StoredDtype


def merge(
    adapter: Annotated[str, typer.Argument(help="An adapter directory, or the run folder of handgrad finetune.")],
    folder: NewFolder,
    model: Annotated[
        str | None, typer.Option(help="The adapter's base model. [default: the one the adapter names]")
    ] = None,
    dtype: StoredDtype = None,
    undo: Annotated[bool, typer.Option("--undo", help="Remove the adapter from the merged model --model.")] = False,
) -> None:
    """Merge an adapter into the weights of its base model, or remove it again.

    The logits before and after are compared, with the weights rounded as stored; if they differ by more than
    rounding, nothing is written. A tied head with an adapter becomes a separate matrix; the embedding does not change.

      handgrad merge runs/mine --out merged
      handgrad merge runs/mine --model merged --undo --out original
    """
    from ..formats.merge import merge_adapter, unmerge_adapter

    with console.working("merging and comparing logits"):
        done = (unmerge_adapter if undo else merge_adapter)(adapter, model, folder, dtype)
    what = "removed from" if undo else "merged into"
    untied = " The head is now a separate matrix." if done.untied else ""
    console.say(
        f"{plural(done.adapters, 'adapter')} {what} {done.base}; logits differ by {done.difference:.1e}.{untied}"
    )
    console.say(f"model   {folder}")

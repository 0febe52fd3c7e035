"""Single values and parts of the tensors of a trace, for pointing at a cell and for zooming."""

import torch
from torch import Tensor

from ...errors import HandgradError
from ..follow.tensors import Tensors
from ..json_types.common import Picture
from ..json_types.station import Entries, Value
from ..presentation.pictures import picture
from ..session.session import Session, TracedSentence
from .attention import attention_head
from .swaps import estimates, relaxed_signal

Range = tuple[int, int]  # first and after the last
Indices = list[int]
MAX_ENTRIES = 2_000_000  # of a matrix as a file


def matrix(session: Session, sentence: TracedSentence, name: str, head: int | None) -> Tensor:
    """Return a tensor of the trace, a weight, or what `follow` computes from them, as a matrix; `head` selects one of a
    tensor with heads."""
    if name == "delta_0":
        return relaxed_signal(session, sentence)
    if name == "swaps":
        return estimates(session, sentence)
    here, _, last = name.rpartition(".")
    x = sentence.trace.get(f"{here}.rho" if last == "sent" else name)
    if x is None:
        with session.model_at(sentence.version) as model, torch.no_grad():
            x = Tensors(model, sentence.trace, session.network)[name]
    if x.ndim == 3:
        if head is None or not 0 <= head < len(x):
            raise HandgradError(f"{name} has {len(x)} heads: pass head=0 to {len(x) - 1}")
        if last == "sent":  # not recorded: computed from what is
            with session.model_at(sentence.version) as model:
                return attention_head(model, sentence.trace, int(here.split(".")[1]), head).sent
        x = x[head]
    return x[None] if x.ndim == 1 else x


def slice_of(
    session: Session,
    sentence: TracedSentence,
    name: str,
    head: int | None,
    rows: Range | None = None,
    columns: Range | None = None,
) -> Picture:
    """Return a part of a matrix as a picture, for zooming, or all of it."""
    x = matrix(session, sentence, name, head)
    rows, columns = rows or (0, x.shape[0]), columns or (0, x.shape[1])
    for (low, high), size in ((rows, x.shape[0]), (columns, x.shape[1])):
        if not 0 <= low < high <= size:
            raise HandgradError(f"{name} is {x.shape[0]} × {x.shape[1]}; the range {low}:{high} is outside it")
    return picture(x, rows, columns)


def value_of(
    session: Session, sentence: TracedSentence, name: str, head: int | None, rows: Range, columns: Range
) -> Value:
    """Return the exact value that a cell shows: of its entries the one furthest from 0, with its row and column."""
    x = matrix(session, sentence, name, head)
    part = x[max(rows[0], 0) : rows[1], max(columns[0], 0) : columns[1]]
    if part.numel() == 0:
        where = f"rows {rows[0]}:{rows[1]}, columns {columns[0]}:{columns[1]}"
        raise HandgradError(f"{name} is {x.shape[0]} × {x.shape[1]}; {where} are outside it")
    i, j = divmod(int(part.abs().argmax()), part.shape[1])
    return {"value": part[i, j].item(), "row": rows[0] + i, "column": columns[0] + j}


def entries_of(
    session: Session,
    sentence: TracedSentence,
    name: str,
    head: int | None,
    rows: Indices | None = None,
    columns: Indices | None = None,
) -> Entries:
    """Return the entries of a matrix, for a file: all, or those of some rows and columns."""
    x = matrix(session, sentence, name, head)
    for axis, chosen in enumerate((rows, columns)):
        if chosen is None:
            continue
        if not all(0 <= i < x.shape[axis] for i in chosen):
            raise HandgradError(f"{name} is {x.shape[0]} × {x.shape[1]}: there is no such row or column")
        x = x.index_select(axis, torch.tensor(chosen))
    if x.numel() > MAX_ENTRIES:
        raise HandgradError(
            f"{name} has {x.numel():,} entries; a file has at most {MAX_ENTRIES:,}: read it from Python (copy as Python)"
        )
    return {"values": x.tolist()}

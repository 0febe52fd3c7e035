"""Follow one number: the sum of products that made a cell of an activation, an error signal or a gradient.

Every factor is a cell that can be followed in turn: gradients into Δ, Δ up to the loss, activations down to the tokens.
"""

import math

import torch
from torch import Tensor

from ...formatting import subscript
from ...model.inspect.trace import Trace
from ..json_types.station import CellName, Factor, Followed, Term, TermPlace
from ..presentation.notation import percent, symbol, typeset
from ..session.session import Session, TracedSentence
from . import forward, signals
from .tensors import Cell, Tensors, split
from .terms import Sum

VOCABULARY_ROWS = ("w_tok", "grad_w_tok")  # tensors with a row, or a column, for every token of the vocabulary
VOCABULARY_COLUMNS = ("a_12", "y_pred", "delta_12", "delta_0", "w_11", "grad_w_11")
ALL, SHOWN = (
    40,
    12,
)  # a sum of at most ALL terms is listed whole; of others the largest SHOWN, and what the others add up to


def follow(session: Session, sentence: TracedSentence, name: str, head: int | None, row: int, column: int) -> Followed:
    """Return the terms of one cell, largest first, with their sum beside the value on the screen."""
    with session.model_at(sentence.version) as model, torch.no_grad():
        return terms_of(
            session, sentence, Tensors(model, sentence.trace, session.network), Cell(name, row, column, head)
        )


def terms_of(session: Session, sentence: TracedSentence, t: Tensors, cell: Cell) -> Followed:
    value = t.value(cell)
    backward = split(cell.name)[1].startswith(("delta_", "grad_", "g_", "G_", "mean_G"))
    formula, sums = (signals if backward else forward).rule(t, sentence, cell)
    return _shown(session, sentence, t, cell, value, formula, sums)


def _shown(
    session: Session, sentence: TracedSentence, t: Tensors, cell: Cell, value: float, formula: str, sums: list[Sum]
) -> Followed:
    every = torch.cat([s.values() for s in sums]) if sums else torch.zeros(0, dtype=torch.float64)
    starts = [0]
    for s in sums:
        starts.append(starts[-1] + len(s.values()))
    order = every.abs().argsort(descending=True, stable=True).tolist()
    listed = order if len(order) <= ALL else order[:SHOWN]
    terms: list[Term] = []
    for i in listed:
        which = max(k for k in range(len(sums)) if starts[k] <= i)
        terms.append(_term(session, sentence, t, sums[which], i - starts[which], every[i].item()))
    shown = every[listed].sum().item()
    total = every.sum().item() if sums else value
    return {
        **_named(session, sentence, cell), "value": value, "formula": formula, "count": len(every), "terms": terms,
        "rest": {"count": len(every) - len(listed), "value": total - shown if len(listed) < len(every) else 0.0},
        "sum": total,
        "leaf": not sums, "caption": _caption(cell, value, every, order, terms, formula),
    }  # fmt: skip


def _term(session: Session, sentence: TracedSentence, t: Tensors, s: Sum, i: int, value: float) -> Term:
    factors: list[Factor] = []
    for factor in s.factors:
        k = i if len(factor.values) > 1 else 0
        cell = factor.cell(k)
        named = None if cell is None else _named(session, sentence, cell)
        shown = factor.symbol or (named["symbol"] if named else "")
        factors.append({"value": factor.values[k].item(), "symbol": shown, "cell": named})
    return {"value": value, "factors": factors, "scale": s.scale, **_place(session, sentence, s, i)}


def _place(session: Session, sentence: TracedSentence, s: Sum, i: int) -> TermPlace:
    """What tells a term from the others of its sum: the token that its factors belong to, with its position if it is one
    of the sentence, or else the number of a feature."""
    found: TermPlace = {"token": None, "position": None, "feature": None}
    for factor in s.factors:
        cell, other = factor.cell(i), factor.cell(0 if i else 1) if len(factor.values) > 1 else None
        if cell is None or other is None:
            continue
        named = _named(session, sentence, cell)
        row = cell.row != other.row
        label = named["row_label"] if row else named["column_label"]
        if label is not None:
            over_vocabulary = split(cell.name)[1] in (VOCABULARY_ROWS if row else VOCABULARY_COLUMNS)
            position = None if over_vocabulary else (cell.row if row else cell.column) + 1
            return {**found, "token": label, "position": position}
        found["feature"] = cell.row if row else cell.column
    return found


def _named(session: Session, sentence: TracedSentence, cell: Cell) -> CellName:
    """A cell as the page shows it: with the symbol of its tensor, the block, and the words of its row and column."""
    here, last = split(cell.name)
    block = int(here.split(".")[1]) if here else None
    wide = last in VOCABULARY_COLUMNS
    between = last in ("rho", "score", "scaled", "delta_causal", "delta_raw")
    tokens = (
        last.startswith(("a_", "delta_", "mu_", "sigma_", "rms_", "x_", "n_", "h_", "g_", "G_", "mean_", "sum_e"))
        or between
        or last in "qkv"
    )

    def word(i: int) -> str:
        return session.token_text(sentence.ids[i])

    row_label = word(cell.row) if (tokens or last == "y_pred") and cell.row < len(sentence.ids) else None
    if last in VOCABULARY_ROWS:
        row_label = session.token_text(cell.row)
    column_label = session.token_text(cell.column) if wide else word(cell.column) if between else None
    return {
        "name": cell.name, "symbol": symbol_of(last), "block": block, "head": cell.head, "row": cell.row,
        "column": cell.column, "row_label": row_label, "column_label": column_label,
        "python": python_of(sentence.trace, cell),
    }  # fmt: skip


def symbol_of(last: str) -> str:
    if last.startswith("a_bar_"):
        return "ā" + subscript(int(last.removeprefix("a_bar_")))
    if last.startswith(("G_", "mean_G")):
        what, _, n = last.rpartition("_")
        n = subscript(int(n)) if n.isdigit() else f"_{n}"
        return {"G": f"G{n}", "mean_G": f"mean(G{n})", "mean_Ga": f"mean(G{n} ∘ ā{n})"}[what]
    if last.startswith("grad_"):
        return "∂" + last.removeprefix("grad_")
    greek = {"sigma": "σ", "mu": "μ", "rms": "rms"}
    what, _, n = last.partition("_")
    if what in greek and n.isdigit():
        return greek[what] + subscript(int(n))
    return {"rho": "ρ", "y_pred": "y_pred", "sum_e": "Σ e^x"}.get(last) or symbol(last)


def python_of(trace: Trace, cell: Cell) -> str | None:
    """The expression that reads this cell from a trace; None for what a trace does not record."""
    if cell.name not in trace:
        return None
    index = [*([] if cell.head is None else [cell.head]), cell.row, cell.column][-trace[cell.name].ndim :]
    return f"trace[{cell.name!r}][{', '.join(map(str, index))}]"


def _caption(cell: Cell, value: float, every: Tensor, order: list[int], terms: list[Term], formula: str) -> str:
    if not len(every):
        return formula
    if len(every) == 1:
        return f"One term makes this number: {typeset(value)}."
    size = every.abs().sum().item()
    half, sofar = 0, 0.0
    while half < len(order) and sofar < size / 2:
        sofar += abs(every[order[half]].item())
        half += 1
    share = percent(abs(terms[0]["value"]) / size) if size else "0 %"
    against = every[every * value < 0].sum().item() if value else 0.0
    text = f"{len(every):,} terms add up to {typeset(value)}. The largest has {share} of their total size"
    text += f"; {half} of them have half of it." if half > 1 else "."
    if against and math.isfinite(against):
        text += f" Terms of the other sign take away {typeset(abs(against))}."
    return text

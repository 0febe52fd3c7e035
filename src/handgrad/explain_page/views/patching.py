"""Patching: a part of this trace gets the values of another one. Every patch is predicted by ⟨Δ, a′ − a⟩ from the backward
pass that the page has made; one that is chosen is measured by running the model with it.
"""

import torch

from ...errors import HandgradError
from ...model.inspect.edits import Edits
from ...model.inspect.patch import Rows, align, check_index, patch_from, with_signal
from ...model.inspect.patch_map import predictions
from ...model.inspect.trace import edited_forward
from ...model.passes.objective import TEXT_LOSS
from ..json_types.patching import PatchCell, Patched, Patches
from ..presentation.captions import quote
from ..presentation.notation import symbol, typeset
from ..presentation.pictures import picture
from ..session.session import Session, TracedSentence
from .what_if import moves_of

KINDS = {  # of a block's activations
    "a_3": "heads", "a_1": "stream before the block", "a_5": "stream after attention", "a_4": "what attention adds",
    "a_9": "what the feed-forward layer adds",
}  # fmt: skip
LARGEST = 8  # that are listed
COLUMNS = 4096  # all of them: the picture is as wide as the model is deep


def patch_map_at(session: Session, sentence: TracedSentence, other: TracedSentence, of: str = "a_3") -> Patches:
    """Predict every patch of a kind: of each head or block, at each position."""
    axes = _axes(session, of)
    rows = _partners(sentence, other)
    found = predictions(sentence.trace, other.trace, of, axes, rows, range(session.model.config.n_blocks))
    places = [(block, head) for block, x in found.items() for head in (range(x.shape[1]) if x.ndim == 2 else [None])]
    values = torch.cat([x.view(len(sentence.ids), -1) for x in found.values()], 1)  # (n, places)
    order = (
        values.abs()
        .flatten()
        .argsort(descending=True, stable=True)[: min(LARGEST, int(values.count_nonzero()))]
        .tolist()
    )
    largest: list[PatchCell] = []
    for t, column in (divmod(i, len(places)) for i in order):
        block, head = places[column]
        largest.append({
            "block": block, "head": head, "position": t, "predicted": values[t, column].item(),
            "label": _label(session, sentence, of, block, head, t),
        })  # fmt: skip
    flatten = ".transpose(0, 1).flatten(1)" if "head" in axes else ".T"
    return {
        "of": of, "kinds": [{"of": x, "label": f"{label} {symbol(x)}"} for x, label in _kinds(session).items()],
        "places": places, "values": values.tolist(),
        "picture": picture(values, limit=COLUMNS, rows_limit=len(values), full_range=True),
        "largest": largest,
        "caption": _about(largest, values.numel(), rows, len(values)),
        "python": f"found = hg.patch_map(model, tokens, targets, other, {of!r}, {axes!r}{_given(sentence, rows)})\n"
        f"found.predicted{flatten}",
    }  # fmt: skip


def patch_at(
    session: Session,
    sentence: TracedSentence,
    other: TracedSentence,
    block: int,
    of: str = "a_3",
    head: int | None = None,
    position: int | None = None,
) -> Patched:
    """Patch one part, at one position or all, and run the model."""
    axes = _axes(session, of)
    check_index("block", block, session.model.config.n_blocks)
    if (head is not None) > ("head" in axes):
        raise HandgradError(f"{of} has no heads: leave head out")
    name, rows = f"blocks.{block}.{of}", _partners(sentence, other)
    patch = patch_from(other.trace, name, position=position, head=head, align=rows)
    with_signal(sentence.trace, name)
    with session.model_at(sentence.version) as model:
        edits: tuple[Edits, ...] = ({}, patch)
        (value, before), (changed, after) = (
            edited_forward(model, sentence.tokens, sentence.targets, edit, sentence.objective) for edit in edits
        )
    guess, measured = patch.predicted(sentence.trace), changed - value
    label = _label(session, sentence, of, block, head, position)
    text = (
        f"With {label} from the other trace the objective changes by {typeset(measured)}; the gradient predicted"
        f" {typeset(guess)}. The objective of the other trace is {typeset(other.trace.loss)}."
    )
    where = "".join(f", {key}={i}" for key, i in (("position", position), ("head", head)) if i is not None)
    where += _align_argument(rows)
    objective = "" if sentence.objective == TEXT_LOSS else f", objective=hg.{sentence.objective}"
    return {
        "label": label, "value": value, "predicted": guess, "measured": measured,
        "moves": moves_of(session, sentence, before["a_12"], after["a_12"]), "caption": text,
        "python": f"patch = hg.patch_from(other, {name!r}{where})\n"
        f"base, changed = (hg.trace(model, tokens, targets{objective}, edit=edit) for edit in ({{}}, patch))\n"
        "changed.loss - base.loss, patch.predicted(trace)",
    }  # fmt: skip


def _kinds(session: Session) -> dict[str, str]:
    """What can be patched in this model."""
    made = {name.rpartition(".")[2] for steps in session.network.blocks for step in steps for name in step.outputs}
    heads = bool(session.network.having("attention"))
    return {of: label for of, label in KINDS.items() if of == "a_1" or (of in made and (of != "a_3" or heads))}


def _axes(session: Session, of: str) -> tuple[str, ...]:
    if of not in _kinds(session):
        raise HandgradError(f"{of[:40]!r} cannot be patched here: choose one of {', '.join(_kinds(session))}")
    return ("position", "head") if of == "a_3" else ("position",)


def _partners(sentence: TracedSentence, other: TracedSentence) -> Rows | None:
    """Which row of the other trace belongs to which; None if the sentences have as many tokens."""
    return None if len(sentence.ids) == len(other.ids) else align(sentence.tokens, other.tokens)


def _label(
    session: Session, sentence: TracedSentence, of: str, block: int, head: int | None, position: int | None
) -> str:
    part = f"{symbol(of)} of block {block + 1}" if head is None else f"head {head + 1} of block {block + 1}"
    if position is None:
        return f"{part} at every position"
    return f"{part} at {quote(session.token_text(sentence.ids[position]))} (position {position + 1})"


def _about(largest: list[PatchCell], count: int, rows: Rows | None, n: int) -> str:
    text = (
        f"All {count:,} patches are predicted by the one backward pass that this page has made; measuring them would take"
        " as many forward passes."
    )
    if largest:
        text += f" The largest change is predicted for {largest[0]['label']}: {typeset(largest[0]['predicted'])}."
    else:
        text += " All predicted changes are 0: the objective does not depend on the tokens that differ."
    if rows is not None and len(rows) < n:
        text += f" {n - len(rows)} of the {n} tokens have no partner in the other sentence and stay as they are."
    return text


def _align_argument(rows: Rows | None) -> str:
    return "" if rows is None else ", align=hg.align(trace['a_0'], other['a_0'])"


def _given(sentence: TracedSentence, rows: Rows | None) -> str:
    """Further arguments of hg.patch_map."""
    objective = "" if sentence.objective == TEXT_LOSS else f", objective=hg.{sentence.objective}"
    return objective + _align_argument(rows)

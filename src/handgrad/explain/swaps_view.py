"""Station a_0: if another token stood here, how would the objective change? Estimated by Δ_0, and measured.

    Δ_0 = Δ_1 w_tokᵗ (n, V)       Section 2, with tokens relaxed to vectors
    estimate = Δ_0[t, j] − Δ_0[t, own]

A swap is a large step, so the estimate is often wrong even in sign. It is measured by running the sentence with the other
token as input at t; what the model has to predict stays.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import HandgradError
from ..model.gpt import GPT
from ..ops import linear
from . import captions
from .session import Session, TracedSentence

SWAPS = 4  # candidates per position


def relaxed_signal(model: GPT, sentence: TracedSentence) -> Tensor:
    """Δ_0 = Δ_1 w_tokᵗ (n, V)"""
    w_tok = model.embed.table(torch.arange(model.config.n_vocab))[0]
    return linear.backward(sentence.trace["blocks.0.delta_1"], w_tok)


def estimates(session: Session, sentence: TracedSentence) -> Tensor:
    """Δ_0[t, j] − Δ_0[t, own] (n, tokens of the tokenizer)"""
    with session.model_at(sentence.version) as model, torch.no_grad():
        delta_0 = relaxed_signal(model, sentence)
    own = delta_0.gather(1, torch.tensor(sentence.ids)[:, None])
    return (delta_0 - own)[:, : session.tokenizer.n_vocab]


def swaps(session: Session, sentence: TracedSentence, labels: list[str]) -> dict[str, Any]:
    """Return the most promising tokens of every position; those of the best position are measured."""
    change = estimates(session, sentence)
    rows: list[dict[str, Any]] = [{"id": id, "swaps": _best(session, change[t])} for t, id in enumerate(sentence.ids)]
    caption = "No other token would lower the objective, to first order."
    promising = [t for t, row in enumerate(rows) if row["swaps"]]
    if promising:
        t = min(promising, key=lambda t: rows[t]["swaps"][0]["change"])
        _measure(session, sentence, t, rows[t]["swaps"])
        first = rows[t]["swaps"][0]
        caption = captions.about_swaps(labels, t, first["word"], first["change"], first["measured"])
    return {"matrix": change, "swaps": rows, "swaps_caption": caption}


def swaps_at(session: Session, sentence: TracedSentence, position: int) -> dict[str, Any]:
    """Return the most promising tokens of one position, measured."""
    if not 0 <= position < len(sentence.ids):
        raise HandgradError(f"the sentence has {len(sentence.ids)} tokens: there is no position {position}")
    found = _best(session, estimates(session, sentence)[position])
    _measure(session, sentence, position, found)
    lower = sum(swap["measured"] < 0 for swap in found)
    text = f"{lower} of {len(found)} replacements lower the objective when they are measured."
    return {"position": position, "swaps": found, "caption": text if found else "No estimate is below 0 here."}


def _best(session: Session, change: Tensor) -> list[dict[str, Any]]:
    best = torch.topk(-change, min(SWAPS, len(change))).indices.tolist()
    return [
        {"id": i, "word": session.token_text(i), "change": change[i].item(), "measured": None}
        for i in best
        if change[i] < 0
    ]


def _measure(session: Session, sentence: TracedSentence, t: int, found: list[dict[str, Any]]) -> None:
    """Add the measured change of the objective to each swap at position t."""
    with session.model_at(sentence.version) as model:
        now = model.loss(sentence.tokens, sentence.targets, objective=sentence.objective)  # by the same path
        for swap in found:
            ids = sentence.tokens
            ids[0, t] = swap["id"]
            value = model.loss(ids, sentence.targets, objective=sentence.objective)
            swap["measured"] = value - now

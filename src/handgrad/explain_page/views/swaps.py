"""Station a_0: if another token stood here, how would the objective change? Estimated by Δ_0, and measured.

    Δ_0 = Δ_1 w_tokᵗ (n, V)       Section 2, with tokens relaxed to vectors
    estimate = Δ_0[t, j] − Δ_0[t, own]

A swap is a large step, so the estimate is often wrong even in sign. It is measured by running the sentence with the other
token as input at t; what the model has to predict stays.
"""

import torch
from torch import Tensor

from ...errors import HandgradError
from ...model.steps import signal
from ...ops import linear
from ..json_types.station import Swap, Swaps, TokenSwaps
from ..presentation import captions
from ..session.session import Session, TracedSentence

SWAPS = 4  # candidates per position


def relaxed_signal(session: Session, sentence: TracedSentence) -> Tensor:
    """Δ_0 = Δ_1 w_tokᵗ (n, V)"""
    with session.model_at(sentence.version) as model, torch.no_grad():
        w_tok = model.embed.table(torch.arange(model.config.n_vocab))[0]
        return linear.backward(sentence.trace[signal(session.network.start)], w_tok)


def estimates(session: Session, sentence: TracedSentence) -> Tensor:
    """Δ_0[t, j] − Δ_0[t, own] (n, tokens of the tokenizer)"""
    delta_0 = relaxed_signal(session, sentence)
    own = delta_0.gather(1, torch.tensor(sentence.ids)[:, None])
    return (delta_0 - own)[:, : session.tokenizer.n_vocab]


def best_swaps(session: Session, sentence: TracedSentence, change: Tensor) -> tuple[list[TokenSwaps], str]:
    """Return the most promising tokens of every position, and a caption; those of the best position are measured."""
    rows: list[TokenSwaps] = [{"id": id, "swaps": _best(session, change[t])} for t, id in enumerate(sentence.ids)]
    promising = [t for t, row in enumerate(rows) if row["swaps"]]
    if not promising:
        return rows, "No other token would lower the objective, to first order."
    t = min(promising, key=lambda t: rows[t]["swaps"][0]["change"])
    measured = _measure(session, sentence, t, rows[t]["swaps"])
    first = rows[t]["swaps"][0]
    labels = session.labels(sentence)
    return rows, captions.about_swaps(labels, t, first["word"], first["change"], measured[0])


def swaps_at(session: Session, sentence: TracedSentence, position: int) -> Swaps:
    """Return the most promising tokens of one position, measured."""
    if not 0 <= position < len(sentence.ids):
        raise HandgradError(f"the sentence has {len(sentence.ids)} tokens: there is no position {position}")
    found = _best(session, estimates(session, sentence)[position])
    lower = sum(change < 0 for change in _measure(session, sentence, position, found))
    text = f"{lower} of {len(found)} replacements lower the objective when they are measured."
    return {"position": position, "swaps": found, "caption": text if found else "No estimate is below 0 here."}


def _best(session: Session, change: Tensor) -> list[Swap]:
    best = torch.topk(-change, min(SWAPS, len(change))).indices.tolist()
    return [
        {"id": i, "word": session.token_text(i), "change": change[i].item(), "measured": None}
        for i in best
        if change[i] < 0
    ]


def _measure(session: Session, sentence: TracedSentence, t: int, found: list[Swap]) -> list[float]:
    """Add the measured change of the objective to each swap at position t, and return them."""
    measured = []
    with session.model_at(sentence.version) as model:
        now = model.loss(sentence.tokens, sentence.targets, objective=sentence.objective)  # by the same path
        for swap in found:
            ids = sentence.tokens
            ids[0, t] = swap["id"]
            value = model.loss(ids, sentence.targets, objective=sentence.objective)
            swap["measured"] = value - now
            measured.append(value - now)
    return measured

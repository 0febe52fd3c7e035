"""The data of the view of all heads: a small picture of each head's attention and of the error it sends back."""

from typing import Any

import torch

from ..formatting import percent
from .attention_view import one_head, projections
from .captions import quote
from .pictures import picture
from .session import Session, TracedSentence
from .views import labels_of

CELLS = 24  # most rows and columns of a small picture


def all_heads(session: Session, sentence: TracedSentence) -> dict[str, Any]:
    """Return, for every head of every block, ρ, Δ_raw, the error sent back between tokens, and two numbers: the length of
    the error that reaches the head, and the share of attention on the first token."""
    config, t = session.model.config, sentence.trace
    blocks: list[list[dict[str, Any]]] = []
    with session.model_at(sentence.version) as model, torch.no_grad():
        for b, block in enumerate(model.blocks):
            pairs = projections(block.attn)
            row = []
            for h in range(config.n_heads):
                head = one_head(model, t, b, h, pairs)
                first = head.rho[1:, 0].mean().item() if len(head.rho) > 1 else 1.0
                maps = {"rho": head.rho, "delta_raw": head.raw, "sent": head.sent()}
                small = {
                    name: picture(x, limit=CELLS, most_rows=CELLS, full_range=name == "rho") for name, x in maps.items()
                }
                row.append({"incoming": head.signal.norm().item(), "first": first, **small})
            blocks.append(row)
    return {"blocks": blocks, "caption": _caption(blocks, labels_of(session, sentence))}


def _caption(blocks: list[list[dict[str, Any]]], labels: list[str]) -> str:
    heads = [(head, b, h) for b, row in enumerate(blocks) for h, head in enumerate(row)]
    total = sum(head["incoming"] ** 2 for head, _, _ in heads)
    most, b, h = max(heads, key=lambda found: found[0]["incoming"])
    resting = sum(head["first"] > 0.5 for head, _, _ in heads)
    text = f"Of {len(heads)} heads, {resting} give more than half of their attention to the first token, {quote(labels[0])}."
    if total:
        share = percent(most["incoming"] ** 2 / total)
        text += f" The most error reaches head {h + 1} of block {b + 1}: {share} of all squared error at the heads."
    return text

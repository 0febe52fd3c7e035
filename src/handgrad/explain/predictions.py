"""The predictions for a sentence that is being typed: the forward pass alone, which is much faster than a trace."""

from typing import Any

import torch

from .session import Session
from .views import with_probabilities


def predict(session: Session, text: str, version: int, top: int = 5) -> dict[str, Any]:
    """Return the tokens, the loss of each, and for every position the target and the most probable tokens."""
    ids = session.encode(text)
    with session.model_at(version) as model, torch.no_grad():
        chances = torch.softmax(model.logits(torch.tensor(ids)).float(), 1)
    labels = [session.token_text(id) for id in ids]
    positions = []
    for t, row in enumerate(chances):
        best = torch.topk(row, min(top, len(row)))
        found: dict[str, Any] = {"token": labels[t], "target": None, "probability": None, "rank": None}
        if t + 1 < len(ids):
            p = row[ids[t + 1]]
            found |= {"target": labels[t + 1], "probability": p.item(), "rank": int((row > p).sum()) + 1}
        positions.append({**found, "top": with_probabilities(session, best)})
    losses = -torch.log(chances[range(len(ids) - 1), ids[1:]].clamp(min=1e-45))
    return {
        "text": text, "tokens": [{"id": id, "label": label} for id, label in zip(ids, labels, strict=True)],
        "losses": losses.tolist(), "positions": positions,
    }  # fmt: skip

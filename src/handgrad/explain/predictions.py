"""The predictions for a sentence that is being typed: the forward pass alone, which is much faster than a trace."""

from typing import Any

import torch

from .chances import log_chances, predicted, standing
from .session import Session


def predict(session: Session, text: str, version: int, top: int = 5) -> dict[str, Any]:
    """Return the tokens, the loss of each, and for every position the target and the most probable tokens."""
    ids = session.encode(text)
    with session.model_at(version) as model, torch.no_grad():
        logits = model.logits(torch.tensor(ids))
    labels = [session.token_text(id) for id in ids]
    positions = []
    for t, row in enumerate(map(log_chances, logits)):
        found: dict[str, Any] = {"token": labels[t], "target": None, "probability": None, "rank": None}
        if t + 1 < len(ids):
            found |= standing(session, row, ids[t + 1])
        positions.append({**found, "top": predicted(session, row, top)})
    return {
        "text": text, "tokens": [{"id": id, "label": label} for id, label in zip(ids, labels, strict=True)],
        "losses": [found["loss"] for found in positions[:-1]], "positions": positions,
    }  # fmt: skip

"""The predictions for a sentence that is being typed: the forward pass alone, which is much faster than a trace."""

import torch

from ..json_types.model import Predictions
from ..presentation.chances import log_chances, position_of
from ..session.session import Session


def predict(session: Session, text: str, version: int = 0, *, top: int = 5) -> Predictions:
    """Return the tokens, the loss of each, and for every position the target and the most probable tokens."""
    ids = session.encode(text)
    with session.model_at(version) as model, torch.no_grad():
        logits = model.logits(torch.tensor(ids))
    targets = [*ids[1:], -1]
    rows = map(log_chances, logits)
    positions = [position_of(session, row, id, next, top) for row, id, next in zip(rows, ids, targets, strict=True)]
    losses = [row["loss"] for row in positions if row["loss"] is not None]
    return {"text": text, "tokens": session.tokens(ids), "losses": losses, "positions": positions}

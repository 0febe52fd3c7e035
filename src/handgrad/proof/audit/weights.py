"""What known mistakes would have made of a weight's gradient: other rows, a sequence left out, DoRA's norms not detached."""

from dataclasses import replace

import torch
from torch import Tensor

from ...adapters.lora import LoRA
from ...model.layers import Affine, Linear
from ...ops import loss
from .batch import AuditBatch
from .expect import expect
from .subject import Subject

MAX_SEQUENCES = 16  # of a batch whose sequences are differentiated one by one
STEPS = {"next": 1, "previous": -1}


def parts_of_sequences(subject: Subject, batch: AuditBatch, name: str) -> dict[str, Tensor]:
    """What each sequence adds to the gradient of our parameter `name`."""
    if not 2 <= len(batch.lengths) <= MAX_SEQUENCES:
        return {}
    tokens, targets = (torch.split(x, batch.lengths) for x in (batch.tokens, batch.targets))
    rows = batch.rows.view(batch.shape).any(1).nonzero().flatten().tolist()
    found = {}
    for i, row in enumerate(rows):
        alone = replace(batch, tokens=tokens[i], targets=targets[i], lengths=[batch.lengths[i]])
        grads = expect(subject, alone, [batch.n_targets]).grads
        found[f"the part of sequence {row + 1} of {batch.shape[0]}"] = grads[name]
    return found


def from_other_rows(layer: Linear, a: Tensor, delta: Tensor, shape: tuple[int, int]) -> dict[str, Tensor]:
    """∂w = aᵗ Δ with each row of a replaced by the one after or before it, as the weight is stored; a and Δ (B · T, ·) with
    padding."""
    found = {}
    for which, step in STEPS.items():
        sequences = a.view(*shape, -1).roll(-step, 1)
        sequences[:, -1 if step > 0 else 0] = 0.0
        for where, moved in (("", a.roll(-step, 0)), (" of its sequence", sequences.flatten(0, 1))):
            grad = moved.t() @ delta
            found[f"its input were that of the {which} row{where}"] = grad if layer.in_out else grad.t()
    return found


def into_other_rows(w: Tensor, ids: Tensor, delta: Tensor) -> dict[str, Tensor]:
    """An embedding's gradient with the error signal of each token given to the one after or before it."""
    moved = {which: ids.flatten().cpu().roll(-step) for which, step in STEPS.items()}
    return {
        f"error signals went to the {which} token": torch.zeros_like(w).index_add_(0, tokens, delta)
        for which, tokens in moved.items()
    }


@torch.no_grad()
def delta_of_logits(head: Affine, a_11: Tensor, batch: AuditBatch) -> Tensor:
    """Δ_12 = (y_pred − y_gt) / number of targets (B · T, V), 0 where there is no target"""
    chosen = loss.rows_with_target(batch.targets)
    rows = batch.rows.nonzero().flatten()[chosen]
    logits = head.forward(a_11[rows])
    delta = logits.new_zeros(len(a_11), logits.shape[1])
    delta[rows] = loss.forward_and_delta(logits, batch.targets[chosen], 1 / batch.n_targets)[1]
    return delta


@torch.no_grad()
def with_undetached_norms(layer: LoRA, path: str, factor: str, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of DoRA's d or u if c, the norms of the columns of w' = w + s d u, were not taken as constants:

    ∂w' has the additional term −w' ∘ (∂m ∘ m / c²);   ∂d = s ∂w' uᵗ,   ∂u = s dᵗ ∂w'
    """
    of_magnitude, right = grads.get(f"{path}.magnitude"), grads.get(f"{path}.{factor}")
    if layer.magnitude is None or of_magnitude is None or right is None or factor not in ("down", "up"):
        return {}
    w = layer.base.effective_weight() + layer.scale * layer.down @ layer.up
    more = -w * (of_magnitude * layer.magnitude / layer.column_norms() ** 2)
    term = more @ layer.up.t() if factor == "down" else layer.down.t() @ more
    return {"DoRA's column norms were differentiated, not detached": right + layer.scale * term}

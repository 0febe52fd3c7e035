"""The batch of an audit: sequences with padding, as transformers takes them, and the same tokens packed, as we take them.

inputs   input_ids, attention_mask, labels (B, T)
rows     (B · T) bool: the tokens that are no padding and whose sequence has a target; our rows are these, in order
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import HandgradError
from ...model.config import ModelConfig
from ...ops.loss import NO_TARGET

KNOWN = ("input_ids", "labels", "attention_mask", "position_ids")


@dataclass(frozen=True)
class AuditBatch:
    """Checked inputs of a causal language model."""

    inputs: dict[str, Tensor]  # for the audited model
    rows: Tensor  # (B · T)   tokens that both models have
    tokens: Tensor  # (n)
    targets: Tensor  # (n)   the next token's label; −100: none
    lengths: list[int]  # of the packed sequences
    positions: Tensor  # (B, T)   from 0 in each sequence; 0 in padding
    from_padding: int = 0  # labels that padding would have had to predict; they are masked
    experts: dict[str, Tensor] = field(
        default_factory=dict
    )  # (B, T, k) that ours uses, where a block's are not its own

    @property
    def shape(self) -> tuple[int, int]:
        sequences, width = self.inputs["input_ids"].shape
        return sequences, width

    @property
    def placed(self) -> Tensor:
        """(B, T): the positions as the audited model counts them, those of padding included"""
        given = self.inputs.get("position_ids")
        return torch.arange(self.shape[1]).expand(self.shape) if given is None else given.cpu().expand(self.shape)

    @property
    def n_targets(self) -> int:
        return int((self.targets != NO_TARGET).sum())

    @property
    def targets_of_each(self) -> list[int]:
        """The number of targets of every packed sequence."""
        return [int((x != NO_TARGET).sum()) for x in torch.split(self.targets, self.lengths)]

    @property
    def padded(self) -> bool:
        return not bool(self.inputs["attention_mask"].all())

    @property
    def complete(self) -> bool:
        """Whether every sequence has a target, so that no token is left out of `tokens`."""
        return len(self.tokens) == int((self.inputs["attention_mask"] != 0).sum())

    def sequences(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The tokens and the targets of every packed sequence."""
        return zip(*(torch.split(x, self.lengths) for x in (self.tokens, self.targets)), strict=True)

    def only(self, sequences: list[int]) -> "AuditBatch":
        """Some of its sequences."""
        alone = make_batch({name: x[sequences] for name, x in self.inputs.items()})
        return replace(alone, experts={name: x[sequences] for name, x in self.experts.items()})

    def changed(self, **inputs: Tensor) -> "AuditBatch":
        """The same with other inputs."""
        changed = make_batch({**self.inputs, **inputs})
        return replace(changed, experts=self.experts) if changed.shape == self.shape else changed


def make_batch(given: Any) -> AuditBatch:
    """Check a batch: a mapping with input_ids and, optionally, labels, attention_mask and position_ids, or ids (B, T)."""
    batch: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"input_ids": given}
    unknown = [name for name in batch if name not in KNOWN]
    if unknown or not isinstance(batch.get("input_ids"), Tensor):
        raise HandgradError(
            f"the batch must be token ids (B, T), or a dictionary of {', '.join(KNOWN)}, of which input_ids is needed;"
            f" got {', '.join(map(str, batch)) if unknown else type(batch.get('input_ids')).__name__}"
        )
    ids = batch["input_ids"]
    if ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
        raise HandgradError(f"input_ids must be integers (B, T), not {ids.dtype} of shape {tuple(ids.shape)}")
    mask = batch.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    labels = batch.get("labels")
    labels = ids.masked_fill(mask == 0, NO_TARGET) if labels is None else labels
    for name, x in (("attention_mask", mask), ("labels", labels)):
        if not isinstance(x, Tensor) or x.shape != ids.shape:
            raise HandgradError(f"{name} must have the shape of input_ids, {tuple(ids.shape)}")
    present = mask.cpu() != 0
    starts = present.int().argmax(1)
    width = present.sum(1)
    expected = torch.arange(ids.shape[1])[None]
    if not torch.equal(present, (expected >= starts[:, None]) & (expected < (starts + width)[:, None])):
        raise HandgradError("attention_mask must be one run of ones in every row: padding on the left or on the right")
    positions = (present.long().cumsum(1) - 1).clamp_min(0)
    if (given_positions := batch.get("position_ids")) is not None:
        if not torch.equal(given_positions.cpu().expand_as(positions)[present], positions[present]):
            raise HandgradError(
                "position_ids must count from 0 in every row: several sequences packed into one row cannot be audited;"
                " give one sequence per row"
            )
        batch["position_ids"] = given_positions.expand_as(ids)
    following = torch.full_like(labels, NO_TARGET)
    following[:, :-1] = labels[:, 1:]
    from_padding = (following.cpu() != NO_TARGET) & ~present
    labels = labels.clone()
    labels[:, 1:][from_padding[:, :-1].to(labels.device)] = NO_TARGET
    targets = following.cpu().masked_fill(~present, NO_TARGET)
    with_target = (targets != NO_TARGET).any(1)
    rows = present & with_target[:, None]
    if not rows.any():
        raise HandgradError("no token of the batch has a target: every label is −100, or every sequence has one token")
    inputs = {**batch, "attention_mask": mask, "labels": labels}
    return AuditBatch(
        inputs, rows.flatten(), ids.cpu()[rows], targets[rows], width[with_target].tolist(), positions,
        int(from_padding.sum()),
    )  # fmt: skip


def check_ids(batch: AuditBatch, config: ModelConfig) -> None:
    """Raise if the model cannot take these ids."""
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    for name, x in (("input_ids", ids), ("labels", labels[labels != NO_TARGET])):
        low, high = (int(end) for end in torch.aminmax(x))
        if low < 0 or high >= config.n_vocab:
            raise HandgradError(
                f"{name} holds {low if low < 0 else high}, which is outside the vocabulary: ids go from 0 to"
                f" {config.n_vocab - 1}"
            )
    if batch.shape[1] > config.n_context:
        raise HandgradError(
            f"rows of {batch.shape[1]} tokens do not fit into a context of {config.n_context}: shorten them"
        )

"""Logits layer and loss of a transformers model as one function: what `hg.nn.replace(model, loss=True)` adds.

The model's own code calls the logits layer and then its loss. `CausalLMPart` runs that code on a copy of the model that
shares all but the logits layer: the copy's passes its input on, and its loss computes the logits, which never exist
together for all tokens. The layer itself is what it was for everyone else who calls it, in a hook or another thread.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..families import FAMILIES
from ..ops.loss import NO_TARGET
from .functions import opaque
from .loss import linear_cross_entropy
from .parts import Linear, Part, fell_back, is_observed, one_dtype, precision_of, why_not_tensors


class CausalLMPart(Part):
    """In training with labels, logits and loss are one function, and the output has no logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        me: Any = self
        if kwargs.get("labels") is None or not self.training or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        reason = self.why_not() or why_not_loss(me)
        if reason:
            fell_back(self, reason)
            return super().forward(*args, **kwargs)
        found = super(CausalLMPart, self._deferring()).forward(*args, **kwargs)
        if isinstance(found, tuple):
            return (found[0], *found[2:])
        return type(found)(**{name: value for name, value in found.items() if name != "logits"})

    @opaque
    def _deferring(self) -> Any:
        """This model with another logits layer, for one call."""
        me: Any = self
        found = type(self).__new__(type(self))
        modules = {**self._modules, "lm_head": nn.Identity()}
        found.__dict__.update(self.__dict__, _modules=modules, _handgrad_head=me.lm_head)
        return found

    @property
    def loss_function(self) -> Any:
        if "_handgrad_head" in self.__dict__:
            return self._deferred_loss
        return super().loss_function  # type: ignore[misc]

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value

    def _deferred_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = NO_TARGET,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The loss of transformers, from the input of the logits layer: the token after each is its target."""
        head: Any = self.__dict__["_handgrad_head"]
        targets = shift_labels
        if targets is None:
            targets = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = targets.to(logits.device)
        if ignore_index != NO_TARGET:
            targets = targets.masked_fill(targets == ignore_index, NO_TARGET)
        if why_not_tensors(logits) or one_dtype(logits, head.weight, head.bias):
            given = {"ignore_index": ignore_index, "shift_labels": shift_labels, **options}
            own: Any = super().loss_function  # type: ignore[misc]
            loss: Tensor = own(head(logits), labels, vocab_size, num_items_in_batch=num_items_in_batch, **given)
            return loss
        n_targets = None if num_items_in_batch is None else float(num_items_in_batch)
        return linear_cross_entropy(
            logits, head.weight, targets.reshape(logits.shape[:-1]), head.bias, n_targets=n_targets,
            precision=precision_of(self),
        )  # fmt: skip


def changed_logits(model: Any) -> str:
    """What the model's code does with its logits that it may not do with the input of their layer; "" if nothing. Scaling
    either is the same, without a bias."""
    fields = {ours: field for field, ours in FAMILIES[model.config.model_type].fields.items()}
    if getattr(model.config, fields.get(("logit_cap",), ""), None) is not None:
        return "its logits are capped"
    return "its logits are scaled after a bias" if ("logit_scale",) in fields and model.lm_head.bias is not None else ""


def why_not_loss(model: Any) -> str:
    """Why logits and loss of a model stay separate; "" if they are one function."""
    head: Any = model.lm_head
    loss = model.loss_function
    if type(head) is not Linear:
        return f"the logits layer is a {type(head).__name__}"
    if (getattr(loss, "__module__", ""), getattr(loss, "__qualname__", "")) != (
        "transformers.loss.loss_utils",
        "ForCausalLMLoss",
    ):
        return f"loss_function is {getattr(loss, '__name__', type(loss).__name__)}, not ForCausalLMLoss"
    if is_observed(head):
        return "a hook, or another forward, on the logits layer"
    if len(head.weight) != model.config.vocab_size:
        return f"{len(head.weight)} logits, and vocab_size is {model.config.vocab_size}"
    return changed_logits(model) or head.why_not(head.weight, head.bias)

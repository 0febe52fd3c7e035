"""`hg.nn.wrap`: a handgrad model as a module that trains with `loss.backward()`, as transformers' models do.

With labels the forward pass computes the loss and all gradients by `loss_and_grads`, in pieces and without padding, and the
backward pass hands the gradients over, times the error signal of the loss. Without labels the logits carry gradients.
"""

import json
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..adapters import peft
from ..errors import HandgradError
from ..formats import huggingface
from ..formats.config_json import config_json
from ..model.gpt import GPT
from ..ops import loss as softmax_loss
from .functions import first_derivative, opaque, without_autocast
from .wrapped_logits import LogitsFunction, gradients_of


class LossFunction(Function):
    """The mean loss of a batch; its inputs are the trainable parameters."""

    @staticmethod
    def forward(
        ctx: Any, wrapped: "Wrapped", batch: tuple[Any, ...], n_targets: int | None, *parameters: Any
    ) -> Tensor:
        model = wrapped.handgrad_model
        recompute = "blocks" if wrapped.gradient_checkpointing else "none"
        compute = partial(model.loss_and_grads, *batch, n_targets=n_targets, recompute=recompute)
        value, grads = gradients_of(parameters, compute)
        ctx.save_for_backward(*grads)
        return torch.tensor(value, dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        factor = delta.item() if delta.is_cpu else delta
        return None, None, None, *(x if factor == 1 else x * factor for x in ctx.saved_tensors)


class Output(OrderedDict[str, Any]):
    """loss and logits, by name as an attribute or a key, or by number: what transformers.Trainer expects of a model."""

    def __getattr__(self, name: str) -> Any:
        if name in ("loss", "logits"):
            return self.get(name)
        raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)


class Fields(SimpleNamespace):
    """The fields of config.json, as trainers and loggers read them of a model's `config`."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_json_string(self) -> str:
        return json.dumps(vars(self), indent=2)


class Wrapped(nn.Module):
    """A handgrad model whose forward takes and returns what transformers' models do.

        wrapped(input_ids, labels=labels).loss.backward()

    Its state_dict has the model's own names, which are Hugging Face's; parameters are the model's own tensors. A tied
    logits layer is stored once, as in Hugging Face's files."""

    handgrad_model: GPT
    loss_type = "ForCausalLM"  # transformers.Trainer then counts targets as the loss does: the first label is none

    def __init__(self, model: GPT):
        super().__init__()
        self.__dict__["handgrad_model"] = model  # not a submodule: names in the state_dict have no prefix
        self.gradient_checkpointing = False
        self.config = Fields(**config_json(model.config, model.dtype))
        for name, child in model.named_children():
            self.add_module(name, child)
        self.train(model.training)

    def _get_name(self) -> str:
        """The name of transformers' class: by it, Trainer knows that the label of a row is the token after it."""
        return self.handgrad_model.config.table.architecture

    def train(self, mode: bool = True) -> "Wrapped":
        super().train(mode)
        self.handgrad_model.training = mode
        return self

    def activation_checkpointing_enable(self, *args: Any, **options: Any) -> None:
        """Save only each block's input and recompute the block in the backward pass."""
        self.gradient_checkpointing = True

    def activation_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = False

    # The names of transformers before 5.23.
    gradient_checkpointing_enable, gradient_checkpointing_disable = (
        activation_checkpointing_enable,
        activation_checkpointing_disable,
    )

    @opaque
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> Output:
        """(B, T) ids, a mask that is 0 at padding, and labels, which are the ids themselves: the token after each is its
        target, and −100 is none. With labels and gradients the output has a loss and no logits, else logits, which carry
        gradients if these are wanted."""
        given = [name for name, value in options.items() if isinstance(value, Tensor) or value]
        wrong = [name for name in given if name not in _NO_EFFECT]
        if wrong:
            raise HandgradError(f"a wrapped model takes input_ids, attention_mask and labels, not {', '.join(wrong)}")
        rows, lengths = self._pack(input_ids, attention_mask)
        model = self.handgrad_model
        tokens = input_ids.reshape(-1)[rows]
        if labels is None:
            return Output(logits=self._logits(input_ids.shape, tokens, lengths, rows))
        targets = self._targets(labels, input_ids, rows)
        n_targets = None if num_items_in_batch is None else int(num_items_in_batch)
        trained = [p for p in model.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and trained:
            batch = (tokens, targets, lengths)
            with without_autocast(model.device.type):
                return Output(loss=LossFunction.apply(self, batch, n_targets, *trained))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            logits = self._logits(input_ids.shape, tokens, lengths, rows)
            chosen = softmax_loss.rows_with_target(targets)
            summed = softmax_loss.forward(logits.reshape(-1, logits.shape[-1])[rows][chosen], targets[chosen])
            return Output(loss=summed / (len(chosen) if n_targets is None else n_targets), logits=logits)

    def _logits(self, shape: torch.Size, tokens: Tensor, lengths: list[int], rows: Tensor) -> Tensor:
        """(B, T, V), 0 at padding"""
        model = self.handgrad_model
        trained = [p for p in model.parameters() if p.requires_grad]
        with without_autocast(model.device.type):
            if torch.is_grad_enabled() and trained:
                given = model, tokens, lengths, self.gradient_checkpointing
                found: Tensor = LogitsFunction.apply(*given, *trained)  # type: ignore[no-untyped-call]
            else:
                found = model.logits(tokens, lengths)
        if len(tokens) < shape.numel():
            found = found.new_zeros(shape.numel(), found.shape[-1]).index_copy(0, rows, found)
        return found.view(*shape, -1)

    def _pack(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, list[int]]:
        """The rows of the batch that are no padding, and how many each sequence has."""
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            raise HandgradError(f"input_ids must be (B, T), not {tuple(getattr(ids, 'shape', ()))}")
        if mask is None:
            return torch.arange(ids.numel(), device=ids.device), [ids.shape[1]] * ids.shape[0]
        if mask.shape != ids.shape:
            raise HandgradError(
                f"attention_mask {tuple(mask.shape)} must have the shape of input_ids {tuple(ids.shape)}"
            )
        mask = mask.bool()
        starts = mask & ~nn.functional.pad(mask, (1, 0))[:, :-1]
        if not bool((starts.sum(1) == 1).all()):
            raise HandgradError("attention_mask must have one range of ones in every row, and zeros at padding")
        if self.handgrad_model.config.positions == "learned" and not bool(mask[:, 0].all()):
            raise HandgradError("a model with learned positions needs padding on the right (padding_side='right')")
        return mask.reshape(-1).nonzero().squeeze(1), mask.sum(1).tolist()

    def _targets(self, labels: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
        """The targets of these rows."""
        if labels.shape != ids.shape:
            raise HandgradError(f"labels {tuple(labels.shape)} must have the shape of input_ids {tuple(ids.shape)}")
        after = nn.functional.pad(labels, (0, 1), value=softmax_loss.NO_TARGET)[:, 1:].reshape(-1)
        if int((after != softmax_loss.NO_TARGET).sum()) > int((after[rows] != softmax_loss.NO_TARGET).sum()):
            raise HandgradError("labels at padding must be −100")
        return after[rows]

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = super().state_dict(*args, **options)
        found.pop(options.get("prefix", "") + self._tied(), None)
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        # torch calls it of every module of a tree, and so of a wrapped model inside another module
        embed, tied = f"{prefix}{self.handgrad_model.config.table.names['embed']}.weight", self._tied()
        if tied and embed in state_dict:
            state_dict[prefix + tied] = state_dict[embed]
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _tied(self) -> str:
        """The name of a logits weight that is the embedding's; "" if it has its own."""
        config = self.handgrad_model.config
        adapted = self.handgrad_model.head.adapted
        return f"{config.table.names['head']}.weight" if config.tied and not adapted else ""

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Write a directory that transformers opens, or, of a model with adapters, one that PEFT opens, as `hg.save` and
        `hg.lora.save` do. Options of transformers' method are accepted and have no effect."""
        if self.handgrad_model.adapter is not None:
            peft.save(self.handgrad_model, save_directory)
        else:
            huggingface.save(self.handgrad_model, save_directory)


_NO_EFFECT = ("use_cache", "return_dict")  # options of transformers' callers that change nothing here


def wrap(model: GPT) -> Wrapped:
    """Wrap a handgrad model for tools that call `loss.backward()`: transformers.Trainer, Accelerate, your own loop. The
    parameters are shared: training the wrapped model trains the model."""
    if not isinstance(model, GPT):
        raise HandgradError(
            f"wrap takes a model of handgrad (hg.load, hg.GPT), not a {type(model).__name__}: for a transformers model use"
            " hg.nn.replace"
        )
    return Wrapped(model)

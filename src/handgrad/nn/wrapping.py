"""`hg.nn.wrap`: a handgrad model as a module that trains with `loss.backward()`, as transformers' models do.

With labels the forward pass computes the loss and all gradients by `loss_and_grads`, in pieces and without padding, and the
backward pass hands the gradients over, times the error signal of the loss. Without labels the logits carry gradients.
"""

import json
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..errors import HandgradError
from ..formats import huggingface
from ..formats.config_json import config_json
from ..lora import peft
from ..model.gpt import GPT
from ..model.passes.router_losses import RouterLosses
from ..ops import loss as softmax_loss
from .functions import first_derivative, opaque, without_autocast
from .wrapped_logits import HIDDEN, LOGITS, End, EndFunction, Packed, gradients_of, options_of, prepare


class LossFunction(Function):
    """The mean loss of a batch; its inputs are the trainable parameters."""

    @staticmethod
    def forward(
        ctx: Any, wrapped: "Wrapped", packed: Packed, targets: Tensor, n_targets: int | None, *parameters: Any
    ) -> Tensor:
        model, options = wrapped.handgrad_model, options_of(wrapped.gradient_checkpointing)
        options = replace(options, routers=RouterLosses(model.config))  # of this call, as in transformers
        work = prepare(model, packed, targets, n_targets, options)
        value, grads = gradients_of(parameters, lambda: model.differentiate(work, options))
        value += 0.0 if work.routers is None else work.routers.total
        ctx.save_for_backward(*grads)
        return torch.tensor(value, dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        factor = delta.item() if delta.is_cpu else delta
        return None, None, None, None, *(x if factor == 1 else x * factor for x in ctx.saved_tensors)


class Output(OrderedDict[str, Any]):
    """loss and logits, by name as an attribute or a key, or by number: what transformers.Trainer expects of a model."""

    def __getattr__(self, name: str) -> Any:
        if name in ("loss", "logits", "last_hidden_state"):
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

    def __init__(self, model: GPT, *config: Any):
        super().__init__(*config)
        self.__dict__["handgrad_model"] = model  # not a submodule: names in the state_dict have no prefix
        self.gradient_checkpointing = False
        if not config:
            self.config: Any = Fields(**config_json(model.config, model.dtype))
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
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> Output:
        """(B, T) ids, a mask that is 0 at padding, positions, and labels, which are the ids themselves: the token after each
        is its target, and −100 is none. With labels and gradients the output has a loss and no logits, else logits, which
        carry gradients if these are wanted."""
        packed = self._pack(input_ids, attention_mask, position_ids, options)
        model = self.handgrad_model
        if labels is None:
            logits = self._spread(input_ids.shape, packed, LOGITS, model.parameters())
            if isinstance(logits_to_keep, Tensor) or logits_to_keep:
                kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
                logits = logits[:, kept]
            return Output(logits=logits)
        targets = self._targets(labels, input_ids, packed.rows)
        n_targets = None if num_items_in_batch is None else float(num_items_in_batch)
        trained = [p for p in model.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and trained:
            with without_autocast(model.device.type):
                whole = None if n_targets is None else math.ceil(n_targets)
                loss = LossFunction.apply(self, packed, targets, whole, *trained)  # type: ignore[no-untyped-call]
            return Output(loss=loss if whole == n_targets else loss * (whole / n_targets))  # type: ignore[operator]
        with torch.no_grad():
            logits = self._spread(input_ids.shape, packed, LOGITS, ())
            chosen = softmax_loss.rows_with_target(targets)
            rows = logits.reshape(-1, logits.shape[-1])[packed.rows][chosen]
            summed = softmax_loss.forward(rows, targets[chosen])
            return Output(loss=summed / (len(chosen) if n_targets is None else n_targets), logits=logits)

    @opaque
    def hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> Output:
        """The input of the logits layer, (B, T, d), as `last_hidden_state`: what trainers with a loss of their own read."""
        model = self.handgrad_model
        packed = self._pack(input_ids, attention_mask, position_ids, options)
        own = set() if model.config.tied else set(model.head.parameters())
        below = (p for p in model.parameters() if p not in own)
        return Output(last_hidden_state=self._spread(input_ids.shape, packed, HIDDEN, below))

    def _spread(self, shape: torch.Size, packed: Packed, end: End, parameters: Iterable[Any]) -> Tensor:
        """What is read at this end of the model, (B, T, …) and 0 at padding; it carries gradients if these are wanted"""
        model = self.handgrad_model
        trained = [p for p in parameters if p.requires_grad]
        with without_autocast(model.device.type):
            if torch.is_grad_enabled() and trained:
                found: Tensor = EndFunction.apply(end, model, packed, self.gradient_checkpointing, *trained)  # type: ignore
            else:
                with torch.no_grad():
                    found = end.without_gradients(model, packed)
        if len(packed.tokens) < shape.numel():
            found = found.new_zeros(shape.numel(), found.shape[-1]).index_copy(0, packed.rows, found)
        return found.view(*shape, -1)

    def _pack(self, ids: Tensor, mask: Tensor | None, position_ids: Tensor | None, options: dict[str, Any]) -> Packed:
        """The rows of the batch that are no padding, in sequences. Without a mask, positions that restart begin another
        sequence, as in transformers without a cache (`use_cache=False`, which is not its default)."""
        _refuse(options)
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            raise HandgradError(f"input_ids must be (B, T), not {tuple(getattr(ids, 'shape', ()))}")
        columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        positions = columns if position_ids is None else position_ids.expand(ids.shape)
        follows = nn.functional.pad(positions.diff(dim=1) == 1, (1, 0))  # the token before it
        if mask is None:
            lengths = (
                (~follows).reshape(-1).nonzero().squeeze(1).diff(append=torch.tensor([ids.numel()], device=ids.device))
            )
            rows = torch.arange(ids.numel(), device=ids.device)
        else:
            if mask.shape != ids.shape:
                raise HandgradError(
                    f"attention_mask {tuple(mask.shape)} must have the shape of input_ids {tuple(ids.shape)}"
                )
            mask = mask.bool()
            starts = mask & ~nn.functional.pad(mask, (1, 0))[:, :-1]
            if not bool((starts.sum(1) == 1).all()):
                raise HandgradError("attention_mask must have one range of ones in every row, and zeros at padding")
            if not bool((follows | starts | ~mask).all()):
                raise HandgradError("with an attention_mask, position_ids must count up by 1 in every row")
            lengths, rows = mask.sum(1), mask.reshape(-1).nonzero().squeeze(1)
        own, ends = None, nn.functional.pad(lengths.cumsum(0), (1, 0))
        for name in _BOUNDS:
            if options.get(name) is not None and torch.as_tensor(options[name]).tolist() != ends.tolist():
                raise HandgradError(
                    f"{name} does not begin the sequences where position_ids and attention_mask do: leave it out, or let"
                    " positions restart at every sequence"
                )
        config = self.handgrad_model.config
        if config.positions == "learned":
            own = positions.reshape(-1)[rows]
            if int(own.min()) < 0 or int(own.max()) >= config.n_context:
                raise HandgradError(
                    f"position {int(own.max())} does not fit into a context of {config.n_context}: shorten the sequences, or"
                    " their padding on the left"
                )
            begins = own[ends[:-1]]
            own = own if bool(begins.any()) else None
        return Packed(ids.reshape(-1)[rows], lengths.tolist(), rows, own)

    def _targets(self, labels: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
        """The targets of these rows."""
        if labels.shape != ids.shape:
            raise HandgradError(f"labels {tuple(labels.shape)} must have the shape of input_ids {tuple(ids.shape)}")
        after = nn.functional.pad(labels, (0, 1), value=softmax_loss.NO_TARGET)[:, 1:].reshape(-1)
        padding = torch.ones(ids.numel(), dtype=torch.bool, device=ids.device).index_fill(0, rows, False)
        if bool((labels.reshape(-1)[padding] != softmax_loss.NO_TARGET).any()):
            raise HandgradError("labels at padding must be −100")
        if bool((after[padding] != softmax_loss.NO_TARGET).any()):
            warnings.warn(
                "the first token after padding on the left has a label: transformers would predict it from padding, a"
                " wrapped model leaves it out; set it to −100 for equal losses",
                stacklevel=2,
            )
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


_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")  # of packed sequences, which must be those of the positions
# Options of transformers' callers that change nothing here; the last three only repeat what the bounds say.
_NO_EFFECT = ("use_cache", "return_dict", *_BOUNDS, "max_length_q", "max_length_k", "seq_idx")


def _refuse(options: dict[str, Any]) -> None:
    """Refuse options that would have an effect in transformers."""
    given = [name for name, value in options.items() if isinstance(value, Tensor) or value]
    wrong = [name for name in given if name not in _NO_EFFECT]
    if wrong:
        raise HandgradError(
            f"a wrapped model takes input_ids, attention_mask, position_ids and labels, not {', '.join(wrong)}"
        )


def wrap(model: GPT) -> Wrapped:
    """Wrap a handgrad model for tools that call `loss.backward()`: transformers.Trainer, TRL, Accelerate, your own loop. The
    parameters are shared: training the wrapped model trains the model. Where transformers is installed, the result is one
    of its models (`PreTrainedModel`), with its `config` and `generate`."""
    if not isinstance(model, GPT):
        raise HandgradError(
            f"wrap takes a model of handgrad (hg.load, hg.GPT), not a {type(model).__name__}: for a transformers model use"
            " hg.nn.replace"
        )
    if find_spec("transformers") is None:
        return Wrapped(model)
    from .wrapped_transformers import PreTrainedWrapped

    return PreTrainedWrapped(model)

"""The parts of a transformers model with hand-derived backward passes.

Each part is a class that stands before the class of the original module: `swap` changes the class of a module, and nothing
else. Its parameters, names, hooks and settings stay where they are, and `swap_back` restores the class. What a part cannot
compute it leaves to the original code; `fell_back` counts these calls and warns once.
"""

import warnings
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.loss import NO_TARGET
from . import functions
from .heads import Layout, attention, causal_layout, layout_of_mask
from .loss import linear_cross_entropy

_classes: dict[tuple[type, type], Any] = {}


class Part(nn.Module):
    """The base of all parts."""

    def __repr__(self) -> str:  # not _get_name, by which transformers.Trainer decides whether a loss shifts labels
        name: str = self._get_name()  # type: ignore[no-untyped-call]
        return super().__repr__().replace(name, f"{name} [handgrad]", 1)

    def __reduce_ex__(self, protocol: Any) -> Any:  # its class is made at run time: pickle cannot find it by name
        return _restore, (*_parents(type(self)),), self.__dict__


def _parents(cls: type) -> tuple[type, type]:
    return next(key for key, value in _classes.items() if value is cls)


def _class_of(part: type, base: type) -> Any:
    if (part, base) not in _classes:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        forward = _with_signature(part.forward, base.forward)  # type: ignore[attr-defined]
        _classes[part, base] = type(base.__name__, (part, base), {**names, "forward": forward})
    return _classes[part, base]


def _with_signature(ours: Any, original: Any) -> Any:
    """Our forward with the arguments of the original: transformers.Trainer reads their names."""

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    return forward


def _restore(part: type, base: type) -> nn.Module:
    cls = _class_of(part, base)
    found: nn.Module = cls.__new__(cls)
    return found


def swap(module: nn.Module, part: type[Part]) -> None:
    """Put a part before the class of a module."""
    module.__class__ = _class_of(part, type(module))


def is_swapped(module: nn.Module) -> bool:
    """Whether a part still stands before the class of a module."""
    return type(module) in _classes.values()


def swap_back(module: nn.Module) -> None:
    """Restore the class that a module had."""
    module.__class__ = _parents(type(module))[1]


def fell_back(module: Any, reason: str) -> None:
    """Count a call of the original code while gradients are wanted, and warn at the first of its kind."""
    counts: dict[str, int] | None = module.__dict__.get("_handgrad_fallbacks")
    if counts is None or not torch.is_grad_enabled():
        return
    if not counts.get(reason):
        library = type(module).__module__.partition(".")[0]
        warnings.warn(
            f"handgrad leaves {type(module).__name__} to {library}: {reason}; the gradient is autograd's",
            stacklevel=3,
        )
    counts[reason] = counts.get(reason, 0) + 1


# ── norms, linear layers, adapters ──────────────────────────────────────────────────────────────────────────────────


class LayerNormPart(Part):
    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != self.weight.dtype:
            fell_back(self, f"an input in {input.dtype}, weights in {self.weight.dtype}")
            return super().forward(input)  # type: ignore[no-any-return]
        return functions.layer_norm(input, self.weight, self.bias, self.eps)  # type: ignore[arg-type]


class RMSNormPart(Part):
    def forward(self, hidden_states: Tensor) -> Tensor:
        w: Any = self.weight
        dtype = torch.promote_types(hidden_states.dtype, w.dtype)  # transformers returns the wider of the two
        return functions.rms_norm(hidden_states.to(dtype), w.to(dtype), self.variance_epsilon)  # type: ignore[arg-type]


class LinearPart(Part):
    in_out = False

    def forward(self, x: Tensor) -> Tensor:
        return functions.linear(x, self.weight, self.bias, in_out=self.in_out)  # type: ignore[arg-type]


class Conv1DPart(LinearPart):
    in_out = True


class HeadPart(LinearPart):
    """The logits layer. While the loss computes the logits itself, it passes its input on."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.__dict__.get("_handgrad_deferred") else super().forward(x)


class AdapterPart(Part):
    """PEFT's LoRA layer around a linear layer: both in one function. Everything else that PEFT can do is left to it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        me: Any = self
        active = [name for name in me.active_adapters if name in me.lora_A]
        if me.disable_adapters or me.merged or not active:  # PEFT then calls the base layer alone, which is ours
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        base, name = me.base_layer, active[0]
        several = len(active) > 1 or args or kwargs
        reason = "several adapters" if several else why_not_adapter(me, name)
        if reason or not isinstance(base, LinearPart):
            fell_back(self, reason or f"its layer is a {type(base).__name__}")
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        dropout = getattr(me.lora_dropout[name], "p", 0.0) if self.training else 0.0
        magnitude = me.lora_magnitude_vector[name].weight if name in me.lora_variant else None
        return functions.linear(
            x, base.weight, base.bias, down=me.lora_A[name].weight, up=me.lora_B[name].weight,  # type: ignore[arg-type]
            magnitude=magnitude, scale=me.scaling[name], dropout=dropout, in_out=base.in_out,
        )  # fmt: skip


def why_not_adapter(layer: Any, name: str) -> str:
    """Why an adapter of PEFT is left to PEFT; "" if it is not."""
    variant = type(layer.lora_variant.get(name)).__name__
    if variant == "DoraLinearVariant" and getattr(layer.lora_dropout[name], "p", None):
        return "DoRA with dropout"  # which PEFT applies to the layer's own input as well
    if variant not in ("NoneType", "DoraLinearVariant"):
        return f"{variant} is neither LoRA nor DoRA"
    if layer.lora_B[name].bias is not None:
        return "lora_bias=True"
    if layer.lora_A[name].weight.dtype != layer.lora_B[name].weight.dtype:
        return "factors of different dtypes"
    return ""


# ── feed-forward layers ─────────────────────────────────────────────────────────────────────────────────────────────


class GatedPart(Part):
    def forward(self, x: Tensor) -> Tensor:
        me: Any = self
        gate, up = (me.gate_up_proj(x), None) if hasattr(me, "gate_up_proj") else (me.gate_proj(x), me.up_proj(x))
        return me.down_proj(functions.gate(gate, up, me._handgrad_activation))  # type: ignore[no-any-return]


class FeedForwardPart(Part):
    def forward(self, hidden_states: Tensor) -> Tensor:
        me: Any = self
        a_8 = functions.activation(me.c_fc(hidden_states), me._handgrad_activation)
        return me.dropout(me.c_proj(a_8))  # type: ignore[no-any-return]


# ── attention ───────────────────────────────────────────────────────────────────────────────────────────────────────


class AttentionPart(Part):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        me: Any = self
        layout = "arguments without a name" if args else self._layout(hidden_states, kwargs)
        if isinstance(layout, str):
            fell_back(self, layout)
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        q, k, v = self._queries_keys_values(hidden_states)
        c = me.config
        rotation = None
        if getattr(me, "use_rope", hasattr(me, "num_key_value_groups")):
            cos, sin = kwargs["position_embeddings"]
            rotation = rotation_of(cos, sin, len(hidden_states), q.dtype)
        heads = attention(
            q, k, v, c.num_attention_heads, getattr(c, "num_key_value_heads", c.num_attention_heads),
            rotation=rotation, layout=layout,
        )  # fmt: skip
        out = me.c_proj(heads) if hasattr(me, "c_proj") else me.o_proj(heads)
        return me.resid_dropout(out) if hasattr(me, "resid_dropout") else out, None

    def _queries_keys_values(self, a: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        me: Any = self
        for fused in ("c_attn", "qkv_proj"):
            if hasattr(me, fused):
                return getattr(me, fused)(a), None, None
        q, k, v = me.q_proj(a), me.k_proj(a), me.v_proj(a)
        if hasattr(me, "q_norm"):
            by_head = (*a.shape[:-1], -1, me.head_dim)
            q, k = me.q_norm(q.view(by_head)).flatten(2), me.k_norm(k.view(by_head)).flatten(2)
        return q, k, v

    @functions.opaque
    def _layout(self, a: Tensor, given: dict[str, Any]) -> Layout | str:
        """Which keys each query sees, or why the original code has to compute this call."""
        me: Any = self
        if given.get("past_key_values") is not None:
            return "keys and values are cached (pass use_cache=False)"
        if given.get("encoder_hidden_states") is not None or given.get("is_causal") is False:
            return "attention that is not causal"
        if me.training and dropout_of(me):
            return "attention dropout"
        if me.config._attn_implementation != "sdpa":
            return f"attn_implementation is {me.config._attn_implementation!r}, not 'sdpa'"
        window = getattr(me, "sliding_window", getattr(me.config, "sliding_window", None))
        window = None if window is None or window >= a.shape[1] else window
        mask = given.get("attention_mask")
        if mask is None:
            return causal_layout(*a.shape[:2], window)
        known: dict[Any, Layout | str] = mask.__dict__.setdefault("_handgrad_layouts", {})
        key = len(a), window, 0 if mask.is_inference() else mask._version
        if key not in known:  # every block has the same mask
            known[key] = _layout_of(mask, *key[:2]) if mask.shape[-1] == a.shape[1] else "keys of earlier calls"
        return known[key]


def _layout_of(mask: Tensor, batch: int, window: int | None) -> Layout | str:
    """Of a mask of booleans, or of numbers that are added to the scores."""
    if mask.dtype == torch.bool:
        return layout_of_mask(mask, batch, window)
    seen = mask == 0
    if not bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        return "a mask that changes scores"
    return layout_of_mask(seen, batch, window)


def dropout_of(module: Any) -> float:
    """The dropout of an attention module's probabilities."""
    return float(module.attn_dropout.p if hasattr(module, "attn_dropout") else module.attention_dropout)


@functions.opaque
def rotation_of(cos: Tensor, sin: Tensor, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(1 or B, T, d_ρ), both halves equal → (B T, d_ρ/2); every block has the same tables"""
    known: dict[Any, tuple[Tensor, Tensor]] = cos.__dict__.setdefault("_handgrad_rotations", {})
    if (batch, dtype) not in known:
        half = cos.shape[-1] // 2
        wide = torch.promote_types(dtype, torch.float32)
        known[batch, dtype] = tuple(  # type: ignore[assignment]
            x[..., :half].expand(batch, -1, -1).reshape(-1, half).to(wide).contiguous() for x in (cos, sin)
        )
    return known[batch, dtype]


# ── the model with its loss ─────────────────────────────────────────────────────────────────────────────────────────


class BodyPart(Part):
    """The model without its logits layer. It makes the cache, which is of no use to a training step."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        asked = len(args) > 1 or any(kwargs.get(name) is not None for name in ("use_cache", "past_key_values"))
        if torch.is_grad_enabled() and not asked:
            kwargs["use_cache"] = False
        return super().forward(*args, **kwargs)


class CausalLMPart(Part):
    """In training with labels, logits and loss are one function, and the output has no logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        me: Any = self
        wanted = kwargs.get("labels") is not None and self.training and torch.is_grad_enabled()
        if not wanted or not isinstance(me.lm_head, HeadPart):  # it is not in another model made from this class
            return super().forward(*args, **kwargs)
        head = me.lm_head.__dict__
        head["_handgrad_deferred"] = True
        try:
            found = super().forward(*args, **kwargs)
        finally:
            del head["_handgrad_deferred"]
        if isinstance(found, tuple):
            return (found[0], *found[2:])
        return type(found)(**{name: value for name, value in found.items() if name != "logits"})

    @property
    def loss_function(self) -> Any:
        me: Any = self
        if "_handgrad_deferred" in me.lm_head.__dict__:
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
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = NO_TARGET,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The loss of transformers, from the input of the logits layer: the token after each is its target."""
        head: Any = getattr(self, "lm_head")  # noqa: B009
        targets = shift_labels
        if targets is None:
            targets = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = targets.to(logits.device)
        if ignore_index != NO_TARGET:
            targets = targets.masked_fill(targets == ignore_index, NO_TARGET)
        n_targets = None if num_items_in_batch is None else int(num_items_in_batch)
        return linear_cross_entropy(
            logits, head.weight, targets.reshape(logits.shape[:-1]), head.bias, n_targets=n_targets
        )

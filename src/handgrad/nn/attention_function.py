"""Attention in transformers' own registry: `replace` sets a model's `attn_implementation` to "handgrad".

    module, q (B, h, T, d_ρ), k (B, h_kv, T, d_ρ), v (B, h_kv, T, d_h), mask, … → (B, T, h, d_h)

transformers computes queries and keys, rotates them and makes the mask, all as for "sdpa"; this function computes the heads.
Calls that it cannot compute go to transformers' function for "sdpa". The first call with each new kind of mask is computed
both ways, values and gradients: if they differ, that kind is left to torch, with a warning.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..tolerances import TOLERANCE
from .functions import opaque
from .heads import Layout, attention, causal_layout, kind_of, layout_of_mask
from .parts import fell_back, one_dtype, precision_of, why_not_tensors

NAME, ORIGINAL = "handgrad", "sdpa"
_CHANGES_SCORES = (
    "position_bias",
    "cache",
    "softcap",
    "s_aux",
    "output_attentions",
)  # what transformers' function looks at


def register() -> None:
    """Add the function, and transformers' masks for it, to transformers' registries."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers' functions of attention: (B, h, T, d) each → (B, T, h, d_h), and no weights."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS[ORIGINAL]
    given = query, key, value
    layout: Layout | str = "not replaced" if "_handgrad_checked" not in module.__dict__ else ""
    if not layout:
        layout = _layout(module, *given, attention_mask, options, original)
    if isinstance(layout, Layout):
        reason = _first_of_its_kind(module, *given, attention_mask, options, original, layout)
        if not reason:
            return _heads(*given, layout, precision_of(module)), None
        layout = reason
    fell_back(module, layout)
    found: tuple[Tensor, None] = original(module, query, key, value, attention_mask, **options)
    return found


def _heads(q: Tensor, k: Tensor, v: Tensor, layout: Layout, precision: str | None) -> Tensor:
    """(B, h, T, d) → (B, T, h, d_h)"""
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    out = attention(flat_q, flat_k, flat_v, q.shape[1], k.shape[1], layout=layout, precision=precision)
    return out.view(*out.shape[:2], q.shape[1], -1)


@opaque
def _layout(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any], original: Any
) -> Layout | str:
    """Which keys each query sees, or why transformers has to compute this call."""
    reason = why_not_tensors(q, k, v, precision=precision_of(module)) or one_dtype(q, k, v)
    if reason:
        return reason
    if (original.__module__, original.__qualname__) != (
        "transformers.integrations.sdpa_attention",
        "sdpa_attention_forward",
    ):
        return f"transformers' attention function {ORIGINAL!r} was replaced"
    if options.get("dropout"):
        return "attention dropout"
    if any(options.get(name) is not None and options[name] is not False for name in _CHANGES_SCORES):
        return "an option that changes the scores"
    groups = getattr(module, "num_key_value_groups", 1)
    if q.shape[2] != k.shape[2] or q.shape[0] != k.shape[0]:
        return "keys of earlier calls"
    if k.shape[1] * groups != q.shape[1] or v.shape[:3] != k.shape[:3]:
        return f"{q.shape[1]} heads of queries, {k.shape[1]} of keys, in groups of {groups}"
    batch, _, length, _ = q.shape
    layout: Layout | str
    if mask is None:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        layout = causal_layout(batch, length) if causal or length == 1 else "attention that is not causal"
    else:
        layout = layout_of(mask, batch, length, options.get("sliding_window"))
    scale = options.get("scaling")
    if isinstance(layout, str) or scale is None or abs(scale * q.shape[-1] ** 0.5 - 1) <= 1e-9:
        return layout
    if not 0 < scale < math.inf:
        return f"scores multiplied by {scale:g}"
    return layout._replace(scores=layout.scores._replace(scale=float(scale)))


def layout_of(mask: Tensor, batch: int, length: int, window: int | None) -> Layout | str:
    """Of a mask of booleans, or of numbers that are added to the scores. Every block has the same mask: its layout stays on
    it, with a copy, because an edit through `.data` or numpy does not change the tensor's version."""
    if mask.requires_grad and torch.is_grad_enabled():
        return "a mask that wants a gradient"
    if mask.shape[-1] != length:
        return "keys of earlier calls"
    key = batch, length, window
    known: dict[Any, tuple[Tensor, Layout | str]] = mask.__dict__.setdefault("_handgrad_layouts", {})
    if key not in known or not torch.equal(known[key][0], mask):
        seen = mask if mask.dtype == torch.bool else mask == 0
        found: Layout | str = layout_of_mask(seen, batch, None)
        if isinstance(found, str) and window is not None:
            found = layout_of_mask(seen, batch, window)
        if mask.dtype != torch.bool and not bool((seen | mask.isneginf()).all()):
            least = torch.finfo(mask.dtype).min / 2
            if not bool((seen | (mask <= least)).all()):
                found = "a mask that changes scores"
            elif isinstance(found, Layout) and found.blind is not None:
                found = "a mask of numbers that hides every key of a row"
        known[key] = mask.detach().clone(), found
    return known[key][1]


@opaque
def _first_of_its_kind(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
    original: Any,
    layout: Layout,
) -> str:
    """Compare with transformers at the first call of each kind; "" if they agree, else why this kind is left to it."""
    checked: dict[Any, str] = module.__dict__["_handgrad_checked"]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    kind = kind_of(layout, *q.shape[:3:2]), q.dtype, q.shape[1], k.shape[1], q.shape[3], v.shape[3], wanted
    if kind not in checked:
        from ..proof import bridge  # only proof asks for gradients

        precision = precision_of(module)

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _heads(q, k, v, layout, precision)

        def theirs(*tensors: Tensor) -> Tensor:
            added = mask.to(tensors[0].dtype) if mask is not None and mask.is_floating_point() else mask
            out: Tensor = original(module, *tensors, added, **options)[0]
            return out

        with torch.autocast(q.device.type, enabled=False):
            narrow = [x.detach() for x in (q, k, v)]
            narrow = [x.to(min({y.dtype for y in narrow}, key=lambda d: d.itemsize)) for x in narrow]
            if precision is not None:
                narrow = [x.bfloat16().float() for x in narrow]  # what is compared is the formula, not this rounding
            error = bridge.function_error(ours, theirs, narrow, gradients=wanted)
        allowed = TOLERANCE[narrow[0].dtype if precision is None else torch.bfloat16]
        if error is None:
            return ""  # not finite: nothing to compare, and the next call tries again
        wrong = f"its result for this kind of mask differs by {error:.0e} from torch's"
        checked[kind] = "" if error <= allowed else wrong
    return checked[kind]

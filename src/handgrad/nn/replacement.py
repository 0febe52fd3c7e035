"""`hg.nn.replace`: swap the parts of a transformers model in place, list what was swapped and what was left, and undo it.

Attention is registered with transformers as an implementation; other parts are swapped module by module.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import MIXED, check_choice
from ..errors import HandgradError, HandgradWarning
from ..families import FAMILIES
from ..model.precision import check_precision, without_mixing
from . import attention_function, parts
from .fused_loss import CausalLMPart, changed_logits
from .norm_kinds import norm_kind
from .parts import Part

# Where transformers keeps the code of our families.
MODULES = {f"transformers.models.{x}.modeling_{x}" for x in (name.removesuffix("_text") for name in FAMILIES)}
KINDS = {
    parts.LayerNorm: "norm", parts.NormPart: "norm", parts.Linear: "linear", parts.Conv1DPart: "linear",
    parts.AdapterPart: "LoRA", parts.FeedForwardPart: "feed-forward", CausalLMPart: "loss",
}  # fmt: skip
# What modules hold while replaced.
_SETTINGS = (
    "_handgrad_activation", "_handgrad_norm", "_handgrad_fallbacks", "_handgrad_checked", "_handgrad_parent",
    "_handgrad_precision",
)  # fmt: skip


class Replacement:
    """What `replace` did to a model.

    replaced    name of a module → its kind: attention, feed-forward, norm, linear, LoRA or loss
    left        name of a module → why it was left as it was
    fallbacks   calls that a replaced module left to the original code while gradients were wanted, by reason
    precision   "mixed" if replaced modules round what their products read to bfloat16
    undo()      restore every module; parameters and their names never change
    """

    def __init__(self, model: nn.Module, precision: str | None = None):
        self.model, self.asked = model, precision
        self.precision = precision if precision == MIXED and not without_mixing(precision) else None
        self.replaced: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.fallbacks: dict[str, int] = {}
        self.swapped: dict[str, nn.Module] = {}  # all modules whose class was changed, wherever they are now
        self.attention: dict[str, Any] = {}  # modules of attention, whose class stays
        self.checked: dict[Any, str] = {}  # kinds of masks that were compared with transformers: "" if equal
        self.audit: Any = None  # what the audit found, if one was asked for

    def undo(self) -> None:
        """Restore the original modules. A second call does nothing."""
        for name, module in self.swapped.items():
            if "forward" in module.__dict__ or not parts.is_swapped(module):
                raise HandgradError(
                    f"another library has wrapped {name or 'the model'}, and would call what is undone: unwrap it first, as"
                    " with accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
                )
        for module in self.swapped.values():
            parts.swap_back(module)
        for module in self.attention.values():
            if module.config._attn_implementation == attention_function.NAME:
                module.config._attn_implementation = attention_function.ORIGINAL
        for module in (*self.swapped.values(), *self.attention.values()):
            for setting in _SETTINGS:
                module.__dict__.pop(setting, None)
        self.replaced, self.swapped, self.attention = {}, {}, {}

    def __str__(self) -> str:
        counts = Counter(self.replaced.values())
        lines = ["replaced   " + (", ".join(f"{n} × {kind}" for kind, n in counts.items()) or "nothing")]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"left       {names[0] or 'the model'}{more}: {reason}")
        lines += [f"fell back  {n} calls: {reason}" for reason, n in self.fallbacks.items()]
        if self.asked is not None:
            lines.append(f"precision  {without_mixing(self.asked) or self.asked}")
        if self.audit is not None:
            lines.append(f"audit      {self.audit}")
        return "\n".join(lines)


def replace(
    model: nn.Module,
    *,
    loss: bool = False,
    audit: Mapping[str, Tensor] | None = None,
    tolerance: float | None = None,
    precision: str | None = None,
) -> Replacement:
    """Swap the parts of a transformers causal language model that have hand-derived backward passes, in place: attention,
    feed-forward layers, norms, linear layers and PEFT's LoRA layers.

    Of the families that `hg.load` reads, all of them; of any other model the linear layers and LayerNorms.

    What is changed on the model before or afterwards keeps its effect: a part that would ignore it leaves its calls to the
    original code, which `Replacement.fallbacks` lists.

    loss        fuse the logits layer and the loss: in training with labels the model's output then has no logits
    audit       a batch with labels: gradients of every parameter are compared with those of the original modules; a
                difference larger than `tolerance` (default: what the dtype allows) undoes the replacement and raises
    precision   "mixed": replaced parts of a float32 model round what products and attention read to bfloat16; sums,
                results and gradients stay float32
    """
    if not isinstance(model, nn.Module) or hasattr(model, "loss_and_grads"):
        raise HandgradError(
            f"replace takes a transformers model, not a {type(model).__name__}: for a model of handgrad use hg.nn.wrap"
        )
    if any(isinstance(module, Part) or "_handgrad_checked" in module.__dict__ for module in model.modules()):
        raise HandgradError("parts of this model are replaced already: call undo() of that replacement first")
    if any(p.dtype == torch.float16 for p in model.parameters()):
        raise HandgradError("float16 has no hand-derived layers: convert the model to bfloat16 or float32 first")
    if audit is not None and (not isinstance(audit, Mapping) or "labels" not in audit):
        raise HandgradError("audit takes a batch as the model does, with labels: {'input_ids': …, 'labels': …}")
    check_choice(precision, None)
    for p in model.parameters() if precision is not None else ():
        if p.is_floating_point():
            check_precision(precision, p.dtype)
    if line := without_mixing(precision):
        warnings.warn(HandgradWarning(line), stacklevel=2)
    result = Replacement(model, precision)
    if audit is not None:
        from ..proof import bridge

        before = bridge.original_of(model, audit, tolerance, mixed=result.precision is not None)
    try:
        _swap_all(result, loss)
        if audit is not None:
            result.audit = bridge.compare(before, bridge.gradients_of(model, audit))
    except BaseException:
        result.undo()
        raise
    return result


def _swap_all(result: Replacement, loss: bool) -> None:
    for name, module in list(_candidates(result.model)):
        if _of_a_family(module) and type(module).__name__.endswith("Attention"):
            _replace_attention(result, name, module)
            continue
        part, reason = _part_for(module, loss)
        if part is not None:
            reason = _changed(module)
        if part is None or reason:
            if reason:
                result.left[name] = reason
            continue
        _swap(result, name, module, part)


def _swap(result: Replacement, name: str, module: nn.Module, part: type[Part]) -> None:
    known: dict[str, Any] = {}
    if part is parts.FeedForwardPart:
        known["_handgrad_activation"] = parts.Activation(module)
    if part is parts.NormPart:
        known["_handgrad_norm"] = norm_kind(module)
    parts.swap(module, part)
    module.__dict__.update(known, _handgrad_fallbacks=result.fallbacks, _handgrad_precision=result.precision)
    if KINDS[part] == "norm":
        module.__dict__["_handgrad_parent"] = result.model.get_submodule(name.rpartition(".")[0])
    result.swapped[name] = module
    result.replaced[name] = KINDS[part]


def _replace_attention(result: Replacement, name: str, module: Any) -> None:
    """Name our function in the module's configuration, which other models may share: it serves marked modules only."""
    config = module.config
    if getattr(module, "is_cross_attention", False) or not module.is_causal:
        result.left[name] = "attention that is not causal"
    elif config._attn_implementation not in (attention_function.ORIGINAL, attention_function.NAME):
        result.left[name] = f"attn_implementation is {config._attn_implementation!r}: load the model with 'sdpa'"
    else:
        attention_function.register()
        config._attn_implementation = attention_function.NAME
        module.__dict__.update(_handgrad_fallbacks=result.fallbacks, _handgrad_precision=result.precision)
        module.__dict__["_handgrad_checked"] = result.checked
        result.replaced[name], result.attention[name] = "attention", module
        drop = getattr(module, "attn_dropout", getattr(module, "attention_dropout", 0))
        dropout = drop.p if isinstance(drop, torch.nn.Module) else drop
        if dropout:
            result.left[name] = f"attention dropout {dropout:g}: its heads are torch's in training; set it to 0"


def _changed(module: nn.Module) -> str:
    """Why a module no longer is what its class was made for; "" if it is."""
    if "forward" in module.__dict__:
        return "its forward was replaced by another library"
    own: Any = type(module).forward
    if (own.__module__, own.__qualname__) != (type(module).__module__, f"{type(module).__qualname__}.forward"):
        return f"{type(module).__name__}.forward was replaced by another library"
    return ""


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module, but not those that a LoRA layer calls itself."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if _is_adapter(module):
            for held in ("lora_A", "lora_B", "lora_dropout", "lora_magnitude_vector"):
                inside |= set(getattr(module, held).modules())
        if module not in inside:
            yield name, module


def _part_for(module: nn.Module, loss: bool) -> tuple[type[Part] | None, str]:
    """The part for a module, or None and the reason; "" for a module that owns no parameters."""
    kind, me = type(module).__name__, module
    if type(me) is nn.Linear:
        return parts.Linear, ""
    if kind == "Conv1D" and type(me).__module__ == "transformers.pytorch_utils":
        return parts.Conv1DPart, ""
    if _is_adapter(me):
        reasons = [r for r in (parts.why_not_adapter(me, name) for name in me.lora_A) if r]  # type: ignore[union-attr]
        return (None, f"left to PEFT: {reasons[0]}") if reasons else (parts.AdapterPart, "")
    if type(me) is nn.LayerNorm:
        fits = len(me.normalized_shape) == 1 and me.bias is not None
        return (parts.LayerNorm, "") if fits else (None, "not a norm over one dimension with weight and bias")
    if _of_a_family(me):
        if kind.endswith(("Norm", "LayerNorm1P")):
            return (parts.NormPart, "") if norm_kind(me) else (None, f"no hand-derived {kind}")
        if kind.endswith("MLP"):
            return _feed_forward(me)
        if kind.endswith(("ForCausalLM", "LMHeadModel")):
            return _language_model(me, loss)
    if isinstance(me, nn.Embedding):
        return None, "an embedding is a look-up, which torch does as fast"
    return None, f"no hand-derived {kind}" if any(True for _ in me.parameters(recurse=False)) else ""


def _of_a_family(module: nn.Module) -> bool:
    return type(module).__module__ in MODULES


def _is_adapter(module: nn.Module) -> bool:
    return type(module).__name__ == "Linear" and type(module).__module__ == "peft.tuners.lora.layer"


def _feed_forward(module: nn.Module) -> tuple[type[Part] | None, str]:
    found = parts.Activation(module)
    if found.act is None:
        return None, "its activation is no module: its linear layers are replaced one by one"
    if reason := parts.why_not_layers(module, found.attribute):
        return None, reason
    return (
        (parts.FeedForwardPart, "") if found.name else (None, f"no hand-derived activation {type(found.act).__name__}")
    )


def _language_model(model: Any, loss: bool) -> tuple[type[Part] | None, str]:
    if not loss:
        return None, ""
    if type(model.lm_head) is not nn.Linear:
        return None, f"the logits layer is a {type(model.lm_head).__name__}: logits and loss stay separate"
    reason = changed_logits(model)
    return (None, f"{reason}: logits and loss stay separate") if reason else (CausalLMPart, "")

"""The parts of a transformers model with hand-derived backward passes.

A part is a subclass of the original module's class, under its name, which programs read: a plain one of torch's classes, one
made by `class_of` of classes that belong to transformers and PEFT, which are known only when a model is given. `swap` gives
it to a module, as torch's parametrizations and `fully_shard` do: identity, parameters, names, hooks and settings stay, and
`swap_back` restores the class. At every call a part checks that it would compute what the original code does, whatever was
changed meanwhile; what it would not it leaves to the original code, and `fell_back` counts these calls and warns once.
Attention has no part: see `attention_function.py`.
"""

import warnings
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torchs

from ..model.config import ACTIVATIONS, GATES
from . import functions, rebuild
from .norm_kinds import NormKind

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class Part(nn.Module):
    """The base of all parts."""

    _handgrad_base: tuple[type, Any]  # the original class, and its forward when the part was made

    def __repr__(self) -> str:  # not _get_name, by which transformers.Trainer decides whether a loss shifts labels
        name: str = self._get_name()  # type: ignore[no-untyped-call]
        return super().__repr__().replace(name, f"{name} [handgrad]", 1)

    def __reduce_ex__(self, protocol: Any) -> Any:  # a class made at run time cannot be found by its name
        return _restore, (getattr(self, "_handgrad_part", type(self)), self._handgrad_base[0]), self.__dict__

    def why_not(self, *tensors: Tensor | None) -> str:
        """Why the original code has to compute this call; "" if it need not."""
        base, forward = self._handgrad_base
        if base.forward is not forward:  # type: ignore[attr-defined]
            return f"{base.__name__}.forward was replaced"
        return why_not_tensors(*tensors, precision=precision_of(self))


def precision_of(module: nn.Module) -> str | None:
    """ "mixed" if `replace` was asked for it."""
    found: str | None = module.__dict__.get("_handgrad_precision")
    return found


def why_not_tensors(*tensors: Tensor | None, precision: str | None = None) -> str:
    """Why tensors cannot go to the functions of `nn`; "" if they can."""
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func"
    for x in tensors:
        if x is None:
            continue
        if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.device.type == "meta":
            return f"a {type(x).__name__} on {x.device.type}, {x.layout}"
        if x.dtype not in DTYPES:
            return f"a tensor in {x.dtype}"
        if precision is not None and x.dtype != torch.float32:
            return f"{precision} precision needs float32, and a tensor is in {x.dtype}"
    return ""


def one_dtype(*tensors: Tensor | None) -> str:
    """Why these tensors cannot be multiplied: autocast makes one dtype of several, but never of float64."""
    given = {x.dtype for x in tensors if x is not None}
    if len(given) == 1 or (torch.float64 not in given and torch.is_autocast_enabled(tensors[0].device.type)):  # type: ignore
        return ""
    return "tensors of different dtypes"


def is_observed(
    module: nn.Module, kinds: tuple[str, ...] = ("forward", "forward_pre", "backward", "backward_pre")
) -> bool:
    """Whether a call of this module would run a hook, or code that stands before its class's."""
    return "forward" in module.__dict__ or any(
        getattr(module, f"_{kind}_hooks") or getattr(torchs, f"_global_{kind}_hooks") for kind in kinds
    )


@cache
def class_of(part: Any, base: type) -> Any:
    """The subclass of `base` with this part's forward: the part itself if it is one."""
    if issubclass(part, base):
        return part
    original = base.forward  # type: ignore[attr-defined]
    made = {"_handgrad_base": (base, original), "_handgrad_part": part}
    made |= {"forward": _with_signature(part.forward, original)}
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (part, base), {**names, **made})


def _with_signature(ours: Any, original: Any) -> Any:
    """Our forward with the arguments of the original: transformers.Trainer reads their names."""

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    return forward


def _restore(part: type, base: type) -> nn.Module:
    if "transformers" in base.__module__:  # the model's config may name our attention
        from . import attention_function

        attention_function.register()
    cls = class_of(part, base)
    found: nn.Module = cls.__new__(cls)
    return found


def swap(module: nn.Module, part: type[Part]) -> None:
    """Give a module the subclass of its class that is this part."""
    module.__class__ = class_of(part, type(module))  # type: ignore[arg-type]  # mypy takes a class for unhashable


def is_swapped(module: nn.Module) -> bool:
    """Whether the class of a module is one that `swap` gave it."""
    return "_handgrad_base" in vars(type(module))


def swap_back(module: Any) -> None:
    """Restore the class that a module had."""
    module.__class__ = module._handgrad_base[0]


def fell_back(module: Any, reason: str) -> None:
    """Count a call of the original code while gradients are wanted, and warn at the first of its kind."""
    counts: dict[str, int] | None = module.__dict__.get("_handgrad_fallbacks")
    if counts is None or not torch.is_grad_enabled():
        return
    if not counts.get(reason):
        original = getattr(module, "_handgrad_base", (type(module),))[0]
        library = original.__module__.partition(".")[0]
        warnings.warn(
            f"handgrad leaves {type(module).__name__} to {library}: {reason}; the gradient is autograd's",
            stacklevel=3,
        )
    counts[reason] = counts.get(reason, 0) + 1


# ── norms, linear layers, adapters ──────────────────────────────────────────────────────────────────────────────────


class LayerNorm(Part, nn.LayerNorm):
    _handgrad_base = nn.LayerNorm, nn.LayerNorm.forward

    def forward(self, input: Tensor) -> Tensor:
        w, b = self.weight, self.bias
        reason = self.why_not(input, w, b)
        if not reason and (w is None or b is None or self.normalized_shape != w.shape):
            reason = "not a norm over one dimension with weight and bias"
        if not reason and {input.dtype, b.dtype} != {w.dtype}:
            reason = f"an input in {input.dtype}, weights in {w.dtype}"
        if reason:
            fell_back(self, reason)
            return super().forward(input)
        return _unless_observed(self, functions.layer_norm(input, w, b, self.eps))


class NormPart(Part):
    """A norm of transformers' own."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        w: Any = self.weight
        b: Any = getattr(self, "bias", None)
        how: NormKind = self.__dict__["_handgrad_norm"]
        reason = self.why_not(hidden_states, w, b)
        if reason:
            fell_back(self, reason)
            return super().forward(hidden_states)  # type: ignore[no-any-return]
        dtype = torch.promote_types(hidden_states.dtype, w.dtype)  # transformers returns the wider of the two
        if how.offset and dtype == torch.bfloat16:
            dtype = torch.float32  # in which 1 + w keeps the digits of w
        x, gain = hidden_states.to(dtype), w.to(dtype) + how.offset if how.offset else w.to(dtype)
        if how.centered:
            bias = torch.zeros_like(gain) if b is None else b.to(dtype)
            out = functions.layer_norm(x, gain, bias, float(how.eps(self)))
        else:
            out = functions.rms_norm(x, gain, float(how.eps(self)))
        return _unless_observed(self, out.to(hidden_states.dtype) if how.narrow else out)


_FORWARD = "forward", "forward_pre"


def _unless_observed(module: nn.Module, out: Tensor) -> Tensor:
    """A hook on the norm, or on a module beside it that reads its output, may change the output's data, which then is not
    what would be rebuilt."""
    around: nn.Module = module.__dict__.get("_handgrad_parent", module)
    return rebuild.forget(out) if any(is_observed(x, _FORWARD) for x in around.modules()) else out


class ProductPart(Part):
    """A linear layer, whichever way it holds its weight."""

    in_out = False
    weight: Any
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        reason = self.why_not(x, self.weight, self.bias) or one_dtype(x, self.weight, self.bias)
        if reason:
            fell_back(self, reason)
            return super().forward(x)  # type: ignore[no-any-return]
        if is_observed(self, _FORWARD):
            rebuild.forget(x)
        return functions.linear(x, self.weight, self.bias, in_out=self.in_out, precision=precision_of(self))


class Linear(ProductPart, nn.Linear):
    _handgrad_base = nn.Linear, nn.Linear.forward

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Conv1DPart(ProductPart):
    in_out = True

    def why_not(self, *tensors: Tensor | None) -> str:
        return super().why_not(*tensors) or ("no bias" if self.bias is None else "")  # without which Conv1D fails


class AdapterPart(Part):
    """PEFT's LoRA layer around a linear layer: both in one function. Everything else that PEFT can do is left to it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        me: Any = self
        active = [name for name in me.active_adapters if name in me.lora_A]
        if me.disable_adapters or me.merged or not active:  # PEFT then calls the base layer alone, which is ours
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        base, name = me.base_layer, active[0]
        several = len(active) > 1 or args or kwargs
        reason = "several adapters" if several else self.why_not(x) or why_not_adapter(me, name)
        if reason or not isinstance(base, ProductPart):
            fell_back(self, reason or f"its layer is a {type(base).__name__}")
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        if is_observed(self, _FORWARD):
            rebuild.forget(x)
        drop = me.lora_dropout[name]
        dropout = drop.p if type(drop) is nn.Dropout and drop.training else 0.0
        magnitude = me.lora_magnitude_vector[name].weight if name in me.lora_variant else None
        return functions.linear(
            x, base.weight, base.bias, down=me.lora_A[name].weight, up=me.lora_B[name].weight,
            magnitude=magnitude, scale=me.scaling[name], dropout=dropout, in_out=base.in_out,
            precision=precision_of(self),
        )  # fmt: skip


def why_not_adapter(layer: Any, name: str) -> str:
    """Why an adapter of PEFT is left to PEFT; "" if it is not."""
    variant = type(layer.lora_variant.get(name)).__name__
    factors: tuple[Any, ...] = layer.lora_A[name], layer.lora_B[name]
    down, up = factors
    dropout = layer.lora_dropout[name]
    if {type(x) for x in factors} != {nn.Linear}:
        return f"factors that are a {type(down).__name__} and a {type(up).__name__}"
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return f"dropout by a {type(dropout).__name__}"
    if variant == "DoraLinearVariant" and getattr(dropout, "p", None):
        return "DoRA with dropout"  # which PEFT applies to the layer's own input as well
    if variant not in ("NoneType", "DoraLinearVariant"):
        return f"{variant} is neither LoRA nor DoRA"
    if down.bias is not None or up.bias is not None:
        return "lora_bias=True"
    magnitude = [layer.lora_magnitude_vector[name]] if variant == "DoraLinearVariant" else []
    if any(is_observed(x) for x in (layer.base_layer, down, up, dropout, *magnitude)):
        return "a hook, or another forward, on its layer, factors, magnitude or dropout"
    tensors = layer.base_layer.weight, layer.base_layer.bias, down.weight, up.weight
    if down.weight.dtype != up.weight.dtype:
        return "factors of different dtypes"
    if isinstance(layer.base_layer, ProductPart):
        return layer.base_layer.why_not(*tensors)
    return ""


# ── feed-forward layers ─────────────────────────────────────────────────────────────────────────────────────────────


PLAIN = ("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h")
GATED = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"), ("input_linear", "output_linear")


def why_not_layers(module: nn.Module, activation: str) -> str:
    """Why a feed-forward module computes something else than `FeedForwardPart`; "" if it does not."""
    layers = layers_of(module, activation)
    if layers not in (*PLAIN, *GATED):
        return f"no hand-derived feed-forward layer of {', '.join(layers)}"
    return unapplied_dropout(module)


def layers_of(module: nn.Module, activation: str) -> tuple[str, ...]:
    """The names of its linear layers."""
    return tuple(name for name in module._modules if name not in (activation, "dropout"))


def unapplied_dropout(module: nn.Module) -> str:
    """A dropout that is a number of a feed-forward module, as in Starcoder2: its part applies those that are modules."""
    found = {name: p for name, p in vars(module).items() if "drop" in name and type(p) in (int, float) and p > 0}
    return "".join(f"{name} {p:g}, which has no hand-derived layer: set it to 0" for name, p in [*found.items()][:1])


class FeedForwardPart(Part):
    """Contracts g(expanded), with the activation and, if there is one, its gate in one pass."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        me: Any = self
        known: Activation = me._handgrad_activation
        reason = self.why_not(hidden_states) or known.why_not(me) or (unapplied_dropout(self) if self.training else "")
        if reason:
            fell_back(self, reason)
            return super().forward(hidden_states)  # type: ignore[no-any-return]
        *layers, last = (getattr(me, name) for name in known.layers)
        act = getattr(me, known.attribute)
        if known.gated:
            gate, up = layers[0](hidden_states), layers[1](hidden_states) if len(layers) > 1 else None
            if why_not_tensors(gate, up) or (up is not None and (gate.shape, gate.dtype) != (up.shape, up.dtype)):
                gate, up = gate.chunk(2, -1) if up is None else (gate, up)
                return last(up * act(gate))  # type: ignore[no-any-return]
            return last(functions.gate(gate, up, known.name))  # type: ignore[no-any-return]
        a_7 = layers[0](hidden_states)
        a_8 = act(a_7) if why_not_tensors(a_7) else functions.activation(a_7, known.name)
        out: Tensor = last(a_8)
        return me.dropout(out) if "dropout" in me._modules else out


class Activation:
    """A feed-forward module's activation as it was when the module was replaced, and our name of it."""

    def __init__(self, module: nn.Module):
        found = next((x for x in ("act_fn", "activation_fn", "act", "activation") if x in module._modules), "")
        self.layers = layers_of(module, found)
        self.gated = self.layers in GATED
        self.attribute, self.act = found, module._modules.get(found)
        self.forward = None if self.act is None else type(self.act).forward
        self.settings = self._settings(self.act)
        self.name = self._name()

    @staticmethod
    def _settings(act: nn.Module | None) -> dict[str, Any]:
        return {} if act is None else {k: v for k, v in vars(act).items() if not k.startswith("_") and k != "training"}

    def _name(self) -> str:
        """The function that gives the same values; "" if none of ours does."""
        library = type(self.act).__module__
        if (
            self.act is None
            or self.forward is None
            or not library.startswith(("torch.nn.", "transformers.activations"))
        ):
            return ""
        x = torch.linspace(-9, 9, 361, dtype=torch.float64)
        with torch.no_grad():
            try:
                expected = self.forward(self.act, x.clone())
            except Exception:  # it takes another input
                return ""
            for name in GATES if self.gated else ACTIVATIONS:
                ours = functions.gate(x, torch.ones_like(x), name) if self.gated else functions.activation(x, name)
                if expected.shape == x.shape and bool(((ours - expected).abs() <= 1e-12 * (1 + x.abs())).all()):
                    return name
        return ""

    def why_not(self, module: nn.Module) -> str:
        """Why the module's activation is no longer what it was; "" if it is."""
        act = module._modules.get(self.attribute)
        if act is not self.act or act is None:
            return f"its activation is now a {type(act).__name__}"
        if type(act).forward is not self.forward or self._settings(act) != self.settings:
            return f"its activation, a {type(act).__name__}, was changed"
        return "a hook, or another forward, on its activation" if is_observed(act) else ""

"""The audited model as we see it: its configuration, its weights in a model of ours in float64, and who is who.

The model may be of transformers, with or without adapters of PEFT, or any module whose parameters have, or are given,
Hugging Face's names. Nothing here runs it or changes it.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import HandgradError
from ...families import full_name
from ...formats.config_json import read_config
from ...formats.huggingface import build
from ...formats.stacked_experts import Piece, split_name
from ...lora.config import LoRAConfig
from ...lora.experts import Stack, stacks_of
from ...lora.injection import adapters_of, biases_of, layers_of, put
from ...lora.layer import LoRA
from ...lora.patterns import prepare_matches
from ...lora.peft_config import config_of
from ...machine import available_memory
from ...model.config import ModelConfig
from ...model.gpt import GPT
from ...model.layers.experts import SELECTION

BYTES_PER_PARAMETER = 8 * 5  # float64: weights, hand-derived and perturbed gradients, and the signals beside them
_WRAPPERS = ("module", "_orig_mod")  # of DistributedDataParallel and torch.compile
OF_EXPERT = {"expert.gate": "gate of expert", "expert.expand": "up of expert", "expert.contract": "expert"}


class FactorPiece(NamedTuple):
    """What belongs to an expert in a factor of PEFT's for all experts of a block."""

    expert: int
    layer: str  # as the tables of families call it; of factor A, which gate and up share, the last one
    stack: Stack
    rows: tuple[int, int] | None  # of factor A
    i: int = 0  # of factor B: it is the i-th layer

    def of(self, x: Tensor) -> Tensor:
        """Take it out of the factor."""
        if self.rows is not None:
            return x[slice(*self.rows)]
        count = len(self.stack.layers)
        return self.stack.outputs(x.reshape(len(x), -1, count)[:, :, self.expert], self.i)


class Held(NamedTuple):
    """A parameter of the audited model, or a piece of one that holds the experts of a block."""

    name: str
    parameter: nn.Parameter
    piece: Piece | FactorPiece | None = None

    @property
    def title(self) -> str:
        return self.name if self.piece is None else f"{self.name} ({OF_EXPERT[self.piece.layer]} {self.piece.expert})"


@dataclass(frozen=True)
class Tracked:
    """A parameter of the audited model, or a piece of it, and ours that it equals."""

    name: str  # in the audited model
    held: Held
    ours: str  # the name of our parameter
    transposed: bool  # ours is its transpose
    adapter: bool  # belongs to an adapter
    trains: bool  # should receive a gradient

    @property
    def parameter(self) -> nn.Parameter:
        """The whole parameter, also if this is a piece of it."""
        return self.held.parameter

    @property
    def grad(self) -> Tensor | None:
        """Its present gradient."""
        whole = self.parameter.grad
        return whole if whole is None or self.held.piece is None else self.held.piece.of(whole)

    @property
    def module(self) -> str:
        """Our name of the module that holds it; of a piece, that of all experts."""
        path = self.ours.rpartition(".")[0].removesuffix(".base")
        return path if self.held.piece is None else path.rpartition(".")[0].rpartition(".")[0]

    def turned(self, ours: Tensor) -> Tensor:
        """A tensor of ours in the orientation of the audited parameter."""
        return ours.detach().t() if self.transposed else ours.detach()

    def expected(self, grads: dict[str, Tensor]) -> Tensor | None:
        """Our gradient in that orientation; None where there should be none."""
        return self.turned(grads[self.ours]) if self.ours in grads else None


@dataclass(frozen=True)
class Subject:
    """An audited model, beside our model with the same weights in float64."""

    model: nn.Module  # as it was given: this is what runs
    base: nn.Module  # the network itself, without wrappers and PEFT
    ours: GPT
    tracked: list[Tracked]
    modules: dict[str, str]  # our name of a module → its name in `base`
    adapter: str | None  # name of the active adapter
    title: str
    balance: float = 0.0  # the coefficient of the balance loss that the model adds to its loss

    @property
    def padding_row(self) -> int:
        """The padding_idx of the embedding, whose row nn.Embedding gives no gradient; −1 if it has none"""
        row = getattr(self.module(self.config.table.names["embed"]), "padding_idx", None)
        return -1 if row is None else int(row)

    @property
    def config(self) -> ModelConfig:
        return self.ours.config

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first weight of the network."""
        return next(t.parameter.dtype for t in self.tracked if not t.adapter)

    def module(self, ours: str) -> nn.Module | None:
        """The audited module that has our name `ours`; None if it was replaced by something without it."""
        try:
            return self.base.get_submodule(self.modules.get(ours, ours))
        except AttributeError:
            return None


Names = Callable[[str], str]


def make_subject(
    model: Any, config: ModelConfig | dict[str, Any] | None, names: Names | None, transposed: tuple[str, ...]
) -> Subject:
    """Read a model's configuration and weights, and build ours."""
    if isinstance(model, GPT):
        raise HandgradError("this is a handgrad model, which has no autograd to audit: use hg.verify")
    if not isinstance(model, nn.Module):
        raise HandgradError(f"the model must be a torch module, not a {type(model).__name__}")
    inner = _unwrapped(model)
    adapter = _active_adapter(inner)
    lora = None if adapter is None else _adapter_config(inner, adapter)
    base: nn.Module = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # type: ignore[operator]
    read, balance = _config(base, config)
    found = _parameters(base, adapter, names or (lambda name: read.table.as_in_files(full_name(name))), read)
    ours = _build(read, found, transposed)
    factors: dict[str, Held] = {}
    if adapter is not None and lora is not None:
        factors = _add_adapters(ours, base, adapter, lora)
    ours.double().eval()
    tracked = list(_pairs(ours, base, found, factors, adapter, transposed))
    broken = [t.name for t in tracked if not torch.isfinite(t.parameter).all()]
    if broken:
        raise HandgradError(f"{broken[0]} holds NaN or infinity ({len(broken)} such), so no gradient can be right")
    own = {t.ours: t for t in tracked}
    for name, p in ours.named_parameters():
        p.requires_grad_(own[name].trains)
    if not any(t.trains for t in tracked):
        raise HandgradError(
            "every parameter is frozen, so there is no gradient to audit: set requires_grad=True, or load the adapter"
            " with is_trainable=True"
        )
    modules = {t.module: _module_of(t.held.name) for t in tracked if not t.adapter}
    return Subject(model, base, ours, tracked, _with_parents(modules), adapter, type(base).__name__, balance)


def _unwrapped(model: nn.Module) -> nn.Module:
    for attribute in _WRAPPERS:
        inner = model._modules.get(attribute)
        if isinstance(inner, nn.Module):
            return _unwrapped(inner)
    return model


def _config(base: nn.Module, given: ModelConfig | dict[str, Any] | None) -> tuple[ModelConfig, float]:
    """The configuration, and the coefficient of the balance loss."""
    if isinstance(given, ModelConfig):
        return given, 0.0
    raw = given
    if raw is None and hasattr(getattr(base, "config", None), "to_json_string"):
        raw = json.loads(base.config.to_json_string())  # type: ignore[union-attr,operator]
    if not isinstance(raw, dict):
        raise HandgradError(
            f"{type(base).__name__} has no configuration of transformers: give config=hg.ModelConfig(…), or the"
            " fields of a config.json"
        )
    adds = raw.get("output_router_logits") and "router_aux_loss_coef" in raw
    config = read_config({**raw, "output_router_logits": False}, Path("the model's configuration"))
    return config, float(raw["router_aux_loss_coef"]) if adds and config.n_experts is not None else 0.0


# ── parameters ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _active_adapter(model: Any) -> str | None:
    """The name of the adapter that PEFT computes with; None without adapters."""
    if hasattr(model, "get_base_model"):
        active = model.active_adapters
    else:  # a transformers model has adapters in its layers after add_adapter
        layer = next((m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "active_adapters")), None)
        active = [None] if layer is None else layer.active_adapters
    if len(active) != 1:
        raise HandgradError(f"{len(active)} adapters are active: activate one with model.set_adapter(name)")
    name: str | None = active[0]
    return name


def _adapter_config(model: Any, adapter: str) -> LoRAConfig:
    raw = {k: sorted(v) if isinstance(v, set) else v for k, v in model.peft_config[adapter].to_dict().items()}
    return config_of(raw, Path("the adapter's configuration"))


def _parameters(base: nn.Module, adapter: str | None, names: Names, config: ModelConfig) -> dict[str, Held]:
    """The network's own parameters by Hugging Face's names, those that hold several experts piece by piece."""
    found: dict[str, Held] = {}
    biases: Iterator[Any] = ((name, x) for name, x in base.named_buffers() if name.endswith(SELECTION))
    for name, p in (*base.named_parameters(remove_duplicate=False), *biases):
        if ".lora_" in name or ".original_module." in name:
            continue
        if ".modules_to_save." in name and f".modules_to_save.{adapter}." not in name:
            continue
        if not p.is_floating_point():
            raise HandgradError(f"{name} holds {p.dtype}, not floating-point numbers: load the model unquantized")
        plain = re.sub(r"(\.base_layer)+\.", ".", name).replace(f".modules_to_save.{adapter}.", ".")
        if config.n_experts is None:
            found[names(plain)] = Held(name, p)
        else:
            for own, piece in split_name(names(plain), len(p), config.table):
                found[own] = Held(name, p, piece)
    return found


def _build(config: ModelConfig, found: dict[str, Held], transposed: tuple[str, ...]) -> GPT:
    """Our model with these weights; whether the head is tied is decided by the tensors, not by the configuration."""
    layers = config.table.names
    head, embed = (found.get(f"{layers[part]}.weight") for part in ("head", "embed"))
    if embed is None:
        raise HandgradError(
            f"the model has no parameter {layers['embed']}.weight: give names=, a function from its names to those of"
            f" {config.table.architecture}"
        )
    config = replace(config, tied=head is None or head.parameter is embed.parameter)
    size = sum(p.numel() for p in {x.parameter for x in found.values()})
    needed, (free, _) = BYTES_PER_PARAMETER * size, available_memory()
    if needed > free:
        raise HandgradError(
            f"auditing {size:,} parameters in float64 needs about {needed / 1e9:.0f} GB, but {free / 1e9:.0f} GB"
            " are free: audit a smaller model of the same family, with the same code"
        )
    shapes = {name: p.shape for name, p in GPT(config, device="meta").named_parameters()}
    weights: dict[str, Any] = {}
    for name, shape in shapes.items():
        if name not in found:
            raise HandgradError(f"the model has no parameter {name} ({len(shapes)} are needed)")
        theirs, p, piece = found[name]
        if p.is_meta:
            raise HandgradError(f"{theirs} has no values: load the weights first")
        value = (p.detach() if piece is None else piece.of(p.detach())).cpu().double().clone()
        value = value.t().contiguous() if theirs.endswith(transposed or ("\0",)) else value
        if value.shape != shape:
            raise HandgradError(
                f"{found[name].title} has the shape {tuple(value.shape)}; the configuration requires {tuple(shape)}"
            )
        weights[name] = value
    unknown = sorted(set(found) - set(shapes) - ({f"{layers['head']}.weight"} if config.tied else set()))
    if unknown:
        raise HandgradError(f"{unknown[0]} is not a parameter of {config.table.architecture} ({len(unknown)} such)")
    return build(config, weights, torch.float64)


@torch.no_grad()
def _add_adapters(ours: GPT, base: nn.Module, adapter: str, config: LoRAConfig) -> dict[str, Held]:
    """Give our model the adapters of PEFT, and return PEFT's factors by our names."""
    layers, table = layers_of(ours), ours.config.table
    modules = {name: m for name, m in base.named_modules() if adapter in getattr(m, "lora_A", {})}
    if any(adapter in getattr(m, "lora_embedding_A", {}) for m in base.modules()):
        raise HandgradError("adapters of embeddings are not supported: give adapters to linear layers")
    if not modules:
        raise HandgradError(f"the adapter {adapter!r} has no low-rank factors")
    stacks = {one.parameter: one for one in stacks_of(ours.config)}
    keys = {name: _key_of(full_name(name), module) for name, module in modules.items()}  # of its rank and scale
    prepare_matches((*config.rank_pattern, *config.alpha_pattern), list(keys.values()))
    factors: dict[str, Held] = {}
    for path, module in modules.items():
        name, scale = table.as_in_files(full_name(path)), config.scale_of(keys[path])
        if getattr(module, "merged", False):
            raise HandgradError("the adapter is merged into the weights: call model.unmerge_adapter() first")
        a, b = (getattr(module, factor)[adapter].weight for factor in ("lora_A", "lora_B"))
        held = {"down": Held(f"{path}.lora_A.{adapter}.weight", a), "up": Held(f"{path}.lora_B.{adapter}.weight", b)}
        if keys[path] in stacks:
            factors |= _add_stacked(ours, stacks[keys[path]], held, scale)
            continue
        if name not in layers:
            raise HandgradError(f"the adapter changes {name}, which is no linear layer of ours")
        magnitude = adapter in getattr(module, "lora_magnitude_vector", {})
        layer = LoRA(layers[name].plain(), len(a), scale, magnitude=magnitude)
        if magnitude:
            theirs = module.lora_magnitude_vector[adapter].weight
            held["magnitude"] = Held(f"{path}.lora_magnitude_vector.{adapter}.weight", theirs)
        _set_factors(layer, a, b)
        if layer.magnitude is not None:
            layer.magnitude.copy_(held["magnitude"].parameter.flatten().cpu())
        put(ours, name, layer)
        factors |= {f"{name}.{kind}": x for kind, x in held.items()}
    ours.adapter = config
    return factors


def _key_of(path: str, module: Any) -> str:
    """What PEFT calls the layer or the parameter that an adapter changes."""
    path = re.sub(r"(\.base_layer)+$", "", path)
    return f"{path}.{module.parameter_name}" if hasattr(module, "parameter_name") else path


def _add_stacked(ours: GPT, stack: Stack, held: dict[str, Held], scale: float) -> dict[str, Held]:
    """Give every expert its part of the factors for all of them: gate and up share A, and so its gradient."""
    layers, (a, b) = layers_of(ours), (held[kind].parameter for kind in ("down", "up"))
    rank = len(a) // len(stack.layers)
    kinds = ("expert.contract",) if len(stack.layers[0]) == 1 else ("expert.gate", "expert.expand")
    factors: dict[str, Held] = {}
    for e, own in enumerate(stack.layers):
        first: LoRA | None = None
        of_a = FactorPiece(e, "expert.contract", stack, (e * rank, (e + 1) * rank))
        for i, name in enumerate(own):
            of_b = FactorPiece(e, kinds[i], stack, None, i)
            layer = LoRA(layers[name].plain(), rank, scale)
            _set_factors(layer, of_a.of(a), of_b.of(b))
            if first is not None:
                layer.down = first.down
            first = layer
            put(ours, name, layer)
            factors |= {f"{name}.down": held["down"]._replace(piece=of_a)}
            factors |= {f"{name}.up": held["up"]._replace(piece=of_b)}
    return factors


def _set_factors(layer: LoRA, a: Tensor, b: Tensor) -> None:
    layer.down.copy_(a.t().cpu())
    layer.up.copy_(b.t().cpu())


def _pairs(
    ours: GPT,
    base: nn.Module,
    found: dict[str, Held],
    factors: dict[str, Held],
    adapter: str | None,
    transposed: tuple[str, ...],
) -> Iterator[Tracked]:
    """Every parameter of ours with its twin."""
    biases = {} if ours.adapter is None else biases_of(ours, ours.adapter.bias, adapters_of(ours))
    parameters = dict(base.named_parameters(remove_duplicate=False))
    freeze_down = ours.adapter is not None and _all_frozen(parameters, "lora_A", adapter)
    for name, _ in ours.named_parameters():
        if name in factors:
            kind = name.rpartition(".")[2]
            trains = not (freeze_down and kind == "down")
            yield Tracked(factors[name].title, factors[name], name, kind != "magnitude", True, trains)
        else:
            plain = name.replace(".base.", ".")
            own = found[plain]
            saved = f".modules_to_save.{adapter}." in own.name or plain in biases
            turned = own.name.endswith(transposed or ("\0",))
            yield Tracked(own.title, own, name, turned, saved, saved or own.parameter.requires_grad)


def _all_frozen(parameters: dict[str, nn.Parameter], factor: str, adapter: str | None) -> bool:
    """Whether no layer trains this factor while others train: LoRA-FA."""
    chosen = [p for name, p in parameters.items() if f".{factor}.{adapter}." in name]
    others = [p for name, p in parameters.items() if f".lora_B.{adapter}." in name]
    return not any(p.requires_grad for p in chosen) and any(p.requires_grad for p in others)


def _module_of(parameter: str) -> str:
    """The module that computes with a parameter: an adapted layer rather than the layer inside it."""
    path = re.sub(r"(\.base_layer)+$", "", parameter.rpartition(".")[0])
    return path.partition(".modules_to_save.")[0]


def _with_parents(modules: dict[str, str]) -> dict[str, str]:
    """The modules' parents too, where our path and theirs have the same number of parts."""
    found = dict(modules)
    for ours, theirs in modules.items():
        mine, other = ours.split("."), theirs.split(".")
        shift = len(mine) - len(other)  # the prefix that a bare network omits
        for i in range(1, len(mine)):
            if i > shift >= 0:
                found.setdefault(".".join(mine[:i]), ".".join(other[: i - shift]))
    return found

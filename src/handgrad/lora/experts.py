"""Adapters of mixtures as PEFT holds them with transformers 5, where the layers of all experts of a block are two tensors.

    gate_up_proj   lora_A (E r, d)   lora_B (2f, r E)        A_e is r rows, gate and up share it
    down_proj      lora_A (E r, f)   lora_B (d, r E)         B_e is every E-th column

They are read as an adapter for each layer of each expert, with the same output; trained further, gate and up have a factor A
each. Ours are written so that PEFT computes the same: the factors of gate and up side by side, with zeros in B between them,
and zeros for experts without an adapter. PEFT takes other layers of a mixture for experts if their names are alike, and
routers are no linear layers there: these are named by their parameters too, shared_expert.up_proj.weight. PEFT has neither
dropout nor DoRA for parameters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import HandgradError
from ..model.config import ModelConfig
from .config import LoRAConfig
from .layer import LoRA
from .patterns import matches, prepare_matches, shortest

Factors = dict[str, dict[str, Tensor]]
_LAYERS = {"gate_up_proj": ("expert.gate", "expert.expand"), "down_proj": ("expert.contract",)}


@dataclass(frozen=True)
class Stack:
    """Layers of all experts of a block that are one parameter in transformers."""

    parameter: str  # its name there: model.layers.0.mlp.experts.gate_up_proj
    layers: tuple[tuple[str, ...], ...]  # our names of gate and up, or of down, of every expert
    f_in: int
    f_out: int  # of one layer
    in_turn: bool  # gpt-oss has the outputs of gate and up in turn

    @property
    def module(self) -> str:
        return self.parameter.rpartition(".")[0]

    def outputs(self, b: Tensor, i: int) -> Tensor:
        """The rows of B_e (n f_out, r) that belong to its i-th layer."""
        n = len(self.layers[0])
        return b[i::n] if self.in_turn else b.chunk(n)[i]


class Stacked(NamedTuple):
    """The factors of a stack as PEFT has them."""

    a: Tensor  # (E r, f_in)
    b: Tensor  # (n f_out, r E)
    rank: int
    scale: float


def stacks_of(config: ModelConfig) -> Iterator[Stack]:
    """Every stack of the model."""
    if config.n_experts is None:
        return
    table, d, f = config.table, config.d_model, config.expert_width
    for i in filter(config.sparse_block, range(config.n_blocks)):
        experts = f"{table.names['blocks']}.{i}.{table.names['mlp']}.{table.names['mlp.experts']}"
        for kind, parts in _LAYERS.items():
            layers = tuple(tuple(f"{experts}.{e}.{table.names[x]}" for x in parts) for e in range(config.n_experts))
            f_in, f_out = (d, f) if kind == "gate_up_proj" else (f, d)
            yield Stack(f"{table.as_in_memory(experts)}.{kind}", layers, f_in, f_out, table.stacked_experts)


def parameter_of(config: ModelConfig, layer: str) -> str | None:
    """The parameter by which PEFT finds a layer that is no expert's; None if it finds the layer by its own name."""
    inside = config.n_experts is not None and f".{config.table.names['mlp']}." in layer
    return f"{config.table.as_in_memory(layer)}.weight" if inside else None


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def check(config: ModelConfig, adapters: Mapping[str, LoRA]) -> None:
    """Raise if PEFT cannot hold these adapters of a mixture."""
    for layer, adapter in adapters.items():
        if adapter.magnitude is not None and parameter_of(config, layer) is not None:
            raise HandgradError(
                f"PEFT has no DoRA for {layer} of a mixture of experts: leave DoRA out, or give adapters to attention only"
            )
    for stack in stacks_of(config):
        scales = {layer: adapters[layer].scale for own in stack.layers for layer in own if layer in adapters}
        if len(set(scales.values())) > 1:
            one, other = (next(x for x in scales if scales[x] == scale) for scale in sorted(set(scales.values()))[:2])
            raise HandgradError(
                f"PEFT has one scale for all of {stack.parameter}, but {one} has {scales[one]:g} and {other}"
                f" {scales[other]:g}: give them the same rank and alpha"
            )


def stack(config: ModelConfig, adapters: Mapping[str, LoRA]) -> dict[Stack, Stacked]:
    """The adapters of experts as PEFT has them."""
    found: dict[Stack, Stacked] = {}
    for one in stacks_of(config):
        own = [[adapters.get(layer) for layer in layers] for layers in one.layers]
        widths = _widths([[0 if x is None else x.down.shape[1] for x in of_expert] for of_expert in own])
        first = next((x for of_expert in own for x in of_expert if x is not None), None)
        if first is None:
            continue
        a = first.down.new_zeros(len(own), sum(widths), one.f_in)
        b = first.down.new_zeros(len(own), len(widths) * one.f_out, sum(widths))
        for e, of_expert in enumerate(own):
            for i, adapter in enumerate(of_expert):
                if adapter is not None:
                    start, rank = sum(widths[:i]), adapter.down.shape[1]
                    a[e, start : start + rank] = adapter.down.detach().t()
                    one.outputs(b[e], i)[:, start : start + rank] = adapter.up.detach().t()
        found[one] = Stacked(a.flatten(0, 1), b.permute(1, 2, 0).flatten(1), sum(widths), first.scale)
    return found


def module_names(stacks: Mapping[Stack, Stacked]) -> dict[Stack, str]:
    """Where PEFT has the factors of each: a module with two of them has one inside the other."""
    both = [one.module for one in stacks]
    inner = (one.parameter.endswith("gate_up_proj") and both.count(one.module) == 2 for one in stacks)
    return {one: one.module + (".base_layer" if inside else "") for one, inside in zip(stacks, inner, strict=True)}


def _widths(ranks: list[list[int]]) -> list[int]:
    """The columns of every layer of a stack, from the ranks by expert and layer."""
    return [max(of_layer) for of_layer in zip(*ranks, strict=True)]


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def split(
    model: ModelConfig, factors: Factors, config: LoRAConfig, parameters: tuple[str, ...], file: object
) -> tuple[Factors, LoRAConfig]:
    """The factors of every layer, with those of stacked experts one by one, and the configuration with their ranks.
    `parameters` are PEFT's target_parameters."""
    if model.n_experts is None:
        return factors, config
    by_module: dict[str, list[Stack]] = {}
    for one in stacks_of(model):
        by_module.setdefault(model.table.as_in_files(one.module), []).append(one)
    found: Factors = {}
    keys: dict[str, str] = {}  # layer → PEFT's key of its rank and alpha
    ours = isinstance(config.targets, tuple)
    for name, parts in factors.items():
        stacks = by_module.get(name.removesuffix(".base_layer").removesuffix(".base_layer"))
        if stacks is None:
            weight = f"{model.table.as_in_memory(name)}.weight"
            named = any(weight == end or weight.endswith(f".{end}") for end in parameters)
            found[name], keys[name] = parts, weight if named else model.table.as_in_memory(name)
            continue
        of_layers, key = _split_stack(name, stacks, parts, config if ours else None, file)
        found |= of_layers
        keys |= dict.fromkeys(of_layers, key)
    if ours:
        return found, config
    prepare_matches((*config.rank_pattern, *config.alpha_pattern), keys.values())
    ranks = {name: config.rank_of(key) for name, key in keys.items()}
    alphas = {name: config.alpha_of(key) for name, key in keys.items()}
    return found, replace(
        config,
        rank_pattern={end: x for end, x in shortest(ranks, found).items() if x != config.rank},
        alpha_pattern={end: x for end, x in shortest(alphas, found).items() if x != (config.alpha or config.rank)},
    )


def _split_stack(
    name: str, stacks: list[Stack], parts: dict[str, Tensor], ours: LoRAConfig | None, file: object
) -> tuple[Factors, str]:
    """The factors of every layer of a stack, and its parameter. Of a file of `ours`, the layers that have adapters and their
    ranks are known."""
    a, b = parts.get("lora_A"), parts.get("lora_B")
    count = len(stacks[0].layers)
    fits = [
        one for one in stacks
        if a is not None and b is not None and a.ndim == b.ndim == 2 and len(a) and not len(a) % count
        and (a.shape[1], *b.shape) == (one.f_in, len(one.layers[0]) * one.f_out, len(a))
    ]  # fmt: skip
    if a is None or b is None or not fits:
        raise HandgradError(f"{file}: the factors of {name} do not fit the {count} experts of this model")
    one, rank = fits[0], len(a) // count
    each = len(one.layers[0])
    ranks = [[rank] * each] * count
    if ours is not None:
        prepare_matches((*ours.targets, *ours.rank_pattern), [x for own in one.layers for x in own])
        ranks = [
            [ours.rank_of(x) if any(matches(p, x) for p in ours.targets) else 0 for x in own] for own in one.layers
        ]
        if sum(_widths(ranks)) != rank:
            raise HandgradError(f"{file}: the factors of {name} do not have the ranks that the configuration says")
    starts = [0] * each if ours is None else [sum(_widths(ranks)[:i]) for i in range(each)]
    found: Factors = {}
    for e, own in enumerate(one.layers):
        a_e, b_e = a[e * rank : (e + 1) * rank], b.reshape(len(b), rank, count)[:, :, e]
        for i, layer in enumerate(own):
            columns = slice(starts[i], starts[i] + ranks[e][i])
            if ranks[e][i]:
                found[layer] = {"lora_A": a_e[columns], "lora_B": one.outputs(b_e, i)[:, columns]}
    return found, one.parameter


def share_factors(config: ModelConfig, adapters: Mapping[str, LoRA]) -> bool:
    """Whether gate and up of an expert have the same factor A, as after reading PEFT's."""
    pairs = (own for one in stacks_of(config) for own in one.layers if len(own) == 2)
    return any(x in adapters and y in adapters and torch.equal(adapters[x].down, adapters[y].down) for x, y in pairs)

"""The parameters of a model and of its adapters."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from .. import lora
from ..errors import HandgradError
from ..lora.patterns import split_names
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..model.layers.linear import Affine
from ..model.layers.taps import Taps
from ..model.names import block_of, without_block
from ..model.steps import Layer
from .outline import KINDS, kind_of, kinds_of_blocks, layers_of_block, linear_layers, outline


@dataclass(frozen=True)
class Parameter:
    """A tensor of the model, or the part of one that has a symbol."""

    layer: str  # "embedding", one of `KINDS`, "final norm" or "logits"
    symbol: str  # in the paper
    name: str  # in Hugging Face's files; in a block without its prefix, such as transformer.h.N
    shape: tuple[int, ...]  # of a matrix: (f_in, f_out), however it is stored

    used: float = 1.0  # share that a token uses: k/E of the experts

    @property
    def count(self) -> int:
        return prod(self.shape)


def parameters(config: ModelConfig) -> list[Parameter]:
    """All tensors, those of a block of each kind listed once. Matrices stored side by side, such as q, k and v, are
    listed one by one, those of all experts together: (E, f_in, f_out)."""
    kinds = {kind_of(config, i): outline(config, i) for i in reversed(kinds_of_blocks(config))}
    model = outline(config)
    names = {id(p): without_block(name) for of in (model, *kinds.values()) for name, p in of.named_parameters()}
    rows = [
        Parameter("embedding", symbol, names[id(p)], tuple(p.shape))
        for symbol, table in model.tables().items()
        for p in table.parameters()
    ]
    for kind in [kind for kind in KINDS if kind in kinds]:
        for number, layer in kinds[kind].blocks[0].numbered().items():
            rows += _parameters_of(kind, number, layer, names)
    rows = _stacked(config, rows)
    rows += _parameters_of("final norm", "10", model.final_norm, names)
    listed = [p for p in _parameters_of("logits", "11", model.head, names) if not (config.tied and p.symbol == "w_11")]
    return rows + listed


def times(config: ModelConfig, p: Parameter) -> int:
    """How many blocks have this parameter; 1 outside the blocks."""
    kinds = Counter(kind_of(config, i) for i in range(config.n_blocks))
    return kinds.get(p.layer, 1)


def _stacked(config: ModelConfig, rows: list[Parameter]) -> list[Parameter]:
    """The same with the experts' tensors of one name as one."""
    found: dict[str, Parameter] = {}
    for p in rows:
        name = re.sub(r"\.experts\.\d+\.", ".experts.*.", p.name)
        if name == p.name:
            found[p.layer + p.symbol + name] = p
        elif name not in found:
            assert config.n_experts is not None and config.experts_per_token is not None
            symbol, used = p.symbol.rpartition("_")[0], config.experts_per_token / config.n_experts
            found[name] = replace(p, symbol=f"{symbol}_e", name=name, shape=(config.n_experts, *p.shape), used=used)
    return list(found.values())


def _parameters_of(place: str, number: str, layer: Layer, names: dict[int, str]) -> list[Parameter]:
    """The parameters of a layer, part by part."""
    plain = layer.plain() if isinstance(layer, Affine) else None
    found: dict[str, list[Parameter]] = {}
    for letter, p in layer.named_symbols().items():
        if p is None:
            continue
        views = {number: p.t() if plain is not None and letter == "w" and not plain.in_out else p}
        if isinstance(layer, Taps) and letter == "w":
            views = {number: layer.in_order(p)}
        if plain is not None and plain.parts:
            views = plain.parts_of(letter, p)
        for part, view in views.items():
            row = Parameter(place, f"{letter}_{part}", names[id(p)], tuple(view.shape))
            found.setdefault(part, []).append(row)
    return [row for part in found.values() for row in part]


# ── adapters ────────────────────────────────────────────────────────────────────────────────────────────────────────

Ranks = Mapping[str, int]  # rank of the adapter by layer name; empty: all weights train


def target_ranks(config: ModelConfig, rank: int, targets: str | Sequence[str]) -> Ranks:
    """The rank for every layer that `targets` selects, as in `adapters.choose`, or for a part of one: the letter q selects
    the columns of q in a layer that also holds k and v. "paper" selects the head and every matrix, each part of a layer
    apart, as Section 7 counts them."""
    patterns = split_names([targets] if isinstance(targets, str) else targets)
    model = GPT(config, device="meta")
    parts = {path: [f"{path}.{x}" for x in layer.plain().parts] for path, layer in lora.layers_of(model).items()}
    by_letter: dict[str, list[str]] = {"paper": []}
    for path, own in parts.items():
        by_letter["paper"] += own or [path]
        for part in own:
            by_letter.setdefault(part.rpartition(".")[2], []).append(part)
    chosen = {name for pattern in patterns for name in by_letter.get(pattern, ())}
    others = [pattern for pattern in patterns if pattern not in by_letter]
    if others or not patterns:
        chosen |= set(lora.choose(model, others))
    for path, own in parts.items():
        if path in chosen and chosen & set(own):
            whole, *letters, last = (name.rpartition(".")[2] for name in (path, *own))
            raise HandgradError(
                f"{whole} is {', '.join(letters)} and {last} together: name {whole} or its parts, not both"
            )
    return dict.fromkeys([name for path, own in parts.items() for name in (path, *own) if name in chosen], rank)


def adapter_parameters(config: ModelConfig, ranks: Ranks) -> int:
    """Number of parameters of the factors: r (f_in + f_out) for each layer"""
    total = 0
    for name, rank in ranks.items():
        i = block_of(name) or 0
        layer = layers_of_block(config, i).get(without_block(name)) if i < config.n_blocks else None
        if layer is None:
            raise HandgradError(f"the model has no linear layer {name}: the adapter belongs to another model")
        total += rank * (layer.f_in + layer.f_out)
    return total


def short_names(config: ModelConfig, ranks: Ranks) -> tuple[str, ...]:
    """The layers with adapters, without their blocks: c_attn, and attn.c_proj because mlp.c_proj exists as well"""
    ends = [name.rpartition(".")[2] for name in linear_layers(config)]
    names = dict.fromkeys(map(without_block, ranks))
    return tuple(end if ends.count(end := name.rpartition(".")[2]) == 1 else name for name in names)

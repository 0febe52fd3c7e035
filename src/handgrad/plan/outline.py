"""The outline of a model: its layers on the meta device, without memory. What a plan counts is read from it, so a new family
needs no formulas."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..lora import layers_of
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..model.layers.experts import Experts
from ..model.layers.linear import Affine
from ..model.names import without_block


@lru_cache(maxsize=32)
def outline(config: ModelConfig, i: int = 0, dtype: torch.dtype = torch.float64) -> GPT:
    """The model with block i as its only one."""
    return GPT(with_blocks(config, (i,)), device="meta", dtype=dtype)


def with_blocks(config: ModelConfig, blocks: Sequence[int]) -> ModelConfig:
    """The configuration of a model that has these blocks of the given one; a block may be listed twice."""
    windowed = config.windowed
    return replace(
        config,
        n_blocks=len(blocks),
        unrotated=tuple(j for j, i in enumerate(blocks) if i in config.unrotated),
        conv_blocks=tuple(j for j, i in enumerate(blocks) if i in config.conv_blocks),
        windowed=None if windowed is None else tuple(j for j, i in enumerate(blocks) if i in windowed),
        dense=tuple(j for j, i in enumerate(blocks) if i in config.dense),
    )


KINDS = ("block", "conv block", "dense block")  # that differ in their layers


def kind_of(config: ModelConfig, i: int) -> str:
    """Which of them block i is: a dense one is among others with experts."""
    if i in config.conv_blocks:
        return "conv block"
    return "dense block" if config.n_experts is not None and not config.sparse_block(i) else "block"


def kinds_of_blocks(config: ModelConfig) -> dict[int, int]:
    """Blocks differ in rotation, window, convolution and experts alone. The first block of each kind, and how many there
    are."""
    kinds = [(config.rotated_block(i), config.window_of(i), kind_of(config, i)) for i in range(config.n_blocks)]
    return {kinds.index(kind): count for kind, count in Counter(kinds).items()}


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer, or the part of one that has a letter."""

    f_in: int
    f_out: int
    every_row: bool = False  # needed for every token; the last block computes others only for tokens with a target
    reads_first: bool = False  # what the block's first branches read: q, k and v, and w_6 of a parallel branch
    part_of: str | None = None  # the layer in which it is stored beside others
    experts: tuple[int, int] = (1, 1)  # of a layer of an expert: k of E read each row

    @property
    def products(self) -> int:
        """Multiply-adds per row, on average over the experts: k/E of theirs."""
        k, among = self.experts
        return self.f_in * self.f_out * k // among


@lru_cache(maxsize=32)
def linear_layers(config: ModelConfig) -> dict[str, LinearLayer]:
    """Every linear layer by its name inside a block, and the head. Those stored side by side are also listed one by one:
    attn.c_attn.q, attn.c_attn.k and attn.c_attn.v are parts of attn.c_attn."""
    return {name: layer for i in kinds_of_blocks(config) for name, layer in layers_of_block(config, i).items()}


def layers_of_block(config: ModelConfig, i: int) -> dict[str, LinearLayer]:
    """The same of block i alone."""
    kinds = [kind_of(config, j) for j in range(config.n_blocks)]
    return _layers_of(config, kinds.index(kinds[i]))


@lru_cache(maxsize=32)
def _layers_of(config: ModelConfig, i: int) -> dict[str, LinearLayer]:
    model = outline(config, i)
    block = model.blocks[0]
    mlp = block.mlp
    of_experts = {id(x) for x in mlp.experts.modules()} if isinstance(mlp, Experts) else set()
    share = (config.experts_per_token or 1, config.n_experts or 1)
    branches = [branch.layers for path in block.halves()[0].paths for branch in path.branches]
    inputs = [x for branch in branches if not isinstance(branch, Experts) for x in branch.projections()]
    first, *others = mixing = block.mixing.projections()
    every_row = [*others] if _is_single(first) else [*mixing]  # a separate query: only where needed
    if not model.config.leaves_rows_out(0):
        every_row = [layer for path, layer in layers_of(model).items() if layer is not model.head]
    found: dict[str, LinearLayer] = {}
    for path, layer in layers_of(model).items():
        name = without_block(path)
        f_in, f_out = layer.plain().w.shape
        experts = share if id(layer) in of_experts else (1, 1)
        of = LinearLayer(f_in, f_out, _among(layer, every_row), _among(layer, inputs), experts=experts)
        found[name] = of
        for letter, width in layer.plain().parts.items():
            found[f"{name}.{letter}"] = replace(of, f_out=width, part_of=name)
    return found


def _is_single(layer: Affine) -> bool:
    return len(layer.plain().widths) == 1


def _among(layer: Affine, layers: Sequence[Affine]) -> bool:
    return any(layer is other for other in layers)

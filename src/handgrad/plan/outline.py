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
        windowed=None if windowed is None else tuple(j for j, i in enumerate(blocks) if i in windowed),
    )


def kinds_of_blocks(config: ModelConfig) -> dict[int, int]:
    """Blocks differ in rotation and window alone. The first block of each kind, and how many there are."""
    kinds = [(config.rotated_block(i), config.window_of(i)) for i in range(config.n_blocks)]
    return {kinds.index(kind): count for kind, count in Counter(kinds).items()}


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer, or the part of one that has a letter."""

    f_in: int
    f_out: int
    every_row: bool = False  # needed for every token; the last block computes others only for tokens with a target
    reads_first: bool = False  # what the block's first branches read: q, k and v, and w_6 of a parallel branch
    part_of: str | None = None  # the layer in which it is stored beside others

    @property
    def products(self) -> int:
        """Multiply-adds per row."""
        return self.f_in * self.f_out


@lru_cache(maxsize=32)
def linear_layers(config: ModelConfig) -> dict[str, LinearLayer]:
    """Every linear layer by its name inside a block, and the head. Those stored side by side are also listed one by one:
    attn.c_attn.q, attn.c_attn.k and attn.c_attn.v are parts of attn.c_attn."""
    model = outline(config)
    block = model.blocks[0]
    inputs = [x for path in block.halves()[0].paths for branch in path.branches for x in branch.layers.projections()]
    first, *others = block.attn.projections()
    every_row = [*others] if _is_single(first) else [first]  # a separate query: only where needed
    if not block.leaves_rows_out:
        every_row = [layer for path, layer in layers_of(model).items() if layer is not model.head]
    found: dict[str, LinearLayer] = {}
    for path, layer in layers_of(model).items():
        name = without_block(path)
        f_in, f_out = layer.plain().w.shape
        of = LinearLayer(f_in, f_out, _among(layer, every_row), _among(layer, inputs))
        found[name] = of
        for letter, width in layer.plain().parts.items():
            found[f"{name}.{letter}"] = replace(of, f_out=width, part_of=name)
    return found


def _is_single(layer: Affine) -> bool:
    return len(layer.plain().widths) == 1


def _among(layer: Affine, layers: Sequence[Affine]) -> bool:
    return any(layer is other for other in layers)

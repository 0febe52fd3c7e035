"""The update of a planned step: what the optimizer stores, and what Muon multiplies."""

from collections import Counter
from math import prod

from .. import optim
from ..model.config import ModelConfig
from ..model.names import block_of, without_block
from ..optim.muon import OPTIONS
from .outline import KINDS, layers_of_block
from .parameters import Ranks, parameters, times

Maps = Counter[tuple[int, ...]]  # how many linear maps have a shape, (f_in, f_out)


def maps_of(config: ModelConfig, ranks: Ranks) -> Maps:
    """The linear maps in the blocks that train: of all weights or, with `ranks`, of the adapters' factors."""
    if not ranks:
        every = Maps()
        for p in parameters(config):
            if p.layer in KINDS and len(p.shape) > 1:  # those of all experts have a third size, their number
                every[p.shape[-2:]] += times(config, p) * prod(p.shape[:-2])
        return every
    found = Maps()
    for name, rank in ranks.items():
        if (i := block_of(name)) is not None:
            layers = layers_of_block(config, i)
            layer = layers[without_block(name)]
            widths = [part.f_out for part in layers.values() if part.part_of == without_block(name)] or [layer.f_out]
            found.update([(layer.f_in, rank), *((rank, width) for width in widths)])
    return found


def update_flop(optimizer: str, maps: Maps) -> int:
    """FLOP of the products of an update. Those of Muon, for a map of a × b with a ≤ b: in every iteration X Xᵗ, its square,
    and their product with X, 2 a² b + 2 a³ + 2 a² b."""
    if optimizer.lower() != "muon":
        return 0
    pairs = ((min(shape), max(shape), count) for shape, count in maps.items())
    return sum(OPTIONS["ns_steps"] * count * (4 * a * a * b + 2 * a**3) for a, b, count in pairs)


def state_bytes(optimizer: str, of_maps: int, others: int, size: int) -> int:
    """Bytes of the optimizer's state for `of_maps` numbers in linear maps of the blocks, and `others`, of `size` bytes;
    that of bfloat16 is float32."""
    of_matrix, of_other = optim.copies(optimizer)
    return max(4, size) * (of_matrix * of_maps + of_other * others)

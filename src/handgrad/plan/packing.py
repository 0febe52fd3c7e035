"""Matrices that stay packed: their bytes, the buffers into which they are unpacked, and how often."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from math import prod

from ..lora import layers_of
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..model.layers.linear import ROWS_OF_PART, Embedding, Linear
from ..model.names import block_of
from ..ops.packed import bytes_per_row

Kinds = Mapping[str, str]  # type of a packed matrix by its name; other tensors hold numbers of the plan's dtype
Shape = tuple[int, int]
TWO_BYTES = {"bfloat16": "BF16", "float16": "F16"}


@lru_cache(maxsize=8)
def matrices(config: ModelConfig) -> dict[str, Shape]:
    """The shape of every matrix of the model, as it is stored, by its name."""
    return {name: (p.shape[0], p.shape[1]) for name, p in GPT(config, device="meta").named_parameters() if p.ndim == 2}


def two_bytes(config: ModelConfig, dtype: str) -> Kinds:
    """The types of a model whose matrices are kept in a dtype of two bytes."""
    return dict.fromkeys(matrices(config), TWO_BYTES[dtype])


def unpacked_kinds(kinds: Kinds, mixed: bool) -> Kinds:
    """Those of the packed matrices that are unpacked to be used: in mixed precision not those in bfloat16."""
    return {name: kind for name, kind in kinds.items() if not mixed or kind != TWO_BYTES["bfloat16"]}


def kinds_of(model: GPT) -> Kinds:
    """The types of a model's packed matrices."""
    names = model.config.table.names
    holders: dict[str, Linear | Embedding] = {path: layer.plain() for path, layer in layers_of(model).items()}
    holders[names["embed"]] = model.embed
    if model.has("positions"):
        holders[names["positions"]] = model.positions
    found = {f"{path}.weight": x.packed.kind for path, x in holders.items() if x.packed is not None}
    return {name: kind for name, kind in found.items() if name in matrices(model.config)}  # a tied head is listed once


def packed_bytes(config: ModelConfig, kinds: Kinds) -> int:
    """Bytes of the packed matrices."""
    shapes = matrices(config)
    return sum(shapes[name][0] * bytes_per_row(shapes[name][1], kind) for name, kind in kinds.items())


def packed_count(config: ModelConfig, kinds: Kinds) -> int:
    """How many numbers the packed matrices hold."""
    return sum(prod(matrices(config)[name]) for name in kinds)


def buffers(config: ModelConfig, kinds: Kinds) -> tuple[int, int]:
    """Numbers in the buffers of a block, which all blocks share, and in that of the head. They do not exist at the same
    time. Experts are unpacked one after the other into the same buffers."""
    in_block: defaultdict[int, Counter[Shape]] = defaultdict(Counter)
    for name in kinds:
        if (i := block_of(name)) is not None and _expert(name) in (None, 0):
            in_block[i][matrices(config)[name]] += 1
    pool: Counter[Shape] = Counter()
    for shapes in in_block.values():
        pool |= shapes
    rows = min(config.n_vocab, ROWS_OF_PART)
    of_block = sum(count * prod(shape) for shape, count in pool.items())
    return of_block, rows * config.d_model if _head(config) in kinds else 0


def uses(config: ModelConfig, kinds: Kinds, groups: int, of_expert: float = 2) -> dict[tuple[str, Shape], float]:
    """How often a step unpacks matrices of each type and shape: those of a block once in each pass, those of an expert
    `of_expert` times, that of the head twice for each of the `groups` of rows; one that is not divided into parts once."""
    found: defaultdict[tuple[str, Shape], float] = defaultdict(float)
    of_head = 2 * groups if config.n_vocab > ROWS_OF_PART else 1
    for name, kind in kinds.items():
        in_block = 2 if _expert(name) is None else of_expert
        found[kind, matrices(config)[name]] += (
            in_block if block_of(name) is not None else of_head * (name == _head(config))
        )
    return {key: count for key, count in found.items() if count}


def uses_of_expert(config: ModelConfig, pieces: int, tokens: int, recompute: bool) -> float:
    """How often a step unpacks a matrix of an expert, on average: in each pass of every piece, of so many tokens, in which a
    token goes to it."""
    k, among = config.experts_per_token or 1, config.n_experts or 1
    return pieces * (3 if recompute else 2) * (1 - (1 - k / among) ** tokens)


def _expert(name: str) -> int | None:
    """The number of the expert that has this matrix."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return None if found is None else int(found[1])


def _head(config: ModelConfig) -> str:
    """The name of the matrix that the head reads."""
    return f"{config.table.names['embed' if config.tied else 'head']}.weight"

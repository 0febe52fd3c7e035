"""Names of layers and parameters in any family: transformer.h.3.attn.c_attn, model.layers.3.self_attn.q_proj. Does not
import torch."""

import re

_IN_BLOCK = re.compile(r"(.*?\.)(\d+)\.(.*)")  # what precedes the number, the number, what follows


def block_of(name: str) -> int | None:
    """The number of the block that a layer or parameter belongs to."""
    found = _IN_BLOCK.fullmatch(name)
    return int(found[2]) if found else None


def without_block(name: str) -> str:
    """transformer.h.3.attn.c_attn → attn.c_attn; a name outside the blocks stays."""
    found = _IN_BLOCK.fullmatch(name)
    return found[3] if found else name


def any_block(name: str) -> str:
    """transformer.h.3.attn.c_attn → transformer.h.*.attn.c_attn"""
    found = _IN_BLOCK.fullmatch(name)
    return f"{found[1]}*.{found[3]}" if found else name


def part_of(name: str) -> str:
    """The part of the network that a parameter belongs to: block 3, final norm, or embeddings and head."""
    block = block_of(name)
    if block is not None:
        return f"block {block}"
    return "final norm" if re.search(r"\bln_f\b|norm", name) else "embeddings and head"

"""Names of layers and parameters in a model: transformer.h.3.attn.c_attn.weight, lm_head. Does not import torch."""

BLOCKS = "transformer.h."


def in_block(block: int | str, layer: str) -> str:
    """3, attn.c_attn → transformer.h.3.attn.c_attn"""
    return f"{BLOCKS}{block}.{layer}"


def block_of(name: str) -> int | None:
    """The number of the block that a layer or parameter belongs to."""
    return int(name.removeprefix(BLOCKS).partition(".")[0]) if name.startswith(BLOCKS) else None


def without_block(name: str) -> str:
    """transformer.h.3.attn.c_attn → attn.c_attn; a name outside the blocks stays."""
    return name.removeprefix(BLOCKS).partition(".")[2] if name.startswith(BLOCKS) else name


def part_of(name: str) -> str:
    """The part of the network that a parameter belongs to: block 3, final norm, or embeddings and head."""
    block = block_of(name)
    if block is not None:
        return f"block {block}"
    return "final norm" if ".ln_f." in f"{name}." else "embeddings and head"

"""The ledger: one check for every equation, number and claim of the paper, and one for every misprint that matters;
and, in `beyond`, checks of the layers that the paper does not have.

Each other file is a section of the paper. A check draws its own shapes and values, computes with `paper/` (or `plan`), and
compares with an oracle of `verify`. `run` is what `handgrad verify` calls.
"""

from . import (
    beyond,
    embedding,
    errata,
    head_backward,
    head_forward,
    identities,
    invariants,
    kv_cache,
    layernorm,
    lora,
    loss,
    multi_head,
    numbers,
    softmax,
    transformer,
)
from .check import CHECKS, Check, run, select

__all__ = [
    "CHECKS", "Check", "beyond", "embedding", "errata", "head_backward", "head_forward", "identities", "invariants",
    "kv_cache", "layernorm", "lora", "loss", "multi_head", "numbers", "run", "select", "softmax", "transformer",
]  # fmt: skip

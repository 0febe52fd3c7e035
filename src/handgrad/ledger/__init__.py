"""The ledger: one check for every equation, number and claim of the paper, and one for every misprint that matters;
and, in the `beyond` files, checks of the layers that the paper does not have.

Each other file is a section of the paper; a check generates random shapes and values, computes with `paper/` (or `plan`) and
compares with an oracle. `run` executes the checks, `select` finds them by id, and `CHECKS` lists them. The ledger uses
autograd through `oracles` and `reference` only, and knows nothing of training or files.
"""

from . import (  # noqa: F401   importing a file registers its checks
    beyond,
    beyond_blocks,
    beyond_conv,
    beyond_ends,
    beyond_example,
    beyond_experts,
    beyond_gated,
    beyond_grouped,
    beyond_preference,
    beyond_rotary,
    beyond_scores,
    embedding,
    errata,
    head_backward,
    head_forward,
    head_properties,
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

__all__ = ["CHECKS", "Check", "run", "select"]

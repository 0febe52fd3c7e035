"""The arguments of every kernel, declared to ctypes: without a declaration it would pass an address as 32 bits."""

import ctypes
from typing import Any

TYPES: dict[str, Any] = {"n": ctypes.c_int64, "x": ctypes.c_double, "p": ctypes.c_void_p}

# One letter per argument: n a size, stride, number or flag; x a double; p an address. In the order of the C function, which
# tests/kernels/test_signatures.py compares. Spaces group a tensor's address with its strides.
ARGUMENTS = {
    **dict.fromkeys(("forward_silu", "forward_gelu_tanh"), "nn pn pn"),
    **dict.fromkeys(("backward_silu", "backward_gelu_tanh"), "nn pn pn pn pn"),
    **dict.fromkeys(("forward_gate_silu", "forward_gate_gelu_tanh"), "nn pn pn pn"),
    **dict.fromkeys(("backward_gate_silu", "backward_gate_gelu_tanh"), "nn pn pn pn pn pn pn"),
    "forward_layer": "nn x pn p p pn p p",
    "forward_rms": "nn x pn p pn p",
    "rebuild_norm": "nn pn p p p p pn pn",
    "backward_norm": "nn pn pn p p n pn",
    "column_sums": "nn pn pn p",
    "rotate": "nnn pnn p p x pnn n",
    "sum_heads": "nnnn pnn pnn",
    "softmax_loss": "nn pn p x p",
    "forward_attention": "n p p nn nnnn xx nn p pnn pnn pnn pnn pnn",
    "backward_attention": "n p p nn nnnn xx nn pnn pnn pnn pnn pnn pnn pnn pnn pnn",
    "product": "nnn pnn pnn p pn n",
    "mixed_product": "nnn pnnn pnnn n pnnn pnnn p pnn n",
    "packed_product": "nnnn pn p pn",
    "packed_unpack": "nn p pn",
    "rounded_product": "nnnn pn p pn",
    "few_rows": "nnn pn pn pn",
    "few_rows_in_out": "nnn pn pn pn",
    "attend_tokens": "nnnnnnn xx p p pnn pnn pnn pnn",
    "token_blocks": "n p n p p p p",
}
# These return 0, NO_MEMORY or WRONG_TABLE (common.h), the others nothing.
WITH_STATUS = (
    "softmax_loss", "forward_attention", "backward_attention", "product", "mixed_product", "rounded_product", "few_rows",
    "attend_tokens", "token_blocks",
)  # fmt: skip


def declared(library: ctypes.CDLL, name: str) -> Any:
    """The kernel of this name, which is hg_name in C."""
    function = library[f"hg_{name}"]
    function.argtypes = [TYPES[letter] for letter in ARGUMENTS[name].replace(" ", "")]
    function.restype = ctypes.c_int if name in WITH_STATUS else None
    return function

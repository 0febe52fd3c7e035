"""The types in which weights can be written to a GGUF file, and the rounding to them.

The `gguf` package rounds to the older types, in blocks of 32; `k_quants` to those of 256. A matrix whose rows are not a
multiple of the block is written in a type of a smaller block with as many bits or more, as llama.cpp does.
"""

import torch
from torch import Tensor

from ..errors import HandgradError, option
from . import k_quants

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EXPERTS = "MXFP4"  # of the experts' matrices; the others in Q8_0
TYPES = (*FLOATS, "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", EXPERTS)
MIXTURE = "Q4_K_M"  # Q4_K, and Q6_K where the loss suffers most
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 14, MIXTURE: 15, "Q5_K": 16,
    "Q6_K": 18, "BF16": 32, EXPERTS: 38,
}  # fmt: skip
_NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # blocks of 32
_LARGEST = torch.finfo(torch.float16).max
_NUMBERS = 1 << 22  # rounded at a time


def check_type(name: str) -> str:
    """The type that --type names. Raises if it cannot be written."""
    kind = name.upper()
    if kind not in (*TYPES, MIXTURE):
        raise HandgradError(f"{option('type', name)}: weights can be written as {', '.join((*TYPES, MIXTURE))}")
    return kind


def type_for(name: str, n_blocks: int, shape: tuple[int, ...], wanted: str, tied: bool) -> str:
    """The type of the tensor `name` in a file of the type `wanted`. Vectors, those of experts in one tensor as well, stay in
    float32, and so do the few matrices that llama.cpp never rounds."""
    *of_block, layer, part = name.split(".")
    if len(shape) == 1 or part == "bias" or layer in ("position_embd", "ffn_gate_inp", "conv"):
        return "F32"
    kind = wanted
    if wanted == MIXTURE:
        kind = _of_mixture(layer, int(of_block[1]) if of_block else -1, n_blocks, tied)
    if wanted == EXPERTS and not layer.endswith("_exps"):
        kind = "Q8_0"
    if kind in K_QUANTS and shape[-1] % k_quants.BLOCK:
        kind = _NARROWER[kind]
    return "F16" if kind not in FLOATS and shape[-1] % 32 else kind


def _of_mixture(layer: str, block: int, n_blocks: int, tied: bool) -> str:
    """Q6_K for the head, and for values and the contraction in the first and the last eighth of the blocks and every third
    between them."""
    if layer == "output" or (layer == "token_embd" and tied):
        return "Q6_K"
    eighth = n_blocks // 8
    chosen = block < eighth or block >= 7 * n_blocks // 8 or (block - eighth) % 3 == 2
    return "Q6_K" if layer.removesuffix("_exps") in ("attn_v", "ffn_down") and chosen else "Q4_K"


def packed_bytes(shape: tuple[int, ...], kind: str) -> int:
    """The size of a tensor of this type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return torch.Size(shape).numel() // block * size


def pack(w: Tensor, kind: str, name: str) -> Tensor:
    """Round (…, n) to a type: the packed rows (rows, bytes) as uint8. Messages name the tensor."""
    rows = w.reshape(-1, w.shape[-1])
    parts = torch.split(rows, max(1, _NUMBERS // rows.shape[1]))
    return torch.cat([_pack(part, kind, name) for part in parts])


def _pack(rows: Tensor, kind: str, name: str) -> Tensor:
    found = rows.to(torch.float32)
    largest = float(found.abs().max())
    if not largest < torch.inf:
        raise HandgradError(f"{name} has values that are not finite: use an earlier checkpoint")
    if largest > _LARGEST and kind not in ("F32", "BF16", EXPERTS):
        raise HandgradError(
            f"{name} has values up to {largest:.3g}, above float16's: give {option('type', 'BF16')} or F32"
        )
    if kind in K_QUANTS:
        return k_quants.quantize(found, kind)
    if kind in FLOATS:
        return found.to(FLOATS[kind]).contiguous().view(torch.uint8)
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.quantize(found.contiguous().numpy(), GGMLQuantizationType[kind]))

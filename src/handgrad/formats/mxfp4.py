"""The experts of gpt-oss's published files, in MXFP4: two tensors for each stack of matrices.

    gate_up_proj_blocks (E, 2f, d/32, 16), down_proj_blocks (E, d, f/32, 16)    bytes of two floats of 4 bits, the low first
    the same with _scales, without the last size                                bytes e, of groups of 32: 2^(e − 127)

They are unpacked to bfloat16, which holds them exactly.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..checks import check_memory
from ..errors import HandgradError
from ..files.tensors import Header
from ..ops import packed

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32


def unpacked_headers(headers: Mapping[str, Header]) -> dict[str, Header]:
    """The headers of the tensors that those in MXFP4 are unpacked to. Raise unless shapes and dtypes belong together."""
    found = {name: header for name, header in headers.items() if not name.endswith((_BLOCKS, _SCALES))}
    total = 0
    for name, header in headers.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS not in headers:
            raise HandgradError(f"{header.file}: {name} has no tensor of blocks")
        if not name.endswith(_BLOCKS):
            continue
        whole = name.removesuffix(_BLOCKS)
        scales = headers.get(whole + _SCALES)
        if scales is None or whole in headers:
            problem = "has no tensor of scales" if scales is None else f"is in the files as {whole} too"
            raise HandgradError(f"{header.file}: {name} {problem}")
        if len(header.shape) != 4 or header.shape[3] != _GROUP // 2 or scales.shape != header.shape[:3]:
            raise HandgradError(
                f"{header.file}: {name} has shape {header.shape} and its scales {scales.shape}; expected (experts, rows,"
                f" groups, {_GROUP // 2}) and (experts, rows, groups)"
            )
        if {header.dtype, scales.dtype} != {torch.uint8}:
            raise HandgradError(
                f"{header.file}: {name} and its scales hold {header.dtype} and {scales.dtype}, not bytes"
            )
        experts, rows, groups, _ = header.shape
        found[whole] = header._replace(shape=(experts, groups * _GROUP, rows), dtype=torch.bfloat16)
        total += 2 * experts * rows * groups * _GROUP
    if total:
        check_memory(total, "the unpacked experts need", "free some, or use the model's GGUF file with packed=True")
    return found


def unpacked(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """All tensors, those in MXFP4 unpacked when it is their turn: (E, f_in, f_out) in bfloat16, as other files of gpt-oss
    have them."""
    for name, x in tensors.items():
        if name.endswith(_BLOCKS):
            whole = name.removesuffix(_BLOCKS)
            yield whole, _unpack(x, tensors[whole + _SCALES]).transpose(1, 2)
        elif not name.endswith(_SCALES):
            yield name, x


def _unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """(E, rows, groups, 16), (E, rows, groups) → (E, rows, 32 groups)"""
    experts, rows, groups, _ = blocks.shape
    out = torch.empty(experts, rows, groups * _GROUP, dtype=torch.bfloat16)
    for e in range(experts):
        q = torch.stack((blocks[e] & 15, blocks[e] >> 4), -1).flatten(2)
        low, high = q.chunk(2, 2)  # as GGUF has them
        data = torch.cat((scales[e][..., None], low | high << 4), 2)
        packed.unpack(data.flatten(1), "MXFP4", out[e])
    return out

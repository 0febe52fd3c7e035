"""safetensors files: headers read within limits, tensors mapped into memory."""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import HandgradError, MissingError, shown
from .reading import MB, open_regular, parse_json

_HEADER_BYTES = 4 * MB  # of a safetensors file: 40,000 tensors


_STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Header(NamedTuple):
    """What a safetensors file says of a tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_headers(file: Path) -> dict[str, Header]:
    """Names, dtypes and shapes of a file's tensors, without the tensors. MissingError if there is no such file."""
    with open_regular(file) as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > _HEADER_BYTES:
            raise HandgradError(f"{file} cannot be read: its header would have {size:,} bytes")
        raw = opened.read(size)
    if len(raw) < size:
        raise HandgradError(f"{file} cannot be read: it ends within its header")
    try:
        said = parse_json(raw.decode(), file)
    except UnicodeDecodeError:
        raise HandgradError(f"{file} cannot be read: its header is not text") from None
    headers = {}
    for name, facts in said.items() if isinstance(said, dict) else ():
        if name == "__metadata__":
            continue
        dtype, shape = (facts.get("dtype"), facts.get("shape")) if isinstance(facts, dict) else (None, None)
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise HandgradError(f"{file} cannot be read: its header gives no shape for {shown(name)}")
        if not isinstance(dtype, str) or dtype not in _STORED:
            raise HandgradError(f"{file}: {shown(name)} is stored as {shown(dtype)}, which is not supported")
        headers[name] = Header(file, _STORED[dtype], tuple(shape))
    return headers


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory."""
    try:
        read_headers(file)  # within limits, and a regular file: the library would wait for a pipe
        with safe_open(file, "pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except MissingError:
        raise missing_weights(file) from None
    except (SafetensorError, OSError) as reason:
        raise HandgradError(f"{file} cannot be read: {reason}") from None


def missing_weights(file: Path) -> HandgradError:
    unsafe = sorted(other.name for other in file.parent.glob("*.bin"))
    why = "weights are missing"
    if unsafe:
        why = f"{unsafe[0]} could run code when it is read; convert it to safetensors, with save_pretrained"
    return MissingError(f"{file} does not exist: {why}")

"""safetensors files: headers of bounded size, memory-mapped tensors."""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import HandgradError, MissingError, shown
from .reading import MB, open_regular, parse_json

_HEADER_BYTES = 4 * MB  # maximum size of a header: about 40,000 tensors

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Header(NamedTuple):
    """The header entry of a tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_headers(file: Path) -> dict[str, Header]:
    """The names, dtypes and shapes of the tensors in a file, without their data. Raises MissingError if there is no file."""
    with open_regular(file) as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > _HEADER_BYTES:
            raise HandgradError(
                f"{file} cannot be read: its header has {size:,} bytes, the maximum is {_HEADER_BYTES:,}"
            )
        raw = opened.read(size)
    if len(raw) < size:
        raise HandgradError(f"{file} cannot be read: it ends inside its header")
    try:
        entries = parse_json(raw.decode(), file)
    except UnicodeDecodeError:
        raise HandgradError(f"{file} cannot be read: its header is not text") from None
    headers = {}
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if name == "__metadata__":
            continue
        dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise HandgradError(f"{file} cannot be read: its header gives no shape for {shown(name)}")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise HandgradError(f"{file}: {shown(name)} is stored as {shown(dtype)}, which is not supported")
        headers[name] = Header(file, _DTYPES[dtype], tuple(shape))
    return headers


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, memory-mapped."""
    try:
        read_headers(file)  # checks limits, and that the library does not block on a pipe
        with safe_open(file, "pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except MissingError:
        raise missing_weights(file) from None
    except (SafetensorError, OSError) as reason:
        raise HandgradError(f"{file} cannot be read: {reason}") from None


def missing_weights(file: Path) -> HandgradError:
    """The error for a missing safetensors file; it names a pickle file next to it, which is not read."""
    unsafe = sorted(other.name for other in file.parent.glob("*.bin"))
    why = "weights are missing"
    if unsafe:
        why = f"{unsafe[0]} is a pickle file, which can run code when read; convert it to safetensors, with save_pretrained"
    return MissingError(f"{file} does not exist: {why}")

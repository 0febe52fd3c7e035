"""Write a GGUF file: metadata, the table of tensors, then one tensor after another, so that memory holds one at a time."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..errors import HandgradError, option
from ..files.atomic import check_writable, new_file, rename_onto
from .file import is_gguf
from .quantize import packed_bytes

REMEDY = f"write a directory instead, with {option('out')}"
BOOL, STRING, ARRAY, UINT32, INT32, FLOAT32 = 7, 8, 9, 4, 5, 6  # types of metadata


class Value(NamedTuple):
    """Metadata: what an entry holds, its type, and the type of an array's elements."""

    content: Any
    kind: int
    of: int | None = None


class Planned(NamedTuple):
    """A tensor to write; `packed` makes its bytes, (rows, bytes of a row) as uint8."""

    kind: str
    shape: tuple[int, ...]  # in torch's order
    packed: Callable[[], Tensor]


def typed(content: Any) -> Value:
    """Metadata in the types that llama.cpp expects: unsigned integers, float32, and arrays of signed integers."""
    if isinstance(content, list):
        first = content[0] if content else ""
        kinds = {str: STRING, int: INT32, float: FLOAT32, bool: BOOL}
        return Value(content, ARRAY, kinds[type(first)])
    if isinstance(content, float):
        return Value(float(np.float32(content)), FLOAT32)  # as the file holds it
    return Value(content, {bool: BOOL, str: STRING, int: UINT32}[type(content)])


def check_new(path: Path) -> None:
    """Raise if the file exists or cannot be written."""
    if path.exists() and not path.is_dir():
        raise HandgradError(f"{path} exists already: choose another name")
    check_writable(path)
    if not is_gguf(path):
        raise HandgradError(f"{path}: the name of a GGUF file ends with .gguf")


def write(path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, Planned]) -> None:
    """Write a new file atomically. The metadata include general.architecture."""
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    class Writer(GGUFWriter):
        """The package refuses arrays without elements, as the merges of a vocabulary of bytes."""

        def _pack_val(
            self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
        ) -> bytes:
            if vtype is not GGUFValueType.ARRAY or len(val):
                return super()._pack_val(val, vtype, add_vtype, sub_type)
            return self._pack("I", vtype) + self._pack("I", sub_type or STRING) + self._pack("Q", 0)

    check_new(path)
    with new_file(path.resolve().parent) as partial:
        writer = Writer(partial.name, metadata["general.architecture"].content)
        try:
            for key, (content, kind, of) in metadata.items():
                if key != "general.architecture":  # the writer has it already
                    element = None if of is None else GGUFValueType(of)
                    writer.add_key_value(key, content, GGUFValueType(kind), element)
            for name, (tensor_kind, shape, _) in tensors.items():
                size, known = packed_bytes(shape, tensor_kind), GGMLQuantizationType[tensor_kind]
                writer.add_tensor_info(name, shape, np.dtype(np.float32), size, known)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            _write_tensors(writer.write_tensor_data, list(tensors.values()), path)
        finally:
            writer.close()
        check_new(path)  # it may have been made meanwhile
        rename_onto(partial, path.resolve())


def _write_tensors(write_one: Callable[[Any], None], tensors: Sequence[Planned], path: Path) -> None:
    for tensor in tensors:
        packed = tensor.packed().contiguous().numpy()
        try:
            write_one(packed)
        except OSError as reason:  # numpy's has no reason of the system
            why = reason.strerror or "the disk is full"
            raise HandgradError(f"cannot write {path}: {why.lower()}; nothing was written") from None

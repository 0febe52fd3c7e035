"""GGUF files: metadata and memory-mapped tensors, packed as they are stored.

    magic "GGUF" | version u32 | number of tensors u64 | number of metadata entries u64
    metadata:     name, type u32, value
    tensor table: name, number of dimensions u32, dimensions u64 (innermost first), type u32, offset u64
    padding to the alignment | tensor data

A string is a length (u64) and UTF-8. The `gguf` package knows the tensor types and unpacks them. The header is parsed here:
the package's reader trusts every count in the file, and makes an array object for every string (seconds for a vocabulary).
Here every count is compared with a maximum and with the bytes that are left before anything of that size is made.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isfinite, prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import HandgradError, shown
from ..files.reading import MB, open_regular

HEADER_BYTES = 48 * MB  # maximum size of metadata and tensor table: a large vocabulary with its merges has 15
STRING_BYTES = 4 * MB
MAX_VALUES = 1 << 21  # elements of all metadata arrays together: a large vocabulary with its merges has 1.3 million
MAX_ENTRIES = 1 << 16  # tensors; metadata entries
MAX_DIMENSIONS = 4
ALIGNMENTS = tuple(1 << i for i in range(3, 17))
DAMAGED = "the file is damaged or not complete: download it again"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Stored:
    """A tensor as it is stored. `kind` is its type, such as "Q4_1"; `shape` is in torch's order, (f_out, f_in) for a matrix;
    `data` holds its bytes, (rows, bytes of a row) as uint8."""

    kind: str
    shape: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class GGUFFile:
    """`tensors` are views of the mapped file; writing to them does not change the file. `kinds` are the types of the
    metadata, and of the elements of arrays."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]
    kinds: dict[str, tuple[int, int | None]] = field(default_factory=dict)

    def text(self, key: str, default: str | None = None) -> str:
        """The string under `key`. Raises if it is missing and there is no default."""
        value = self._value(key, default, "a string")
        return value if isinstance(value, str) else self._wrong(key, "a string")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default, "an integer")
        return value if isinstance(value, int) and not isinstance(value, bool) else self._wrong(key, "an integer")

    def number(self, key: str, default: float | None = None) -> float:
        """The finite number under `key`."""
        value = self._value(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            self._wrong(key, "a finite number")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default, "true or false")
        return value if isinstance(value, bool) else self._wrong(key, "true or false")

    def array(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """The array under `key`, of elements of the type `kind`."""
        value = self._value(key, default, "an array")
        if not isinstance(value, list) or (value and type(value[0]) is not kind):
            self._wrong(key, f"an array of {kind.__name__}")
        return value

    def _value(self, key: str, default: Any, kind: str) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise HandgradError(f"{self.path} has no {key} in its metadata, {kind}: convert the model again")
        return value

    def _wrong(self, key: str, kind: str) -> NoReturn:
        raise HandgradError(
            f"{self.path}: {key} is {shown(self.metadata.get(key))}, not {kind}: convert the model again"
        )


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file rather than a directory."""
    return path.suffix == ".gguf"


def open_gguf(path: str | Path) -> GGUFFile:
    """Read the metadata and map the tensors of a GGUF file. Raises MissingError if it does not exist."""
    path = Path(path)
    with open_regular(path) as file:
        magic = file.read(len(_MAGIC))
        if magic != _MAGIC:
            what = f"begins with {shown(magic.decode('latin1'))}, not with GGUF" if magic else "is empty"
            raise HandgradError(f"cannot read {path}: it {what}; give a GGUF file")
        try:
            # a private mapping: torch wants writable memory, and the file must never change
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as reason:
            raise HandgradError(f"cannot read {path}: {(reason.strerror or str(reason)).lower()}") from None
    header = _Header(path, mapped)
    metadata, table = header.read()
    return GGUFFile(path, metadata, _map_tensors(path, mapped, header.at, metadata, table), header.kinds)


def dequantize(stored: Stored) -> Tensor:
    """Unpack a tensor to float32. Every type that the `gguf` package can unpack."""
    from gguf import GGMLQuantizationType, quants

    if stored.kind == "F32":
        return stored.data.view(torch.float32).reshape(stored.shape).clone()
    try:
        with np.errstate(all="ignore"):  # the scale of a damaged block may be NaN
            unpacked = quants.dequantize(stored.data.numpy(), GGMLQuantizationType[stored.kind])
    except NotImplementedError:
        raise HandgradError(
            f"tensors of type {stored.kind} cannot be unpacked: use a file with other types, such as Q8_0 or Q4_K"
        ) from None
    # a copy: torch aligns its memory to cache lines, which numpy does not
    return torch.empty(stored.shape).copy_(torch.from_numpy(unpacked).reshape(stored.shape))


@cache
def can_dequantize(kind: str) -> bool:
    """Whether `dequantize` unpacks tensors of this type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    try:
        dequantize(Stored(kind, (1, numbers), torch.zeros(1, size, dtype=torch.uint8)))
    except HandgradError:
        return False
    return True


@dataclass(frozen=True)
class _Entry:
    """A row of the tensor table; `shape` in torch's order, `offset` from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Header:
    """Parse from the position `at` on; every read checks that the file has the bytes."""

    def __init__(self, path: Path, mapped: mmap.mmap):
        self.path = path
        self.mapped = mapped
        self.at = len(_MAGIC)
        self.end = min(len(mapped), HEADER_BYTES)
        self.values = 0  # elements of arrays read so far
        self.kinds: dict[str, tuple[int, int | None]] = {}

    def read(self) -> tuple[dict[str, Any], list[_Entry]]:
        n_tensors, n_entries = self._counts()
        metadata: dict[str, Any] = {}
        for _ in range(n_entries):
            name = self._string("the name of a metadata entry")
            if name in metadata:
                self._fail(f"the metadata has two entries {shown(name)}", "convert the model again")
            self.kinds[name] = self._kinds_here()
            metadata[name] = self._value(shown(name))
        split = metadata.get("split.count")
        if type(split) is int and split > 1:
            self._fail(f"it is one of {split} parts of a model", "join them with llama-gguf-split --merge")
        table = [self._entry() for _ in range(n_tensors)]
        return metadata, table

    def _counts(self) -> tuple[int, int]:
        (version,) = self._unpack("I", "the version")
        if version not in _VERSIONS:
            if version.to_bytes(4, "big")[0] in _VERSIONS and not version & 0xFFFF:
                self._fail("its numbers are big-endian", "convert it with gguf-convert-endian FILE little")
            self._fail(f"GGUF version {version} is not supported, versions 2 and 3 are", "convert the model again")
        counts = self._unpack("QQ", "the counts")
        for what, n in zip(("tensors", "metadata entries"), counts, strict=True):
            if n > MAX_ENTRIES:
                self._fail(f"it claims {n:,} {what}; the maximum is {MAX_ENTRIES:,}", DAMAGED)
        return counts[0], counts[1]

    def _kinds_here(self) -> tuple[int, int | None]:
        """The type of the value that begins here, if the file has it, and that of an array's elements."""
        kind, of = struct.unpack("<II", self.mapped[self.at : self.at + 8].ljust(8, b"\0"))
        return kind, of if kind == _ARRAY else None

    def _value(self, name: str) -> Any:
        (kind,) = self._unpack("I", name)
        if kind == _STRING:
            return self._string(name)
        if kind == _ARRAY:
            return self._array(name)
        if kind not in _SCALARS:
            self._fail(f"{name} has the unknown type {kind}", DAMAGED)
        return self._unpack(_SCALARS[kind], name)[0]

    def _array(self, name: str) -> list[Any]:
        kind, n = self._unpack("IQ", name)
        self.values += n
        if self.values > MAX_VALUES:
            self._fail(f"the arrays up to {name} have more than {MAX_VALUES:,} elements", DAMAGED)
        if kind == _STRING:
            return self._strings(name, n)
        if kind not in _SCALARS:
            what = "arrays" if kind == _ARRAY else f"the unknown type {kind}"
            self._fail(f"{name} is an array of {what}, which is not supported", "convert the model again")
        return list(self._unpack(f"{n}{_SCALARS[kind]}", name))

    def _entry(self) -> _Entry:
        name = self._string("the name of a tensor")
        label = f"tensor {shown(name)}"
        (n,) = self._unpack("I", label)
        if not 1 <= n <= MAX_DIMENSIONS:
            self._fail(f"{label} has {n:,} dimensions, not 1 to {MAX_DIMENSIONS}", DAMAGED)
        dimensions = self._unpack(f"{n}Q", label)
        if 0 in dimensions:
            self._fail(f"{label} has a dimension of 0", DAMAGED)
        kind, offset = self._unpack("IQ", label)
        return _Entry(name, dimensions[::-1], kind, offset)

    def _string(self, what: str) -> str:
        (length,) = self._unpack("Q", what)
        if length > STRING_BYTES:
            self._fail(f"{what} claims {length:,} bytes; the maximum is {STRING_BYTES:,}", DAMAGED)
        start = self._advance(length, what)
        try:
            return self.mapped[start : self.at].decode()
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8 text", DAMAGED)

    def _strings(self, what: str, n: int) -> list[str]:
        """n strings, twice as fast as `_string`, which reads the wrong one again to raise its error."""
        length_at, mapped, last = struct.Struct("<Q").unpack_from, self.mapped, self.end - 8
        found: list[str] = []
        at = self.at
        try:
            while len(found) < n and at <= last:
                (length,) = length_at(mapped, at)
                start, at = at + 8, at + 8 + length
                if length > STRING_BYTES or at > self.end:
                    break  # self.at is still before this string
                found.append(mapped[start:at].decode())
                self.at = at
        except UnicodeDecodeError:
            pass
        if len(found) < n:
            self._string(what)
        return found

    def _unpack(self, format: str, what: str) -> tuple[Any, ...]:
        start = self._advance(struct.calcsize(f"<{format}"), what)
        return struct.unpack_from(f"<{format}", self.mapped, start)

    def _advance(self, n: int, what: str) -> int:
        """Move past n bytes; returns the position before them."""
        start = self.at
        if n > self.end - start:
            why = "ends" if self.end == len(self.mapped) else f"has a header of more than {HEADER_BYTES / MB:.0f} MB"
            self._fail(f"it {why} at {what}, which needs {n:,} bytes", DAMAGED)
        self.at += n
        return start

    def _fail(self, problem: str, remedy: str) -> NoReturn:
        raise HandgradError(f"cannot read {self.path}: {problem}; {remedy}")


def _map_tensors(
    path: Path, mapped: mmap.mmap, header_end: int, metadata: Mapping[str, Any], table: list[_Entry]
) -> dict[str, Stored]:
    """View the bytes of every tensor: inside the file, aligned, without overlap."""
    from gguf import GGML_QUANT_SIZES

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment not in ALIGNMENTS:
        raise HandgradError(
            f"cannot read {path}: general.alignment is {shown(alignment)}, not a power of 2 from {ALIGNMENTS[0]} to"
            f" {ALIGNMENTS[-1]}; {DAMAGED}"
        )
    start = -(-header_end // alignment) * alignment
    content = torch.frombuffer(mapped, dtype=torch.uint8)
    sizes = {kind.value: (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}
    tensors: dict[str, Stored] = {}
    free = 0  # first byte after the tensors checked so far
    for entry in sorted(table, key=lambda entry: entry.offset):
        problem = ""
        name, block, block_bytes = sizes.get(entry.kind, ("", 1, 1))
        *outer, f_in = entry.shape
        row_bytes = f_in // block * block_bytes
        n_bytes = prod(outer) * row_bytes
        if not name:
            problem = f"has the unknown type {entry.kind}"
        elif entry.name in tensors:
            problem = "is in the file twice"
        elif f_in % block:
            problem = f"has rows of {f_in:,} numbers; {name} stores blocks of {block}"
        elif entry.offset % alignment:
            problem = f"begins at byte {entry.offset:,} of the data, not at a multiple of {alignment}"
        elif start + entry.offset + n_bytes > len(mapped):
            problem = f"ends at byte {start + entry.offset + n_bytes:,} of a file of {len(mapped):,} bytes"
        elif entry.offset < free:
            problem = "overlaps another tensor"
        if problem:
            raise HandgradError(f"cannot read {path}: tensor {shown(entry.name)} {problem}; {DAMAGED}")
        free = entry.offset + n_bytes
        data = content[start + entry.offset : start + free].view(-1, row_bytes)
        tensors[entry.name] = Stored(name, entry.shape, data)
    return {entry.name: tensors[entry.name] for entry in table}

"""GGUF files: metadata and tensors as the `gguf` package writes them, and damaged files."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from handgrad.errors import HandgradError, MissingError
from handgrad.gguf.file import MAX_VALUES, dequantize, open_gguf
from tiny_gguf import finish, write_gguf

UNPACKED = sorted({kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"})
METADATA = {
    "a.u8": (GGUFValueType.UINT8, 255), "a.i8": (GGUFValueType.INT8, -128), "a.u16": (GGUFValueType.UINT16, 65535),
    "a.i16": (GGUFValueType.INT16, -2), "a.u32": (GGUFValueType.UINT32, 7), "a.i32": (GGUFValueType.INT32, -7),
    "a.u64": (GGUFValueType.UINT64, 2**63), "a.i64": (GGUFValueType.INT64, -(2**63)), "a.f32": (GGUFValueType.FLOAT32, 0.5),
    "a.f64": (GGUFValueType.FLOAT64, 1e-300), "a.bool": (GGUFValueType.BOOL, True),
    "a.text": (GGUFValueType.STRING, "naïve 東 \0 🙂"),
}  # fmt: skip


def write(path: Path, **options: object) -> Path:
    """A file with every kind of metadata and tensors of odd shapes."""
    writer = GGUFWriter(path, "llama", **options)  # type: ignore[arg-type]
    for key, (kind, value) in METADATA.items():
        writer.add_key_value(key, value, kind)
    writer.add_array("a.texts", ["x", "", "é"])
    writer.add_array("a.integers", [1, -2, 3])
    writer.add_array("a.floats", [0.25, -1.5])
    values = np.random.default_rng(0)
    for name, value in {"v": values.normal(size=7), "m": values.normal(size=(3, 5))}.items():
        writer.add_tensor(name, value.astype(np.float32))
    packed = gguf.quants.quantize(values.normal(size=(3, 64)).astype(np.float32), GGMLQuantizationType.Q4_1)
    writer.add_tensor("packed", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    finish(writer)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_metadata_become_python_values(small: Path) -> None:
    file = open_gguf(small)
    for key, (_, value) in METADATA.items():
        assert file.metadata[key] == value and type(file.metadata[key]) is type(value), key
    assert file.metadata["a.texts"] == ["x", "", "é"]
    assert file.metadata["a.integers"] == [1, -2, 3] and file.metadata["a.floats"] == [0.25, -1.5]
    assert file.text("a.text") == METADATA["a.text"][1] and file.integer("a.i8") == -128 and file.boolean("a.bool")
    assert file.number("a.f32") == 0.5 and file.number("a.u8") == 255 and file.array("a.texts", str)[2] == "é"
    assert file.text("b", "default") == "default"


def test_metadata_of_another_kind_are_named(small: Path) -> None:
    file = open_gguf(small)
    for call, key, message in (
        (file.text, "a.u8", "a.u8 is 255, not a string"),
        (file.integer, "a.bool", "a.bool is true, not an integer"),
        (file.number, "a.text", "not a finite number"),
        (file.boolean, "a.u8", "not true or false"),
        (file.integer, "llama.block_count", "has no llama.block_count in its metadata, an integer"),
    ):
        with pytest.raises(HandgradError, match=message):
            call(key)  # type: ignore[operator]
    with pytest.raises(HandgradError, match=r"a.integers is .*, not an array of str"):
        file.array("a.integers", str)


def test_tensors_equal_those_of_the_packages_reader(small: Path) -> None:
    file = open_gguf(small)
    theirs = {tensor.name: tensor for tensor in GGUFReader(small).tensors}
    assert list(file.tensors) == list(theirs)
    for name, stored in file.tensors.items():
        tensor = theirs[name]
        assert stored.kind == tensor.tensor_type.name and stored.shape == tuple(map(int, tensor.shape[::-1]))
        assert stored.data.dtype == torch.uint8 and stored.data.numpy().tobytes() == tensor.data.tobytes()
        assert len(stored.data) == int(np.prod(stored.shape[:-1]))
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(stored.shape)
        assert torch.equal(dequantize(stored), torch.from_numpy(expected.copy()))


def test_writing_to_a_tensor_does_not_change_the_file(small: Path) -> None:
    before = small.read_bytes()
    for stored in open_gguf(small).tensors.values():
        stored.data.fill_(7)
        dequantize(stored).zero_()
    assert small.read_bytes() == before


@pytest.mark.parametrize("kind", UNPACKED)
def test_every_type_that_the_package_unpacks(kind: str, tmp_path: Path) -> None:
    which = GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[which]
    raw = np.random.default_rng(1).integers(0, 256, (3, 2 * size), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("m", raw, raw_dtype=which)
    finish(writer)
    stored = open_gguf(tmp_path / "m.gguf").tensors["m"]
    assert stored.kind == kind and stored.shape == (3, 2 * block) and tuple(stored.data.shape) == raw.shape
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, which)
    assert np.array_equal(dequantize(stored).numpy(), expected.reshape(stored.shape), equal_nan=True)


def test_a_type_that_cannot_be_unpacked_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"m": np.zeros((2, 4), np.int8)})
    stored = open_gguf(path).tensors["m"]
    assert stored.kind == "I8"
    with pytest.raises(HandgradError, match="type I8 cannot be unpacked"):
        dequantize(stored)


# ── damaged files ───────────────────────────────────────────────────────────────────────────────────────────────────


def header(*, tensors: int = 0, entries: bytes = b"", n_entries: int = 0, version: int = 3, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, n_entries) + entries + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dimensions: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    n = len(dimensions)
    return text(name) + struct.pack(f"<I{n}QIQ", n, *dimensions, kind, offset)


SPLIT = entry("split.count", 2, struct.pack("<H", 3))
DATA = bytes(256)
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "another file": (b"PK\3\4" + DATA, "not with GGUF; give a GGUF file"),
    "cut in the magic": (b"GG", "not with GGUF"),
    "cut in the version": (b"GGUF\3", "ends at the version, which needs 4 bytes"),
    "version 1": (header(version=1), "version 1 is not supported"),
    "version 99": (header(version=99), "version 99 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian; convert it with gguf-convert-endian"),
    "too many tensors": (header(tensors=2**63), "claims 9,223,372,036,854,775,808 tensors; the maximum is 65,536"),
    "too many entries": (header(n_entries=2**40), "claims 1,099,511,627,776 metadata entries"),
    "fewer entries than claimed": (header(n_entries=3, entries=SPLIT), "ends at"),
    "a name of any length": (header(n_entries=1, entries=struct.pack("<Q", 2**64 - 1)), "maximum is 4,000,000"),
    "a long name": (header(n_entries=1, entries=struct.pack("<Q", 3_000_000)), "ends at the name of a metadata entry"),
    "a name that is not text": (header(n_entries=1, entries=struct.pack("<Q", 1) + b"\xff"), "not UTF-8"),
    "an unknown type": (header(n_entries=1, entries=entry("a", 77, b"")), '"a" has the unknown type 77'),
    "an array of any length": (
        header(n_entries=1, entries=entry("a", 9, struct.pack("<IQ", 0, 2**60))), f"more than {MAX_VALUES:,} elements",
    ),
    "a long array": (header(n_entries=1, entries=entry("a", 9, struct.pack("<IQ", 12, 10**6))), "needs 8,000,000 bytes"),
    "a text that is cut": (
        header(n_entries=1, entries=entry("a", 9, struct.pack("<IQ", 8, 3) + text("x") * 2)), 'ends at "a", which needs 8',
    ),
    "a text of any length": (
        header(n_entries=1, entries=entry("a", 9, struct.pack("<IQQ", 8, 1, 2**63) + DATA)), '"a" claims 9,223,',
    ),
    "a text that is not text": (
        header(n_entries=1, entries=entry("a", 9, struct.pack("<IQQ", 8, 1, 1) + b"\xff")), '"a" is not UTF-8 text',
    ),
    "an array of arrays": (header(n_entries=1, entries=entry("a", 9, struct.pack("<IQ", 9, 10))), "an array of arrays"),
    "two equal names": (header(n_entries=2, entries=SPLIT.replace(b"split", b"other") * 2), "two entries \"other.count\""),
    "a part of a model": (header(n_entries=1, entries=SPLIT), "one of 3 parts .* llama-gguf-split --merge"),
    "alignment 0": (
        header(n_entries=1, entries=entry("general.alignment", 4, struct.pack("<I", 0))), "general.alignment is 0",
    ),
    "a huge alignment": (
        header(n_entries=1, entries=entry("general.alignment", 10, struct.pack("<Q", 2**63))), "not a power of 2 from 8",
    ),
    "alignment as text": (header(n_entries=1, entries=entry("general.alignment", 8, text("32"))), "alignment is \"32\""),
    "no dimensions": (header(tensors=1, rest=tensor("t", ())), "has 0 dimensions, not 1 to 4"),
    "many dimensions": (header(tensors=1, rest=text("t") + struct.pack("<I", 2**32 - 1)), "has 4,294,967,295 dimensions"),
    "a dimension of 0": (header(tensors=1, rest=tensor("t", (4, 0)) + DATA), "a dimension of 0"),
    "huge dimensions": (header(tensors=1, rest=tensor("t", (2**62,) * 4) + DATA), "\"t\" ends at byte"),
    "data outside of the file": (header(tensors=1, rest=tensor("t", (4,), 0, 2**40) + DATA), "ends at byte 1,099"),
    "cut data": (header(tensors=1, rest=tensor("t", (4096,)) + DATA), "of a file of"),
    "an unknown tensor type": (header(tensors=1, rest=tensor("t", (4,), 4) + DATA), "\"t\" has the unknown type 4"),
    "half a block": (header(tensors=1, rest=tensor("t", (33,), 3) + DATA), "rows of 33 numbers; Q4_1 stores blocks of 32"),
    "not aligned": (header(tensors=1, rest=tensor("t", (4,), 0, 4) + DATA), "not at a multiple of 32"),
    "the same name twice": (header(tensors=2, rest=tensor("t", (4,)) + tensor("t", (4,), 0, 32) + DATA), "twice"),
    "overlap": (header(tensors=2, rest=tensor("t", (16,)) + tensor("u", (4,), 0, 32) + DATA), "\"u\" overlaps another"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_with_its_problem(name: str, tmp_path: Path) -> None:
    content, message = DAMAGED[name]
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(HandgradError, match=message) as error:
        open_gguf(tmp_path / "bad.gguf")
    assert "bad.gguf" in str(error.value) and len(str(error.value)) < 400


def test_a_big_endian_file_of_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HandgradError, match="big-endian"):
        open_gguf(write(tmp_path / "big.gguf", endianess=GGUFEndian.BIG))


def test_no_file_no_folder_no_pipe(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(HandgradError, match="a folder"):
        open_gguf(tmp_path)


def loads_or_raises(path: Path, content: bytes) -> bool:
    """Whether the content loads. Any error other than HandgradError fails the test."""
    path.write_bytes(content)
    try:
        for stored in open_gguf(path).tensors.values():
            dequantize(stored)
    except HandgradError as error:
        assert str(path.name) in str(error) or "cannot be unpacked" in str(error)
        return False
    return True


def test_a_file_cut_anywhere_is_refused(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    padding = -(3 * 40) % 32  # after the last tensor
    for n in range(len(whole) - padding):
        assert not loads_or_raises(tmp_path / "cut.gguf", whole[:n]), n
    assert loads_or_raises(tmp_path / "cut.gguf", whole)


changed_bytes = st.lists(st.tuples(st.integers(0, 10**4), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=changed_bytes)
def test_changed_bytes_load_or_are_refused(changes: list[tuple[int, bytes]], small: Path, tmp_path: Path) -> None:
    content = bytearray(small.read_bytes())
    for at, new in changes:
        at %= len(content)
        content[at : at + len(new)] = new
    loads_or_raises(tmp_path / "changed.gguf", bytes(content))

"""Matrices that stay packed, and the buffers they are unpacked into."""

import copy
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor, nn

from handgrad.errors import HandgradError
from handgrad.model.storage.packed import Packed
from handgrad.model.storage.weights import STORED, Scratch
from handgrad.ops import packed as ops


def q8(rows: int = 5, columns: int = 64, seed: int = 0) -> Packed:
    return Packed.of(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)), "Q8_0")


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def test_unpacks_what_gguf_unpacks() -> None:
    data = gguf.quants.quantize(torch.randn(7, 96).numpy(), gguf.GGMLQuantizationType.Q4_1)
    expected = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q4_1))
    matrix = Packed(torch.from_numpy(data), "Q4_1", (7, 96))
    assert same(matrix.unpack(), expected)
    assert same(STORED.unpacked(matrix, torch.float32), expected)
    assert same(matrix.unpack(dtype=torch.float64), expected.double())
    buffer = torch.empty(7, 96)
    assert matrix.unpack(buffer) is buffer
    assert same(buffer, expected)


def test_some_rows() -> None:
    matrix = q8(9)
    whole = matrix.unpack()
    ids = torch.tensor([[8, 0, 8], [3, 2, 1]])
    assert same(matrix.rows(ids), whole[ids])
    assert same(matrix.rows(ids[0], torch.float64), whole[ids[0]].double())
    assert same(matrix.reordered(ids[1]).unpack(), whole[ids[1]])
    part = matrix.between(2, 20)
    assert same(part.unpack(), whole[2:])
    assert part.data.data_ptr() == matrix.data[2:].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_tensor_in_the_bytes_of_its_dtype(dtype: torch.dtype) -> None:
    w = nn.Parameter(torch.randn(3, 5).to(dtype))
    matrix = Packed.of(w)
    assert matrix.data.data_ptr() == w.data_ptr()
    assert matrix.nbytes == 15 * dtype.itemsize
    assert not matrix.unpack().requires_grad
    assert same(matrix.unpack(), w.detach().float())
    assert same(Packed.of(w.t()).unpack(), w.detach().float().t())
    assert same(Packed.of(w.detach().float(), matrix.kind).unpack(), w.detach().float())


def test_memory_mapped_bytes_stay_mapped(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(32) + q8().data.numpy().tobytes())
    mapped = torch.from_file(str(file), size=32 + q8().nbytes, dtype=torch.uint8)[32:]
    matrix = Packed(mapped.view(5, 68), "Q8_0", (5, 64))
    assert same(matrix.unpack(), q8().unpack())
    assert matrix.data.untyped_storage().data_ptr() == mapped.untyped_storage().data_ptr()


def test_a_model_leaves_the_bytes_alone() -> None:
    layer = nn.Linear(4, 4)
    layer.packed, layer.scratch = q8(), Scratch()
    before, expected = layer.packed.data.clone(), layer.packed.unpack()
    for changed in (layer.double(), layer.to(torch.bfloat16), copy.deepcopy(layer)):
        assert torch.equal(changed.packed.data, before)
        assert changed.packed.data.data_ptr() == layer.packed.data.data_ptr()
        assert same(changed.packed.unpack(), expected)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert copy.deepcopy(layer).scratch is not layer.scratch


def test_blocks_take_turns_in_the_same_buffers() -> None:
    scratch, f32, f64 = Scratch(), torch.float32, torch.float64
    blocks = [[q8(5, 64, seed), q8(5, 64, seed + 10), q8(3, 32, seed)] for seed in range(3)]
    seen = set()
    for block in blocks:
        with scratch.fetch() as weights:
            first = [weights.unpacked(matrix, f32) for matrix in block]
            assert all(
                weights.unpacked(m, f32) is x for m, x in zip(block, first, strict=True)
            )  # once, however often read
            for matrix, tensor in zip(block, first, strict=True):
                assert same(tensor, matrix.unpack())
            seen.add(frozenset(t.data_ptr() for t in first))
            assert same(weights.unpacked(block[0], f64), block[0].unpack(dtype=f64))
            assert scratch.nbytes == 0
    assert len(seen) == 1
    assert len(*seen) == 3
    assert scratch.nbytes == 4 * (2 * 5 * 64 + 3 * 32) + 8 * 5 * 64  # the last in float64
    pointers = next(iter(seen))
    assert STORED.unpacked(blocks[0][0], f32).data_ptr() not in pointers  # a new tensor
    scratch.clear()
    assert scratch.nbytes == 0


def test_buffers_are_returned_after_an_error_and_are_not_shared_while_in_use() -> None:
    scratch, a, b, f32 = Scratch(), q8(seed=1), q8(seed=2), torch.float32
    with pytest.raises(RuntimeError), scratch.fetch() as weights:
        weights.unpacked(a, f32)
        raise RuntimeError
    assert scratch.nbytes == 4 * 5 * 64
    with scratch.fetch() as outer:
        first = outer.unpacked(a, f32)
        with scratch.fetch() as inner:
            assert same(inner.unpacked(b, f32), b.unpack())
            assert inner.unpacked(b, f32).data_ptr() != first.data_ptr()
        with scratch.fetch() as inner:
            assert same(inner.unpacked(a, torch.float64), a.unpack(dtype=torch.float64))
        assert same(first, a.unpack())
        assert outer.unpacked(a, f32) is first


def test_bad_matrices_are_refused() -> None:
    data = q8().data
    for kind, shape, message in (
        ("IQ2_XS", (5, 64), "IQ2_XS cannot stay packed; these can: F32,"),
        ("Q8_0", (5, 63), "a row of 63 is not a multiple"),
        ("Q8_0", (5, 96), "is the file truncated"),
        ("Q8_0", (6, 64), "is the file truncated"),
    ):
        with pytest.raises(HandgradError, match=message):
            Packed(data, kind, shape)
    with pytest.raises(HandgradError, match="convert it, or name a type"):
        Packed.of(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(HandgradError, match="not supported"):
        Packed.of(torch.zeros(2, 32), "Q4_0")
    with pytest.raises(HandgradError, match="too large for float16"):
        Packed.of(torch.full((1, 2), 7e4), "F16")


def test_every_kind_can_stay_packed() -> None:
    for kind, (numbers, size, _) in ops.KINDS.items():
        matrix = Packed(torch.zeros(2, size, dtype=torch.uint8), kind, (2, numbers))
        assert not matrix.unpack().any()
        assert repr(matrix) == f"Packed(2 × {numbers}, {kind}, {2 * size} bytes)"

"""ops.packed against gguf's own numbers and paper.packed, to the last bit."""

import ctypes
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from handgrad.kernels import calls, compiler, library, signatures
from handgrad.ops import packed as fast
from handgrad.paper import packed as plain

KINDS = list(fast.KINDS)
SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes of float16; others: 0


def random_data(rows: int, f_in: int, kind: str, seed: int = 0) -> Tensor:
    """Random bytes, except that no scale is infinite or NaN."""
    generator = torch.Generator().manual_seed(seed)
    shape = rows, fast.bytes_per_row(f_in, kind)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    blocks = data.view(-1, fast.KINDS[kind].bytes)
    if kind == "MXFP4":
        blocks[:, 0] &= 0x7F
        return data
    ones = 0x7F if kind in ("BF16", "F32") else 0x7C  # the exponent's bits of the highest byte
    for start in SCALES.get(kind, (0,)):
        highest = blocks[:, start + (3 if kind == "F32" else 1)]
        highest[highest & ones == ones] ^= 0x08
    return data


def expected(data: Tensor, kind: str) -> Tensor:
    numbers = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(numbers))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


def quantized(w: Tensor, kind: str) -> Tensor:
    data = gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(data.copy()).view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "f_in"), [(1, 256), (3, 768), (577, 256), (31, 1280)])
@pytest.mark.some_cases(3)
def test_equal_to_gguf_on_random_bytes(kind: str, rows: int, f_in: int) -> None:
    data = random_data(rows, f_in, kind)
    before = data.clone()
    out = torch.full((rows, f_in), torch.nan)
    assert fast.unpack(data, kind, out) is out
    assert out.isfinite().all()
    assert same_bits(out, expected(data, kind))
    assert torch.equal(data, before)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_literal_formulas(kind: str) -> None:
    data = random_data(5, 512, kind, seed=1)
    exact = plain.unpack(data, kind)
    assert exact.dtype == torch.float64
    assert same_bits(fast.unpack(data, kind, torch.empty(5, 512)), exact.float())  # rounded once


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "F16", "BF16", "F32"])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_equal_to_gguf_on_quantized_matrices(kind: str, scale: float) -> None:
    w = scale * torch.randn(7, 96)
    w[2, 32:64] = 0  # a block whose scale is 0
    data = quantized(w, kind)
    out = fast.unpack(data, kind, torch.empty(7, 96))
    assert same_bits(out, expected(data, kind))
    steps = {
        "Q8_0": 2 * 127, "Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "MXFP4": 4, "F16": 1024, "BF16": 128, "F32": 1 << 20,
    }  # fmt: skip
    assert (out - w).abs().max() <= 4.01 * w.abs().max() / steps[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_make_no_difference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_data(13, 512, kind, seed=2)
    monkeypatch.setattr(fast, "NUMBERS_PER_THREAD", 3 * 256)  # 26 blocks of K-quants, 3 at a time
    assert same_bits(fast.unpack(data, kind, torch.empty(13, 512)), expected(data, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.some_cases(3)
def test_other_dtypes_are_the_float32_numbers_converted(kind: str, dtype: torch.dtype) -> None:
    """Not more exact than float32: a float64 model has exactly the weights of the float32 model."""
    data = random_data(3, 256, kind, seed=3)
    out = fast.unpack(data, kind, torch.empty(3, 256, dtype=dtype))
    assert torch.equal(out, fast.unpack(data, kind, torch.empty(3, 256)).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_independent(kind: str) -> None:
    data = random_data(9, 512, kind, seed=4)
    whole = fast.unpack(data, kind, torch.empty(9, 512))
    ids = torch.tensor([8, 0, 0, 3, 8])
    assert same_bits(fast.unpack(data[ids], kind, torch.empty(5, 512)), whole[ids])
    assert same_bits(fast.unpack(data[2:7:2], kind, torch.empty(3, 512)), whole[2:7:2])  # not contiguous
    assert fast.unpack(data[:0], kind, torch.empty(0, 512)).shape == (0, 512)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [1, 2, 3, 32])
@pytest.mark.some_cases(3)
def test_data_at_any_place_of_a_file(kind: str, offset: int) -> None:
    data = random_data(3, 256, kind, seed=5)
    file = torch.zeros(offset + data.numel() + 5, dtype=torch.uint8)
    there = file[offset : offset + data.numel()].view(data.shape).copy_(data)
    assert same_bits(fast.unpack(there, kind, torch.empty(3, 256)), expected(data, kind))


def test_writes_only_into_out() -> None:
    data = random_data(4, 64, "Q4_1")
    buffer = torch.full((12, 64), torch.nan)
    fast.unpack(data, "Q4_1", buffer[4:8])
    assert buffer[:4].isnan().all()
    assert buffer[8:].isnan().all()
    assert same_bits(buffer[4:8], expected(data, "Q4_1"))


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "BF16", "F32"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_packs_the_bytes_that_gguf_packs(kind: str, scale: float) -> None:
    w = scale * torch.randn(5, 192)
    w[1, 64:96] = 0
    w[3, :32] = scale * torch.arange(-16, 16) / 32  # halves are rounded away from zero
    assert torch.equal(fast.pack(w, kind), quantized(w, kind))
    assert torch.equal(fast.pack(w.t().contiguous().t(), kind), quantized(w, kind))


def test_what_does_not_fit_is_refused() -> None:
    data = random_data(3, 64, "Q4_1")
    with pytest.raises(ValueError, match="32 numbers at a time"):
        fast.unpack(data, "Q4_1", torch.empty(3, 65))
    for out in (torch.empty(3, 96), torch.empty(4, 64), torch.empty(64, 3).t()):
        with pytest.raises(ValueError, match="does not unpack into"):
            fast.unpack(data, "Q4_1", out)
    with pytest.raises(ValueError, match="does not unpack into"):
        fast.unpack(data.view(torch.int8), "Q4_1", torch.empty(3, 64))
    with pytest.raises(ValueError, match="packing to Q4_0 is not supported"):
        fast.pack(torch.zeros(3, 64), "Q4_0")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_four_bits_are_not_worse_than_those_of_gguf(scale: float) -> None:
    w = scale * torch.randn(40, 192)
    w[1, 64:96] = 0
    w[2, :32] = scale * 0.7  # without a range
    ours, theirs = (
        fast.unpack(data, "Q4_1", torch.empty_like(w)) for data in (fast.pack(w, "Q4_1"), quantized(w, "Q4_1"))
    )
    assert ours[1, 64:96].eq(0).all()
    assert torch.allclose(ours[2, :32], w[2, :32], rtol=1e-3)
    errors = [(x - w).view(-1, 32).square().sum(1) for x in (ours, theirs)]
    assert errors[0].sum() < 0.95 * errors[1].sum()


@pytest.mark.parametrize("kind", calls.UNPACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compute_the_numbers_of_the_torch_code(kind: str, dtype: torch.dtype) -> None:
    """Random bytes: every pattern of scales, with infinite and NaN ones; an odd number of rows, at an odd address."""
    if not calls.fits(torch.empty(1, 1)):
        pytest.skip("compares kernels with torch")
    generator = torch.Generator().manual_seed(6)
    rows, width = 257, fast.bytes_per_row(768, kind)
    data = torch.randint(0, 256, (rows * width + 1,), dtype=torch.uint8, generator=generator)[1:].view(rows, width)
    starts, size = SCALES.get(kind, (0,)), fast.KINDS[kind].bytes
    for start in starts:
        data[:64].view(-1, size)[:, start + 1] &= 0x83  # denormal or 0
    data[64], data[65] = 0, 0xFF
    for row, start, high in ((66, starts[0], 0x7C), (67, starts[-1], 0xFC)):
        data[row].view(-1, size)[:, start : start + 2] = torch.tensor([0, high], dtype=torch.uint8)  # ±∞
    found = torch.empty(rows, 768, dtype=dtype)
    assert calls.unpacks(kind, data, found)
    fast.unpack(data, kind, found)
    with library.disabled():
        exact = fast.unpack(data, kind, torch.empty_like(found))
    assert (exact.isnan().any() or kind == "MXFP4") and exact.isinf().any()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.view(bits)[~exact.isnan()], exact.view(bits)[~exact.isnan()])


@pytest.mark.parametrize("kind", calls.UNPACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacking_does_not_depend_on_threads_and_writes_only_into_out(kind: str, dtype: torch.dtype) -> None:
    data = random_data(101, 768, kind, seed=7)
    out = torch.full((2, 103, 768), -1.0, dtype=dtype)
    fast.unpack(data, kind, out[0, 1:102])
    torch.set_num_threads(3)
    try:
        fast.unpack(data, kind, out[1, 1:102])
    finally:
        torch.set_num_threads(1)
    assert torch.equal(out[0], out[1])
    assert out[:, (0, 102)].eq(-1).all()


PRODUCTS = ["Q8_0", "Q4_0", "Q4_1", "BF16"]


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(("f_out", "f_in"), [(1, 32), (7, 96), (33, 576), (8, 1536)])
def test_products_equal_those_with_unpacked_weights(kind: str, f_out: int, f_in: int) -> None:
    if not calls.fits(torch.empty(1, 1)):
        pytest.skip("products with packed weights need kernels")
    w = torch.randn(f_out, f_in)
    data = quantized(w, kind)
    exact = fast.unpack(data, kind, torch.empty(f_out, f_in)).double()
    for n in range(1, 18):
        a = torch.randn(n, f_in + 3)[:, 1 : f_in + 1]  # rows apart, and not aligned
        before = data.clone(), a.clone()
        out = torch.full((n, f_out + 2), torch.nan)
        calls.packed_product(kind, a, data, out[:, :f_out])
        error = (out[:, :f_out] - a.double() @ exact.t()).abs()
        assert (error <= 1e-5 * (a.abs().double() @ exact.abs().t())).all()
        assert out[:, f_out:].isnan().all()
        assert torch.equal(data, before[0]) and torch.equal(a, before[1])
        assert fast.multiplies(a, data, kind) == (n <= fast.FEW_ROWS)
        if n <= fast.FEW_ROWS:
            assert torch.equal(fast.product(a, data, kind), out[:, :f_out])


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_do_not_depend_on_the_other_rows_or_on_threads(kind: str) -> None:
    if not calls.fits(torch.empty(1, 1)):
        pytest.skip("products with packed weights need kernels")
    a, data = torch.randn(15, 576), quantized(torch.randn(300, 576), kind)
    together = fast.product(a, data, kind)
    torch.set_num_threads(2)
    try:
        assert torch.equal(fast.product(a, data, kind), together)
    finally:
        torch.set_num_threads(1)


def test_no_product_where_it_does_not_fit() -> None:
    data = quantized(torch.randn(4, 256), "Q8_0")
    assert not fast.multiplies(torch.randn(1, 256).double(), data, "Q8_0")
    assert not fast.multiplies(torch.randn(1, 256), random_data(4, 256, "Q4_K"), "Q4_K")
    assert not fast.multiplies(torch.randn(1, 256), quantized(torch.randn(8, 256), "Q8_0")[::2].t().t()[:, :], "Q8_0")
    with library.disabled():
        assert not fast.multiplies(torch.randn(1, 256), data, "Q8_0")


# ── rounded activations ─────────────────────────────────────────────────────────────────────────────────────────────


def test_activations_are_rounded_to_the_nearest_of_255_numbers() -> None:
    a = torch.randn(5, 96)
    a[0, :32] = 0
    a[1, :32] = torch.arange(32) / 2 - 8  # steps of 1/2, halves among them
    a[1, 31] = 127
    q, d = fast.round_to_8_bits(a)
    groups = a.view(5, 3, 32)
    assert torch.equal(q, q.round()) and q.abs().amax() == 127
    assert torch.equal(d[1:].flatten(), groups.abs().amax(2)[1:].double().div(127).float().flatten())
    assert ((q * d - groups).abs() <= d * (0.5 + 1e-4)).all()
    assert q[0, 0].eq(0).all() and d[0, 0] == 0
    assert torch.equal(q[1, 0, :31], torch.arange(31).div(2).sub(8).round())  # to even
    assert torch.equal(fast.rounded(a), (q * d).view(5, 96))


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-130, 2.0**-100, 1.0, 2.0**100, 2.0**126])
def test_activations_of_every_size_are_rounded(scale: float) -> None:
    """A power of two changes d alone, up to the resolution of denormal numbers."""
    a = torch.randint(-3, 4, (4, 64)).float()
    a[0] = 0
    q, d = fast.round_to_8_bits(a * scale)
    expected = fast.round_to_8_bits(a)
    assert torch.equal(q, expected[0])
    assert torch.equal(d, (expected[1].double() * scale).float())


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stays_visible(wrong: float) -> None:
    a, data = torch.randn(21, 96), quantized(torch.randn(9, 96), "Q8_0")
    before = fast.rounded(a)
    a[17, 40] = a[3, 95] = wrong
    bad = torch.zeros(21, dtype=torch.bool)
    bad[[3, 17]] = True
    found = fast.rounded(a)
    assert found[17, 32:64].isnan().all() and torch.equal(found[~bad], before[~bad])
    if calls.fits(a):
        out = fast.rounded_product(a, data, "Q8_0")
        assert out[bad].isnan().all() and out[~bad].isfinite().all()


def sums_are_exact(out: Tensor, a: Tensor, w: Tensor) -> bool:
    """Whether out is a' wᵗ up to the rounding of float32 sums of blocks; results below the least float32 are 0."""
    rounded = fast.rounded(a).double()
    error, size = (out - rounded @ w.double().t()).abs(), rounded.abs() @ w.double().abs().t()
    return bool((error <= 2e-6 * size + a.shape[1] * 2.0**-126).all())


@pytest.mark.parametrize("kind", fast.ROUNDED)
@pytest.mark.parametrize(("f_out", "f_in"), [(1, 32), (7, 96), (33, 576), (70, 1536)])
def test_rounded_products_equal_the_formula(kind: str, f_out: int, f_in: int) -> None:
    if not calls.fits(torch.empty(1, 1)):
        pytest.skip("products with packed weights need kernels")
    data = quantized(torch.randn(f_out, f_in), kind)
    w = fast.unpack(data, kind, torch.empty(f_out, f_in))
    rows = torch.randn(40, f_in + 3)[:, 1 : f_in + 1]  # apart, and not aligned
    rows[2, :32] = 0
    alone = torch.cat([fast.rounded_product(a[None], data, kind) for a in rows])
    for n in (*range(1, 19), 24, 25, 40):
        a, before = rows[:n], (data.clone(), rows.clone())
        out = torch.full((n, f_out + 2), torch.nan)
        calls.rounded_product(kind, a, data, out[:, :f_out])
        assert sums_are_exact(out[:, :f_out], a, w)
        assert torch.equal(out[:, :f_out], alone[:n])  # to the last bit
        assert out[:, f_out:].isnan().all()
        assert torch.equal(data, before[0]) and torch.equal(rows, before[1])
        assert fast.multiplies(a, data, kind, True) == (n <= fast.FEW_ROWS or library.multiplies_bytes())


@pytest.mark.parametrize("kind", fast.ROUNDED)
@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-100, 2.0**-60, 2.0**60, 2.0**100])
def test_rounded_products_of_every_size(kind: str, scale: float) -> None:
    if not calls.fits(torch.empty(1, 1)):
        pytest.skip("products with packed weights need kernels")
    data = quantized(torch.randn(6, 128), kind)
    a = torch.randn(19, 128) * scale
    a[:, 32:64] = 0
    assert sums_are_exact(fast.rounded_product(a, data, kind), a, fast.unpack(data, kind, torch.empty(6, 128)))


@pytest.mark.parametrize("kind", fast.ROUNDED)
@pytest.mark.parametrize("n", [3, 21])
def test_rounded_products_of_extreme_numbers(kind: str, n: int) -> None:
    """All integers at their ends: −128 in 8 bits, 0 and 15 in 4, against ±127"""
    if not calls.fits(torch.empty(1, 1)):
        pytest.skip("products with packed weights need kernels")
    data = random_data(5, 64, kind)
    blocks = data.view(-1, fast.KINDS[kind].bytes)
    blocks[:, fast.KINDS[kind].bytes - (32 if kind == "Q8_0" else 16) :] = torch.tensor([0x80, 0x7F])[
        torch.arange(len(blocks)) % 2, None
    ]
    a = torch.ones(n, 64)
    a[1] = -1
    assert sums_are_exact(fast.rounded_product(a, data, kind), a, fast.unpack(data, kind, torch.empty(5, 64)))


@pytest.mark.parametrize("kind", fast.ROUNDED)
def test_rounded_products_do_not_depend_on_threads(kind: str) -> None:
    if not calls.fits(torch.empty(1, 1)):
        pytest.skip("products with packed weights need kernels")
    a, data = torch.randn(23, 576), quantized(torch.randn(301, 576), kind)
    together = fast.rounded_product(a, data, kind)
    torch.set_num_threads(3)
    try:
        assert torch.equal(fast.rounded_product(a, data, kind), together)
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(compiler.command() is None, reason="LEFT OUT: no C compiler")
def test_processors_without_products_of_bytes(tmp_path: Path) -> None:
    source, out = next(path for path in compiler.FILES if path.name == "rounded.c"), tmp_path / "plain.so"
    compiler._run([str(source), "-o", str(out), "-DREAL=float", *compiler.FLAGS, *compiler._openmp_flags(), "-lm"])
    product = signatures.declared(ctypes.CDLL(str(out)), "rounded_product")
    for kind in fast.ROUNDED:
        for n in (1, 6, 39):
            a, data, found = torch.randn(n, 96), quantized(torch.randn(7, 96), kind), torch.empty(n, 7)
            product(calls.PACKED[kind], n, 96, 7, a.data_ptr(), 96, data.data_ptr(), found.data_ptr(), 7)
            assert sums_are_exact(found, a, fast.unpack(data, kind, torch.empty(7, 96)))

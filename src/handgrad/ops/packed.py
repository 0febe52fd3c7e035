"""Packed weights to numbers, w (rows, f_in): the block formats of GGUF files, and floats of two or four bytes.

    data  (rows, bytes per row), uint8      out  (rows, f_in)      a  (n, f_in)

A row is a sequence of blocks. A block holds q, small integers, and scales: d and m are float16; the 256 numbers of a
K-quant are divided into groups g, each with integer scales s_g and t_g.

    kind   bytes of a block (in order)                       numbers   w
    F32    4                                                       1   the number itself; so F16 and BF16, of 2 bytes
    Q8_0   34    d, 32 q (int8)                                   32   d q
    Q4_0   18    d, 16 nibbles                                    32   d (q − 8)
    Q4_1   20    d, m, 16 nibbles                                 32   d q + m
    Q5_0   22    d, 4 bits, 16 nibbles                            32   d (q − 16)
    Q5_1   24    d, m, 4 bits, 16 nibbles                         32   d q + m
    MXFP4  17    e (uint8), 16 nibbles                            32   2^(e − 128) c_q
    Q4_K   144   d, m, 12 scales, 4 × 32 nibbles                 256   (d s_g) q − m t_g      8 groups of 32
    Q5_K   176   d, m, 12 scales, 32 bits, 4 × 32 nibbles        256   (d s_g) q − m t_g      8 groups of 32
    Q6_K   210   2 × 64 nibbles, 2 × 32 pairs, 16 s (int8), d    256   (d s_g) (q − 32)       16 groups of 16

"n nibbles" are n bytes: their low halves are the bits 0–3 of n numbers, their high halves those of the next n. Bits 4 (and
5) come from "bits" and "pairs": bit j of the 32-bit word of Q5_0 and Q5_1 belongs to number j; bit g of byte j in Q5_K to
number j of group g; bits 2i and 2i+1 of byte j in Q6_K to number 32 i + j of the half. Scales of 6 bits: see `_six_bits`.

MXFP4 has floats of 4 bits, a sign, two of exponent and one of fraction: c_q is twice that of number q, an integer.

The product of a scale with q is exact in float32, so w is rounded at most once, whatever the order of the operations, and
the results equal those of other programs to the last bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import calls, library

ROUNDED = calls.ROUNDED  # kinds that are multiplied with activations of 8 bits, in a model that rounds those
FEW_ROWS = 16  # up to here a product is faster with packed weights than with unpacked ones
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the floats of 4 bits
NUMBERS_PER_THREAD = 1 << 18  # at once, so that all steps of a part work in the cache of a core


class Kind(NamedTuple):
    numbers: int  # per block
    bytes: int  # per block
    unpack: Callable[[Tensor, Tensor], None]  # blocks (n, bytes), out (n, numbers), both contiguous


def bytes_per_row(f_in: int, kind: str) -> int:
    """Raises ValueError if f_in numbers are not a whole number of blocks."""
    numbers, size, _ = KINDS[kind]
    if f_in % numbers:
        raise ValueError(f"{kind} packs {numbers} numbers at a time, and a row of {f_in} is not a multiple of that")
    return f_in // numbers * size


def unpack(data: Tensor, kind: str, out: Tensor) -> Tensor:
    """Write the numbers that `data` stands for into `out`, and return it. An `out` that is not float32 receives the float32
    numbers, converted."""
    rows, f_in = out.shape
    numbers, size, blocks_to_numbers = KINDS[kind]
    if data.shape != (rows, bytes_per_row(f_in, kind)) or data.dtype != torch.uint8 or not out.is_contiguous():
        raise ValueError(
            f"{kind} data {tuple(data.shape)} of {data.dtype} does not unpack into {tuple(out.shape)}: expected uint8"
            f" {(rows, bytes_per_row(f_in, kind))} and a contiguous `out`"
        )
    if calls.unpacks(kind, data, out):
        calls.packed_unpack(kind, data, out)
        return out
    result = out.view(-1, numbers)
    blocks = _aligned(data).view(-1, size)
    step = max(NUMBERS_PER_THREAD * torch.get_num_threads() // numbers, 1)
    for start in range(0, len(blocks), step):
        x, y = blocks[start : start + step], result[start : start + step]
        part = y if y.dtype == torch.float32 else torch.empty(y.shape, device=y.device)
        blocks_to_numbers(x, part)
        if part is not y:
            y.copy_(part)
    return out


def multiplies(a: Tensor, data: Tensor, kind: str, rounded: bool = False) -> bool:
    """Whether `product`, or `rounded_product`, can be called, and is faster than a product with the unpacked weights."""
    few = len(a) <= FEW_ROWS or (rounded and library.multiplies_bytes())
    few = few and kind in (ROUNDED if rounded else calls.PACKED) and a.dtype == torch.float32
    few = few and a.shape[1] % calls.NUMBERS_OF_BLOCK == 0
    return few and data.is_cpu and data.is_contiguous() and calls.fits(a)


def product(a: Tensor, data: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """a wᵗ (n, rows), with the numbers that `unpack` computes, without writing them to memory"""
    if out is None:
        out = a.new_empty(len(a), len(data))
    calls.packed_product(kind, a, data, out)
    return out


def round_to_8_bits(a: Tensor) -> tuple[Tensor, Tensor]:
    """q (n, f_in/32, 32) and d (n, f_in/32, 1), float32, with a ≈ d q: d is 1/127 of the largest of 32 numbers, and q the
    nearest integers, halves to even. If one of the numbers is not finite, d is NaN."""
    groups = a.double().reshape(len(a), -1, 32)  # 127 divided by a denormal float32 is no float32
    largest = groups.abs().amax(2, keepdim=True)
    finite = largest.isfinite()
    q = (groups * torch.where(largest == 0, 0, 127 / largest)).round_()
    return torch.where(finite, q, 0).float(), torch.where(finite, largest / 127, torch.nan).float()


def rounded(a: Tensor) -> Tensor:
    """a (n, f_in) as `rounded_product` reads it"""
    q, d = round_to_8_bits(a)
    return (q * d).view(a.shape).to(a.dtype)


def rounded_product(a: Tensor, data: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """`product` with a rounded to 8 bits. A row of the result does not depend on the other rows, to the last bit."""
    if out is None:
        out = a.new_empty(len(a), len(data))
    calls.rounded_product(kind, a, data, out)
    return out


def pack(w: Tensor, kind: str) -> Tensor:
    """The bytes (rows, bytes per row) of w (rows, f_in), rounded to numbers of F32, F16, BF16, Q8_0 or Q4_1."""
    bytes_per_row(w.shape[1], kind)
    if kind in FLOATS:
        return w.to(FLOATS[kind]).contiguous().view(torch.uint8)
    if kind not in ("Q8_0", "Q4_1"):
        raise ValueError(f"packing to {kind} is not supported: choose Q8_0, Q4_1, F16, BF16 or F32")
    blocks = w.float().reshape(-1, 32)
    if kind == "Q4_1":
        return _pack_q4_1(blocks).view(w.shape[0], -1)
    d = blocks.abs().amax(1, keepdim=True) / 127
    x = blocks * torch.where(d == 0, 0, 1 / d)
    q = (x.abs() + 0.5).floor() * x.sign()  # half away from zero, as GGUF's own tools round
    parts = [d.half().view(torch.uint8), q.to(torch.int8).view(torch.uint8)]
    return torch.cat(parts, 1).view(w.shape[0], -1)


def _pack_q4_1(x: Tensor) -> Tensor:
    """Blocks (n, 20) of x (n, 32). q is the nearest of the 16 numbers from the least to the greatest of a block; d and m are
    then those with the smallest squared error for this q, and q is rounded again. Of all rounds the best is kept."""
    low, high = x.aminmax(dim=1, keepdim=True)
    d, m = (high - low) / 15, low
    best = [torch.full_like(d, torch.inf), d, m, x]
    for _ in range(4):
        d, m = d.half().float(), m.half().float()
        q = ((x - m) * torch.where(d == 0, 0, 1 / d)).round_().clamp_(0, 15)
        error = (d * q + m - x).square_().sum(1, keepdim=True)
        better = error < best[0]
        best = [torch.where(better, new, old) for new, old in zip((error, d, m, q), best, strict=True)]
        centered = q - q.mean(1, keepdim=True)
        variance = centered.square().sum(1, keepdim=True)
        d = torch.where(variance == 0, d, (centered * x).sum(1, keepdim=True) / variance)
        m = x.mean(1, keepdim=True) - d * q.mean(1, keepdim=True)
    _, d, m, q = best
    low_half, high_half = q.to(torch.uint8).view(-1, 2, 16).unbind(1)
    return torch.cat([d.half().view(torch.uint8), m.half().view(torch.uint8), low_half | high_half << 4], 1)


def _aligned(data: Tensor) -> Tensor:
    """Contiguous and, in its storage, at an address that floats may have."""
    return data.clone(memory_format=torch.contiguous_format) if data.storage_offset() % 4 else data.contiguous()


# ── one function per format ─────────────────────────────────────────────────────────────────────────────────────────
# Each takes blocks x (n, bytes). A bit field is masked, not shifted: q 2^i times d 2^−i is the same number exactly.


def _float(dtype: torch.dtype) -> Callable[[Tensor, Tensor], None]:
    def convert(x: Tensor, out: Tensor) -> None:
        out.copy_(x.view(dtype))

    return convert


def _q8_0(x: Tensor, out: Tensor) -> None:
    (d,) = _scales(x, 0, 1)
    torch.mul(_field(x, 0xFF, signed=True)[:, 2:], d, out=out)


def _q4_0(x: Tensor, out: Tensor) -> None:
    (d,) = _scales(x, 0, 1)
    _nibbles(x[:, 2:], d, d, out.view(-1, 2, 16), minus=8)


def _q4_1(x: Tensor, out: Tensor) -> None:
    d, m = _scales(x, 0, 2)
    _nibbles(x[:, 4:], d, d, out.view(-1, 2, 16))
    out.add_(m)


def _q5_0(x: Tensor, out: Tensor) -> None:
    (d,) = _scales(x, 0, 1)
    _five_bits(x[:, 2:6], x[:, 6:], out)
    out.sub_(16).mul_(d)


def _q5_1(x: Tensor, out: Tensor) -> None:
    d, m = _scales(x, 0, 2)
    _five_bits(x[:, 4:8], x[:, 8:], out)
    out.mul_(d).add_(m)


def _q4_k(x: Tensor, out: Tensor) -> None:
    scale, offset = _six_bits(x)
    _nibbles(x[:, 16:], scale[:, 0::2], scale[:, 1::2], out.view(-1, 4, 2, 32))
    out.view(-1, 8, 32).sub_(offset)


def _q5_k(x: Tensor, out: Tensor) -> None:
    scale, offset = _six_bits(x)
    _nibbles(x[:, 48:], 1, 1, out.view(-1, 4, 2, 32))
    bits = x[:, 16:48].contiguous()
    groups = out.view(-1, 8, 32)
    for g in range(8):
        groups[:, g].add_(_field(bits, 1 << g), alpha=2.0 ** (4 - g))
    groups.mul_(scale).sub_(offset)


def _q6_k(x: Tensor, out: Tensor) -> None:
    (d,) = _scales(x, 208, 1)
    scale = d * x[:, 192:208].contiguous().view(torch.int8)
    _nibbles(x[:, :128], 1, 1, out.view(-1, 2, 2, 64))
    pairs = x[:, 128:192].contiguous().view(-1, 2, 32)
    quarters = out.view(-1, 2, 4, 32)
    for i in range(4):
        quarters[:, :, i].add_(_field(pairs, 3 << 2 * i, minus=2 << 2 * i), alpha=2.0 ** (4 - 2 * i))
    out.view(-1, 16, 16).mul_(scale.unsqueeze(2))


def _mxfp4(x: Tensor, out: Tensor) -> None:
    e = x[:, :1].to(torch.int32)
    d = torch.where(e < 2, 0x200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)  # denormal for e = 0 and 1
    q = x[:, 1:].to(torch.int32)
    c = torch.tensor(FP4, dtype=torch.float32, device=x.device)
    for half, numbers in zip((q & 15, q >> 4), out.view(-1, 2, 16).unbind(1), strict=True):
        torch.mul(c.index_select(0, half.flatten()).view(half.shape), d, out=numbers)


def _scales(x: Tensor, start: int, count: int) -> Tensor:
    """(count, n, 1): `count` float16 of each block, from byte `start`. Contiguous before they are converted, which is ten
    times as fast."""
    half = x.view(torch.float16)[:, start // 2 : start // 2 + count]
    return half.t().contiguous().float().unsqueeze(2)


def _field(q: Tensor, mask: int, minus: int = 0, signed: bool = False) -> Tensor:
    """(q & mask) − minus in float32; with `minus` the difference must be in −128 … 127"""
    field = q if mask == 0xFF else q & mask
    if minus:
        field.sub_(minus)  # wraps around; read as signed, it is the difference
    return (field.view(torch.int8) if signed or minus else field).float()


def _nibbles(x: Tensor, low_scale: Tensor | int, high_scale: Tensor | int, out: Tensor, minus: int = 0) -> None:
    """out (…, 2, width): the low halves of `width` bytes, then their high halves, minus `minus`, times their scales"""
    low, high = out.unbind(-2)
    q = x.contiguous().view(low.shape)
    torch.mul(_field(q, 0x0F, minus), low_scale, out=low)
    torch.mul(_field(q, 0xF0, 16 * minus), high_scale / 16, out=high)


def _five_bits(bits: Tensor, x: Tensor, out: Tensor) -> None:
    """q from nibbles and one further bit per number, a word of 32 bits per block"""
    # Every byte of b · 0x0101… is b: 8 copies, of which number j keeps bit j; adding 0x80 − 2^j moves it to bit 7.
    words = bits.to(torch.int64).mul_(0x0101010101010101).bitwise_and_(-0x7FBFDFEFF7FBFDFF)
    words.add_(0x00406070787C7E7F).bitwise_right_shift_(3).bitwise_and_(0x1010101010101010)
    q = x.contiguous()
    out.copy_(words.view(torch.uint8))
    low, high = out.view(-1, 2, 16).unbind(1)
    low.add_(_field(q, 0x0F))
    high.add_(_field(q, 0xF0), alpha=1 / 16)


def _six_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """d s_g and m t_g, (n, 8, 1) each, of a K-quant: d, m and 12 bytes b of scales.

    Groups 0–3:  s_g is bits 0–5 of b_g,                               t_g bits 0–5 of b_{g+4}
    Groups 4–7:  s_g is bits 0–3 of b_{g+4}, then bits 6–7 of b_{g−4}; t_g bits 4–7 of b_{g+4}, then bits 6–7 of b_g
    """
    d, m = _scales(x, 0, 2)
    s, t, both = x[:, 4:16].contiguous().view(-1, 3, 4).unbind(1)
    s_g = torch.cat([s & 0x3F, (both & 0x0F) | (s >> 2 & 0x30)], 1)
    t_g = torch.cat([t & 0x3F, (both >> 4) | (t >> 2 & 0x30)], 1)
    return (s_g * d).unsqueeze(2), (t_g * m).unsqueeze(2)


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = {name: Kind(1, dtype.itemsize, _float(dtype)) for name, dtype in FLOATS.items()} | {
    "Q8_0": Kind(32, 34, _q8_0),
    "Q4_0": Kind(32, 18, _q4_0),
    "Q4_1": Kind(32, 20, _q4_1),
    "Q5_0": Kind(32, 22, _q5_0),
    "Q5_1": Kind(32, 24, _q5_1),
    "MXFP4": Kind(32, 17, _mxfp4),
    "Q4_K": Kind(256, 144, _q4_k),
    "Q5_K": Kind(256, 176, _q5_k),
    "Q6_K": Kind(256, 210, _q6_k),
}

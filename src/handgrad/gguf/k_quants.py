"""Round weights to llama.cpp's k-quants: 256 weights to a block, with scales of their groups that are integers themselves.

    Q4_K, Q5_K   x ≈ d s l − d' m    8 groups of 32; s, m of 6 bits, l of 4 or 5 bits
    Q6_K         x ≈ d s l           16 groups of 16; s of 8 bits, l from −32 to 31

d and d' are float16. For every group, several scales near range/levels are tried: each gives integers l, and for these the
scale (and the minimum) with the least weighted squared error has a closed form; the best of all is taken.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

BLOCK = 256
LEVELS = {"Q4_K": 15, "Q5_K": 31}
_CHUNK = 512  # blocks at a time, which fit the processor's cache


def quantize(w: Tensor, kind: str) -> Tensor:
    """(rows, n) → the packed rows (rows, bytes) as uint8; n is a multiple of 256."""
    parts = torch.split(w.reshape(-1, BLOCK), _CHUNK)
    pack = _pack_signed if kind == "Q6_K" else partial(_pack_with_minimum, kind=kind)
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return torch.cat(list(pool.map(pack, parts))).view(len(w), -1)
    finally:
        torch.set_num_threads(threads)  # which the threads of the pool changed for all


# ── Q4_K and Q5_K ───────────────────────────────────────────────────────────────────────────────────────────────────


def _pack_with_minimum(blocks: Tensor, kind: str) -> Tensor:
    levels = LEVELS[kind]
    x = blocks.float().view(-1, 8, 32)
    scale, minimum = _fit_with_minimum(x, levels)
    d, s = _to_integers(scale, 63)
    d_min, m = _to_integers(minimum, 63)
    step = (d.float() * s)[..., None]
    l = ((x + (d_min.float() * m)[..., None]) / step.where(step > 0, 1)).round().clamp(0, levels).to(torch.uint8)
    low = (l & 15).view(-1, 4, 2, 32)
    parts = [_bytes(d), _bytes(d_min), _six_bits(s.to(torch.uint8), m.to(torch.uint8))]
    if kind == "Q5_K":  # bit g of byte i is the high bit of weight i in group g
        bits = torch.arange(8, dtype=torch.uint8)[:, None]
        parts.append(((l >> 4) << bits).sum(1, dtype=torch.uint8))
    parts.append((low[:, :, 0] | low[:, :, 1] << 4).flatten(1))
    return torch.cat(parts, 1)


def _fit_with_minimum(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """s and m ≥ 0 of every group, with x ≈ s l − m. Weights of the error: √mean(x²) + |x|."""
    w = x.abs() + x.square().mean(-1, keepdim=True).sqrt()
    low = x.amin(-1, keepdim=True).clamp(max=0)
    width = x.amax(-1, keepdim=True) - low
    flat = width == 0
    sum_w, sum_wx = w.sum(-1), (w * x).sum(-1)
    best = torch.full_like(sum_w, torch.inf)
    scale, offset = torch.zeros_like(sum_w), low[..., 0]
    above_low, width = x - low, width.where(~flat, 1)
    l, wl, product = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    for tried in _around(levels, 1.0, 20):
        torch.mul(above_low, tried / width, out=l).round_().clamp_(0, levels)
        torch.mul(w, l, out=wl)
        sum_wl = wl.sum(-1)
        sum_wll = torch.mul(wl, l, out=product).sum(-1)
        sum_wlx = torch.mul(wl, x, out=product).sum(-1)
        determinant = sum_w * sum_wll - sum_wl.square()
        solvable = determinant > 0
        safe = determinant.where(solvable, 1)
        s = (sum_w * sum_wlx - sum_wx * sum_wl) / safe
        b = (sum_wll * sum_wx - sum_wl * sum_wlx) / safe
        above = b > 0  # the minimum is stored without a sign
        s = torch.where(above, sum_wlx / sum_wll.where(sum_wll > 0, 1), s)
        b = b.clamp(max=0)
        error = l.mul_(s[..., None]).add_(b[..., None]).sub_(x).square_().mul_(w).sum(-1)
        better = solvable & (error < best)
        best, scale, offset = torch.where(better, error, best), scale.where(~better, s), offset.where(~better, b)
    return scale, -offset


def _six_bits(s: Tensor, m: Tensor) -> Tensor:
    """8 scales and 8 minima of 6 bits in 12 bytes: the first four of each with two high bits of the last four above them."""
    first = s[:, :4] | (s[:, 4:] >> 4) << 6
    second = m[:, :4] | (m[:, 4:] >> 4) << 6
    return torch.cat([first, second, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], 1)


# ── Q6_K ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pack_signed(blocks: Tensor) -> Tensor:
    x = blocks.float().view(-1, 16, 16)
    scale = _fit_signed(x)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    d = _half(largest / -128)  # the largest scale becomes −128
    s = (scale / d.float().where(d != 0, 1)).round().clamp(-128, 127)
    step = (d.float() * s)[..., None]
    l = ((x / step.where(step != 0, 1)).round().clamp(-32, 31) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = (l[:, :, :2] & 15 | (l[:, :, 2:] & 15) << 4).flatten(1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = ((l >> 4) << shifts).sum(2, dtype=torch.uint8).flatten(1)
    return torch.cat([low, high, s.to(torch.int8).view(torch.uint8), _bytes(d)], 1)


def _fit_signed(x: Tensor) -> Tensor:
    """s of every group, with x ≈ s l. Weights of the error: x²."""
    w = x.square()
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    safe = extreme.where(extreme != 0, 1)
    best = torch.zeros_like(x[..., 0])
    scale = torch.zeros_like(best)
    for tried in _around(32, 0.9, 18):
        l = (x * (-tried / safe)).round_().clamp_(-32, 31)
        wl = w * l
        sum_wll, sum_wlx = (wl * l).sum(-1), (wl * x).sum(-1)
        s = sum_wlx / sum_wll.where(sum_wll > 0, 1)
        gain = s * sum_wlx  # Σ w x² minus the error
        better = gain > best
        best, scale = torch.where(better, gain, best), torch.where(better, s, scale)
    return scale


# ── both ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _around(levels: int, reach: float, steps: int) -> Iterator[float]:
    return (levels + reach * (2 * i / steps - 1) for i in range(steps + 1))


def _to_integers(values: Tensor, maximum: int) -> tuple[Tensor, Tensor]:
    """(blocks, groups) of numbers ≥ 0 → d (blocks, 1) in float16 and integers with values ≈ d · integers."""
    d = _half(values.amax(1, keepdim=True) / maximum)
    integers = (values / d.float().where(d > 0, 1)).round().clamp(0, maximum)
    return d, integers


def _half(d: Tensor) -> Tensor:
    """In float16, and no number but 0 becomes 0: the integers make up for a d that is too large."""
    least = torch.tensor(2.0**-24).copysign(d)
    return torch.where((d != 0) & (d.abs() < least.abs()), least, d).half()


def _bytes(d: Tensor) -> Tensor:
    return d.contiguous().view(torch.uint8)

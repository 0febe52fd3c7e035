"""Packed weights, one number after the other. Not in the paper: the block formats of GGUF files.

    b  the bytes of a block      q_j  small integers      d, m  float16 scales      s_g, t_g  integer scales of group g

Results are float64 and exact; a program that computes in float32 rounds them once.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Bytes = Sequence[int]


def unpack(data: Tensor, kind: str) -> Tensor:
    """data (rows, bytes per row) → w (rows, f_in), block by block"""
    size, block = BLOCKS[kind]
    rows = [
        [w for start in range(0, len(row), size) for w in block(row[start : start + size])] for row in data.tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64)


def binary(b: Bytes, exponent_bits: int, fraction_bits: int) -> float:
    """(−1)^sign 2^(e − bias) (1 + f); for e = 0, (−1)^sign 2^(1 − bias) f. Infinity and NaN do not occur in weights."""
    word = int.from_bytes(bytes(b), "little")
    bias = (1 << exponent_bits - 1) - 1
    sign, e = bits(word, exponent_bits + fraction_bits, 1), bits(word, fraction_bits, exponent_bits)
    f = bits(word, 0, fraction_bits) / (1 << fraction_bits)
    size = math.ldexp(1 + f, e - bias) if e else math.ldexp(f, 1 - bias)
    return -size if sign else size


def half(b: Bytes) -> float:
    """float16, two bytes"""
    return binary(b, 5, 10)


def int8(b: int) -> int:
    """Two's complement"""
    return b - 256 if b >= 128 else b


def bits(b: int, first: int, count: int) -> int:
    """`count` bits of b, from bit `first`"""
    return (b >> first) & (1 << count) - 1


def nibbles(b: Bytes) -> list[int]:
    """The low halves of all bytes, then the high halves"""
    return [bits(x, 0, 4) for x in b] + [bits(x, 4, 4) for x in b]


def five_bits(word: Bytes, b: Bytes) -> list[int]:
    """q_j from nibbles and bit j of a word of 32 bits"""
    w = int.from_bytes(bytes(word), "little")
    return [low + 16 * bits(w, j, 1) for j, low in enumerate(nibbles(b))]


def q8_0(b: Bytes) -> list[float]:
    """w_j = d q_j"""
    d = half(b[:2])
    return [d * int8(q) for q in b[2:]]


def q4_0(b: Bytes) -> list[float]:
    """w_j = d (q_j − 8)"""
    d = half(b[:2])
    return [d * (q - 8) for q in nibbles(b[2:])]


def q4_1(b: Bytes) -> list[float]:
    """w_j = d q_j + m"""
    d, m = half(b[:2]), half(b[2:4])
    return [d * q + m for q in nibbles(b[4:])]


def q5_0(b: Bytes) -> list[float]:
    """w_j = d (q_j − 16)"""
    d = half(b[:2])
    return [d * (q - 16) for q in five_bits(b[2:6], b[6:])]


def q5_1(b: Bytes) -> list[float]:
    """w_j = d q_j + m"""
    d, m = half(b[:2]), half(b[2:4])
    return [d * q + m for q in five_bits(b[4:8], b[8:])]


def group_scales(b: Bytes) -> tuple[list[int], list[int]]:
    """s_g and t_g of 8 groups, 6 bits each, from 12 bytes"""
    s = [bits(b[g], 0, 6) for g in range(4)] + [bits(b[g + 8], 0, 4) + 16 * bits(b[g], 6, 2) for g in range(4)]
    t = [bits(b[g + 4], 0, 6) for g in range(4)] + [bits(b[g + 8], 4, 4) + 16 * bits(b[g + 4], 6, 2) for g in range(4)]
    return s, t


def q4_k(b: Bytes) -> list[float]:
    """w_j = d s_g q_j − m t_g with g = j div 32; nibbles in four runs of 32 bytes"""
    d, m = half(b[:2]), half(b[2:4])
    s, t = group_scales(b[4:16])
    q = [q for run in range(4) for q in nibbles(b[16 + 32 * run : 48 + 32 * run])]
    return [d * s[j // 32] * q[j] - m * t[j // 32] for j in range(256)]


def q5_k(b: Bytes) -> list[float]:
    """As Q4_K; bit 4 of q_j is bit g of byte j mod 32"""
    d, m = half(b[:2]), half(b[2:4])
    s, t = group_scales(b[4:16])
    low = [q for run in range(4) for q in nibbles(b[48 + 32 * run : 80 + 32 * run])]
    q = [low[j] + 16 * bits(b[16 + j % 32], j // 32, 1) for j in range(256)]
    return [d * s[j // 32] * q[j] - m * t[j // 32] for j in range(256)]


def q6_k(b: Bytes) -> list[float]:
    """w_j = d s_g (q_j − 32) with g = j div 16. Each half of 128 numbers has 64 bytes of nibbles and 32 bytes of pairs: bits
    4 and 5 of its number 32 i + k are the bits 2i and 2i + 1 of byte k."""
    d = half(b[208:])
    s = [int8(x) for x in b[192:208]]
    w = []
    for part in range(2):
        low, pairs = nibbles(b[64 * part : 64 * part + 64]), b[128 + 32 * part : 160 + 32 * part]
        q = [low[j] + 16 * bits(pairs[j % 32], 2 * (j // 32), 2) for j in range(128)]
        w += [d * s[8 * part + j // 16] * (q[j] - 32) for j in range(128)]
    return w


def mxfp4(b: Bytes) -> list[float]:
    """w_j = 2^(e − 128) c_j, where c_j / 2 is a float of 4 bits"""
    return [math.ldexp(float_of_4_bits(q), b[0] - 128) for q in nibbles(b[1:])]


def float_of_4_bits(q: int) -> int:
    """Twice (−1)^sign 2^(e − 1) (1 + f/2), of two bits e and one bit f; for e = 0, (−1)^sign f"""
    f, e, sign = bits(q, 0, 1), bits(q, 1, 2), bits(q, 3, 1)
    size = (2 + f) * 2**e // 2 if e else f
    return -size if sign else size


# kind: bytes of a block, and its numbers
BLOCKS: dict[str, tuple[int, Callable[[Bytes], list[float]]]] = {
    "F32": (4, lambda b: [binary(b, 8, 23)]),
    "F16": (2, lambda b: [half(b)]),
    "BF16": (2, lambda b: [binary(b, 8, 7)]),
    "Q8_0": (34, q8_0),
    "Q4_0": (18, q4_0),
    "Q4_1": (20, q4_1),
    "Q5_0": (22, q5_0),
    "Q5_1": (24, q5_1),
    "MXFP4": (17, mxfp4),
    "Q4_K": (144, q4_k),
    "Q5_K": (176, q5_k),
    "Q6_K": (210, q6_k),
}

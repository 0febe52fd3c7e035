"""Calls of the kernels of generation: products of a few rows, attention of single new tokens, all blocks in one call."""

from typing import NamedTuple

import torch
from torch import Tensor

from .calls import Scores, Shape, _call, _check, _heads, _numbers, _rows, _unfit

FEW_ROWS = 16  # MANY of decode.c: up to here products read the weights at the speed of memory, faster than torch does


def few_rows(a: Tensor, w: Tensor, out: Tensor) -> None:
    """a (n, f_in) w (f_in, f_out), contiguous by rows or by columns → out (n, f_out)"""
    (n, f_in), f_out, dtype = a.shape, w.shape[1], a.dtype
    if n > FEW_ROWS:
        raise _unfit(a, (FEW_ROWS, f_in), dtype)
    given, results = _rows((n, f_in), dtype, a), _rows((n, f_out), dtype, out)
    if w.stride(0) == 1:
        _check(_call("few_rows", dtype, n, f_in, f_out, *given, *_rows((f_out, f_in), dtype, w.t()), *results))
    else:
        _call("few_rows_in_out", dtype, n, f_in, f_out, *given, *_rows((f_in, f_out), dtype, w), *results)


class Places(NamedTuple):
    """Where single new tokens of n sequences go in the cache."""

    table: Tensor  # (n, 6) int64, see decode.h
    blocks: int  # of the cache
    k: Shape  # (n, h_kv, d_ρ) of the new keys
    v: Shape

    def address(self) -> int:
        return _numbers(6 * self.k[0], torch.int64, self.table)[0]


WRONG_PLACES = "a token has no place in the cache: its position is not below the capacity"


def attend_tokens(
    places: Places, block: int, scores: Scores, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor
) -> None:
    """q, out (n, h, …); k, v (n, h_kv, …); sinks (h)"""
    (n, heads, width), dtype, d_h = q.shape, q.dtype, places.v[2]
    if not 0 <= block < places.blocks or heads % places.k[1] or places.k != (n, places.v[1], width):
        raise _unfit(q, (places.k[0], heads, places.k[2]), dtype)
    found = _call(
        "attend_tokens", dtype, n, heads, heads // places.k[1], width, d_h, block, scores.window or 0,
        *scores.numbers(width), *_numbers(heads, dtype, sinks), places.address(),
        *_heads((n, heads, width), dtype, q), *_heads(places.k, dtype, k), *_heads(places.v, dtype, v),
        *_heads((n, heads, d_h), dtype, out),
    )  # fmt: skip
    _check(found, WRONG_PLACES)


def token_blocks(
    count: int, blocks: int, widths: Shape, places: Places, rotation: tuple[Tensor, Tensor] | None, a: Tensor
) -> None:
    """All blocks, described at the address `blocks`, on a (n, d). `widths` are d, h_kv, d_ρ and d_h of every block."""
    n, (d, key_heads, d_rho, d_h), dtype = places.k[0], widths, a.dtype
    if n > FEW_ROWS or count > places.blocks or places.k[1:] != (key_heads, d_rho) or places.v != (n, key_heads, d_h):
        raise _unfit(a, (FEW_ROWS, d), dtype)
    angles = (0, 0) if rotation is None else _numbers(n * (d_rho // 2), dtype, *rotation)
    given = n, places.address(), *angles, *_numbers(n * d, dtype, a)
    _check(_call("token_blocks", dtype, count, blocks, *given), WRONG_PLACES)

"""Arguments of the kernel that computes all blocks for single new tokens: the structures of token_block.c."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from .calls import ACTIVATIONS, BYTES_OF_BLOCK, NUMBERS_OF_BLOCK, PACKED, ROUNDED
from .token_calls import Places, token_blocks

_SIZE = ctypes.c_int64
IN_OUT, OUT_IN, ROUNDED_FROM = -2, -1, 16


class Matrix(ctypes.Structure):
    """A matrix of numbers or of packed bytes, its bias, and an adapter's factors."""

    _fields_ = (
        *((name, _SIZE) for name in ("kind", "f_in", "f_out", "w", "ws", "b", "rank", "down", "up")),
        ("scale", ctypes.c_double),
    )


class Norm(ctypes.Structure):
    """Gain, bias (0: RMSNorm) and ε."""

    _fields_ = (("w", _SIZE), ("b", _SIZE), ("eps", ctypes.c_double))


class Block(ctypes.Structure):
    """A block: sizes, norms and matrices. The caller keeps the tensors whose addresses are in it."""

    _fields_ = (
        *(
            (name, _SIZE)
            for name in (
                "index", "d", "heads", "share", "d_rho", "d_h", "hidden", "window", "rotated", "activation", "gated",
                "inputs", "mlp_inputs",
            )
        ),
        ("scale", ctypes.c_double),
        ("cap", ctypes.c_double),
        ("sinks", _SIZE),
        *((name, Norm) for name in ("norm_1", "norm_5", "q_norm", "k_norm")),
        ("qkv", Matrix * 3),
        ("out", Matrix),
        ("mlp", Matrix * 2),
        ("contract", Matrix),
    )  # fmt: skip


def numbers(w: Tensor) -> dict[str, int] | None:
    """Fields of a Matrix of numbers w (f_in, f_out), in either orientation; None if neither rows nor columns are
    contiguous."""
    f_in, f_out = w.shape
    if w.stride(0) == 1:
        return {"kind": OUT_IN, "f_in": f_in, "f_out": f_out, "w": w.data_ptr(), "ws": w.stride(1)}
    if w.stride(1) == 1:
        return {"kind": IN_OUT, "f_in": f_in, "f_out": f_out, "w": w.data_ptr(), "ws": w.stride(0)}
    return None


def packed(data: Tensor, kind: str, f_in: int, rounds: bool) -> dict[str, int] | None:
    """Fields of a packed Matrix, data (f_out, bytes per row), multiplied with activations that are rounded if it `rounds`;
    None if there is no kernel for its kind, or it has other bytes."""
    if kind not in PACKED or not data.is_contiguous():
        return None
    if f_in % NUMBERS_OF_BLOCK or data.shape[1] != f_in // NUMBERS_OF_BLOCK * BYTES_OF_BLOCK[kind]:
        return None
    number = PACKED[kind] + (ROUNDED_FROM if rounds and kind in ROUNDED else 0)
    return {"kind": number, "f_in": f_in, "f_out": data.shape[0], "w": data.data_ptr(), "ws": 0}


def activation(g: str) -> int | None:
    """The number of an activation; None if there is no kernel for it."""
    return ACTIVATIONS.index(g) if g in ACTIVATIONS else None


def array(blocks: Sequence[Block]) -> "ctypes.Array[Block]":
    """The blocks one after the other, as `forward` needs them."""
    return (Block * len(blocks))(*blocks)


def forward(blocks: "ctypes.Array[Block]", places: Places, rotation: tuple[Tensor, Tensor] | None, a: Tensor) -> None:
    """a (n, d) contiguous: a_1 of the first block, which becomes a_10 of the last"""
    first = blocks[0]
    widths = first.d, first.heads // first.share, first.d_rho, first.d_h
    token_blocks(len(blocks), ctypes.addressof(blocks), widths, places, rotation, a)

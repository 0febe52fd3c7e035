"""Calls into the compiled kernels: `fits` says whether tensors can be passed, the others write their results into tensors.

Rows are the first dimension; the last one must be contiguous. (n, w), or (n, h, w) for heads.
"""

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import library


def fits(*tensors: Tensor) -> bool:
    """Whether kernels exist for these tensors: all of one dtype, on the CPU, with contiguous rows."""
    dtype = tensors[0].dtype
    if not library.allowed() or library.load(dtype) is None:
        return False
    return all(x.dtype == dtype and x.is_cpu and x.stride(-1) == 1 for x in tensors)


_functions: dict[tuple[str, torch.dtype], Any] = {}


def _call(name: str, dtype: torch.dtype, *arguments: int | float) -> int:
    """Call a kernel; at its first call its arguments are declared: a float as double, an address or a size as long."""
    function = _functions.get((name, dtype))
    if function is None:
        function = getattr(library.load(dtype), name)
        function.argtypes = [ctypes.c_double if isinstance(x, float) else ctypes.c_ssize_t for x in arguments]
        _functions[name, dtype] = function
    return function(*arguments)  # type: ignore[no-any-return]


def _rows(*tensors: Tensor) -> list[int]:
    """Address and row stride of every tensor."""
    return [x for tensor in tensors for x in (tensor.data_ptr(), tensor.stride(0))]


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


# ── matrix products ─────────────────────────────────────────────────────────────────────────────────────────────────

LEAST_PRODUCTS = 1 << 18  # multiply-adds; smaller products are dominated by the call
FEWEST_ROWS = 8


def multiplies(a: Tensor, b: Tensor) -> bool:
    """Whether a b should be computed here."""
    if a.shape[0] < FEWEST_ROWS or a.shape[0] * a.shape[1] * b.shape[1] < LEAST_PRODUCTS or not library.multiplies():
        return False
    return a.dtype == b.dtype and fits(a if a.stride(1) == 1 else a.t(), b if b.stride(1) == 1 else b.t())


def product(a: Tensor, b: Tensor, out: Tensor | None, add: bool = False, bias: Tensor | None = None) -> Tensor:
    """a (m, n) b (n, w), each contiguous by rows or by columns, plus `bias` (w); written, or added, to `out` if given."""
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    shape = a.shape[0], b.shape[1], a.shape[1]
    strides = out.data_ptr(), out.stride(0), int(add)
    _check(_call("product", a.dtype, *shape, *_heads(a, b), _address(bias), *strides))
    return out


# ── activation and gate ─────────────────────────────────────────────────────────────────────────────────────────────

ACTIVATIONS = ("silu", "gelu_tanh")


def forward_activation(g: str, x: Tensor, out: Tensor) -> None:
    _call(f"forward_{g}", x.dtype, *x.shape, *_rows(x, out))


def backward_activation(g: str, delta: Tensor, x: Tensor, out: Tensor, value: Tensor) -> None:
    _call(f"backward_{g}", x.dtype, *x.shape, *_rows(delta, x, out, value))


def forward_gate(g: str, gate: Tensor, up: Tensor, out: Tensor) -> None:
    _call(f"forward_gate_{g}", gate.dtype, *gate.shape, *_rows(gate, up, out))


def backward_gate(g: str, delta: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor, a_8: Tensor) -> None:
    _call(f"backward_gate_{g}", gate.dtype, *gate.shape, *_rows(delta, gate, up, d_gate, d_up, a_8))


# ── norms ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def forward_layer(a: Tensor, w: Tensor, b: Tensor, eps: float, out: Tensor, mu: Tensor, inv_sigma: Tensor) -> None:
    given = w.data_ptr(), b.data_ptr()
    _call(
        "forward_layer",
        a.dtype,
        *a.shape,
        float(eps),
        *_rows(a),
        *given,
        *_rows(out),
        mu.data_ptr(),
        inv_sigma.data_ptr(),
    )


def forward_rms(a: Tensor, w: Tensor, eps: float, out: Tensor, inv_rms: Tensor) -> None:
    _call("forward_rms", a.dtype, *a.shape, float(eps), *_rows(a), w.data_ptr(), *_rows(out), inv_rms.data_ptr())


def rebuild_norm(
    a: Tensor, mu: Tensor | None, inv: Tensor, w: Tensor, b: Tensor | None, a_bar: Tensor, out: Tensor
) -> None:
    given = _address(mu), inv.data_ptr(), w.data_ptr(), _address(b)
    _call("rebuild_norm", a.dtype, *a.shape, *_rows(a), *given, *_rows(a_bar, out))


def backward_norm(delta: Tensor, a_bar: Tensor, inv: Tensor, w: Tensor, centred: bool, out: Tensor) -> None:
    given = inv.data_ptr(), w.data_ptr(), int(centred)
    _call("backward_norm", delta.dtype, *delta.shape, *_rows(delta, a_bar), *given, *_rows(out))


def column_sums(delta: Tensor, a_bar: Tensor | None, out: Tensor) -> None:
    factor = [0, 0] if a_bar is None else _rows(a_bar)
    _call("column_sums", delta.dtype, *delta.shape, *_rows(delta), *factor, out.data_ptr())


# ── rotary positions, loss, attention ───────────────────────────────────────────────────────────────────────────────


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool, out: Tensor) -> None:
    """x, out (n, h, d_ρ); cos, sin (n, d_ρ/2), contiguous"""
    n, heads, width = x.shape
    _call(
        "rotate", x.dtype, n, heads, width // 2, x.data_ptr(), x.stride(0), x.stride(1), cos.data_ptr(), sin.data_ptr(),
        float(sign), int(interleaved), out.data_ptr(), out.stride(0), out.stride(1),
    )  # fmt: skip


def softmax_loss(logits: Tensor, targets: Tensor, weight: float, losses: Tensor) -> None:
    """targets int64, losses float64, both contiguous"""
    _call(
        "softmax_loss",
        logits.dtype,
        *logits.shape,
        *_rows(logits),
        targets.data_ptr(),
        float(weight),
        losses.data_ptr(),
    )


class Sequences(NamedTuple):
    """Sequences packed end to end, for attention."""

    rows: Tensor  # (count, 4) int64: first and end of the keys, first and end of the queries of each
    longest: int  # number of keys or queries
    at: Tensor | None = None  # (m) int32: positions of the queries; None: every token is a query


@lru_cache(maxsize=64)  # the blocks of a model ask for the same
def table(rows: tuple[tuple[int, int, int, int], ...]) -> tuple[Tensor, int]:
    """The first two fields of `Sequences`."""
    longest = max(max(keys - key, queries - query) for key, keys, query, queries in rows)
    return torch.tensor(rows, dtype=torch.int64, device="cpu"), longest


def forward_attention(
    sequences: Sequences, causal: bool, window: int | None, q: Tensor, k: Tensor, v: Tensor, a: Tensor, lse: Tensor
) -> None:
    """The tensors are (rows, heads, width), lse (rows, heads)."""
    shape = _attention_shape(sequences, causal, window, q, k, v)
    _check(_call("forward_attention", q.dtype, *shape, *_heads(q, k, v, a, lse)))


def backward_attention(
    sequences: Sequences, causal: bool, window: int | None, delta: Tensor, q: Tensor, k: Tensor, v: Tensor,
    a: Tensor, lse: Tensor, into: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """`into` are the error signals of q, k and v, those of k and v with a head for every query head."""
    shape = _attention_shape(sequences, causal, window, q, k, v)
    _check(_call("backward_attention", q.dtype, *shape, *_heads(delta, q, k, v, a, lse, *into)))


# ── packed weights ──────────────────────────────────────────────────────────────────────────────────────────────────

PACKED = {"Q8_0": 0, "Q4_0": 1, "Q4_1": 2}
PACKED_DTYPE = torch.float32  # of their products


def packed_product(kind: str, a: Tensor, data: Tensor, out: Tensor) -> None:
    """out (n, f_out) = a (n, f_in) wᵗ; data (f_out, bytes per row), contiguous; float32"""
    shape = len(a), a.shape[1], len(data)
    _call("packed_product", a.dtype, PACKED[kind], *shape, *_rows(a), data.data_ptr(), *_rows(out))


def packed_unpack(kind: str, blocks: Tensor, out: Tensor) -> None:
    """blocks (n, bytes) → out (n, 32), both contiguous; float32"""
    _call("packed_unpack", out.dtype, PACKED[kind], len(blocks), blocks.data_ptr(), out.data_ptr())


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _attention_shape(
    sequences: Sequences, causal: bool, window: int | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[int | float, ...]:
    rows, longest, at = sequences
    (_, heads, d_rho), d_h = q.shape, v.shape[2]
    where = len(rows), rows.data_ptr(), _address(at), longest
    return *where, heads, heads // k.shape[1], d_rho, d_h, d_rho**-0.5, int(causal), window or 0


def _heads(*tensors: Tensor) -> list[int]:
    """Address and the first two strides of every tensor: of rows and heads, or of rows and columns."""
    return [x for tensor in tensors for x in (tensor.data_ptr(), tensor.stride(0), tensor.stride(1))]


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the buffers of a kernel")


# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────────────

FEW_ROWS = 16  # MANY of decode.c: up to here products read the weights at the speed of memory, faster than torch does


def few_rows(a: Tensor, w: Tensor, out: Tensor) -> None:
    """a (n, f_in) w (f_in, f_out), contiguous by rows or by columns → out (n, f_out)"""
    if w.stride(0) == 1:
        _check(_call("few_rows", a.dtype, *a.shape, w.shape[1], *_rows(a, w.t(), out)))
    else:
        _call("few_rows_in_out", a.dtype, *a.shape, w.shape[1], *_rows(a, w, out))


def call_with(name: str, dtype: torch.dtype, *arguments: int) -> None:
    """Call a kernel that returns whether it found no memory."""
    _check(_call(name, dtype, *arguments))


def attend_tokens(places: Tensor, block: int, window: int | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """places (n, 6) int64, see decode.c; q, out (n, h, …); k, v (n, h_kv, …)"""
    n, heads, width = q.shape
    shape = n, heads, heads // k.shape[1], width, v.shape[2], block, window or 0, width**-0.5
    _call("attend_tokens", q.dtype, *shape, places.data_ptr(), *_heads(q, k, v, out))

"""Calls into the compiled kernels: `fits` says whether tensors can be passed, the others write their results into tensors.

Rows are the first dimension; the last one must be contiguous. (n, w), or (n, h, w) for heads.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import HandgradError
from . import library
from .scores import Scores as Scores

Shape = tuple[int, ...]  # or torch.Size


# What kernels compute with, by the dtype of the operands of products; it is also the dtype of all other tensors.
COMPUTED = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}


def fits(*tensors: Tensor, operands: tuple[Tensor, ...] = ()) -> bool:
    """Whether kernels exist for these tensors, on the CPU, with contiguous rows: all of one dtype, except that `operands`,
    which products read, may be bfloat16 where everything else is float32."""
    dtype = (operands or tensors)[0].dtype
    if not library.allowed() or library.load(dtype) is None:
        return False
    wide = COMPUTED[dtype]
    for given, expected in ((tensors, wide), (operands, dtype)):
        for x in given:  # all() takes twice as long
            if x.dtype is not expected or not x.is_cpu or x.stride()[-1] != 1:
                return False
    return True


_functions: dict[tuple[str, torch.dtype], Any] = {}


def _call(name: str, dtype: torch.dtype, *arguments: int | float) -> int:
    """Call a kernel of signatures.py."""
    function = _functions.get((name, dtype))
    if function is None:
        function = _functions[name, dtype] = library.function(name, dtype)
    return function(*arguments)  # type: ignore[no-any-return]


# ── addresses ───────────────────────────────────────────────────────────────────────────────────────────────────────
# A kernel reads and writes as much as its caller says. So no address is taken without comparing the tensor with what the
# kernel will assume of it, in every call: about 0.2 µs for each tensor.


def _rows(shape: Shape, dtype: torch.dtype, *tensors: Tensor) -> list[int]:
    """Address and row stride of every tensor; rows are contiguous."""
    found = []
    for x in tensors:
        strides = x.stride()
        if x.shape != shape or x.dtype is not dtype or strides[-1] != 1 or not x.is_cpu:
            raise _unfit(x, shape, dtype)
        found += [x.data_ptr(), strides[0]]
    return found


def _heads(shape: Shape, dtype: torch.dtype, *tensors: Tensor) -> list[int]:
    """Address and the first two strides of every tensor: of rows and heads, or of rows and columns."""
    found = []
    for x in tensors:
        strides = x.stride()
        if x.shape != shape or x.dtype is not dtype or strides[2:] not in ((), (1,)) or not x.is_cpu:
            raise _unfit(x, shape, dtype)
        found += [x.data_ptr(), *strides[:2]]
    return found


def _numbers(count: int, dtype: torch.dtype, *tensors: Tensor | None) -> list[int]:
    """The address of `count` contiguous numbers in every tensor, whatever its shape; 0 for None."""
    found = []
    for x in tensors:
        if x is None:
            found.append(0)
        elif x.numel() != count or x.dtype is not dtype or not x.is_contiguous() or not x.is_cpu:
            raise _unfit(x, (count,), dtype)
        else:
            found.append(x.data_ptr())
    return found


def _unfit(x: Tensor, shape: Shape, dtype: torch.dtype) -> HandgradError:
    given, wanted = (f"{tuple(s)} in {str(t).removeprefix('torch.')}" for s, t in ((x.shape, x.dtype), (shape, dtype)))
    return HandgradError(
        f"a tensor of shape {given} where a layer needs {wanted}, contiguous and on the CPU: was the data of a parameter, or"
        " its gradient, replaced? Restore it, or load the model again"
    )


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
    (m, n), w, dtype = a.shape, b.shape[1], a.dtype
    if out is None:
        out = a.new_empty(m, w)
    _check(
        _call(
            "product", dtype, m, w, n, *_heads((m, n), dtype, a), *_heads((n, w), dtype, b), *_numbers(w, dtype, bias),
            *_rows((m, w), dtype, out), int(add),
        )
    )  # fmt: skip
    return out


def mixes(*tensors: Tensor) -> bool:
    """Whether `mixed_product` can be called with these, none of them empty."""
    if not library.allowed() or library.load(torch.bfloat16) is None or not all(x.numel() for x in tensors):
        return False
    return all(x.is_cpu and x.dtype in (torch.float32, torch.bfloat16) and 1 in x.stride() for x in tensors)


def _either(shape: Shape, x: Tensor) -> list[int]:
    """Address, whether it is float32 instead of bfloat16, and both strides, of which one is 1."""
    dtype = torch.float32 if x.dtype is torch.float32 else torch.bfloat16
    address, *strides = _heads(shape, dtype, x)
    if 1 not in strides:
        raise _unfit(x, shape, dtype)
    return [address, int(dtype is torch.float32), *strides]


DEEPEST_ROUNDED = 2048  # DEEP of mixed.c: longer sums are added up in the result, which must not be rounded then
Branch = tuple[Tensor, Tensor]  # h (m, r) and v (r, w), whose product is added


def mixed_product(
    a: Tensor, b: Tensor, out: Tensor, add: bool = False, bias: Tensor | None = None, branch: Branch | None = None
) -> None:
    """out (m, w) (+)= a (m, n) b (n, w) + h v + bias (w), with a, b, h and v rounded to bfloat16 and sums in float32. Each
    is float32 or bfloat16, contiguous by rows or by columns; `out` by rows. An `out` in bfloat16 is not added to."""
    (m, n), w = a.shape, b.shape[1]
    exact = out.dtype is torch.float32
    if not exact and (add or n > DEEPEST_ROUNDED):
        raise _unfit(out, (m, w), torch.float32)
    if not n:
        raise _unfit(a, (m, 1), a.dtype)
    low = [0] * 9
    if branch is not None:
        h, v = branch
        r = h.shape[1]
        low = [r, *_either((m, r), h), *_either((r, w), v)]
    address, stride = _rows((m, w), torch.float32 if exact else torch.bfloat16, out)
    result = *_numbers(w, torch.float32, bias), address, int(exact), stride, int(add)
    _check(_call("mixed_product", torch.bfloat16, m, w, n, *_either((m, n), a), *_either((n, w), b), *low, *result))


# ── activation and gate ─────────────────────────────────────────────────────────────────────────────────────────────

ACTIVATIONS = ("silu", "gelu_tanh")


def forward_activation(g: str, x: Tensor, out: Tensor) -> None:
    n, w = x.shape
    _call(f"forward_{g}", x.dtype, n, w, *_rows((n, w), x.dtype, x, out))


def backward_activation(g: str, delta: Tensor, x: Tensor, out: Tensor, value: Tensor) -> None:
    n, w = x.shape
    given = _rows((n, w), COMPUTED[x.dtype], delta)
    _call(f"backward_{g}", x.dtype, n, w, *given, *_rows((n, w), x.dtype, x, out, value))


def forward_gate(g: str, gate: Tensor, up: Tensor, out: Tensor) -> None:
    n, w = gate.shape
    _call(f"forward_gate_{g}", gate.dtype, n, w, *_rows((n, w), gate.dtype, gate, up, out))


def backward_gate(g: str, delta: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor, a_8: Tensor) -> None:
    n, w = gate.shape
    given = _rows((n, w), COMPUTED[gate.dtype], delta)
    _call(f"backward_gate_{g}", gate.dtype, n, w, *given, *_rows((n, w), gate.dtype, gate, up, d_gate, d_up, a_8))


# ── norms ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def forward_layer(a: Tensor, w: Tensor, b: Tensor, eps: float, out: Tensor, mu: Tensor, inv_sigma: Tensor) -> None:
    (n, width), dtype = a.shape, COMPUTED[out.dtype]
    _call(
        "forward_layer", out.dtype, n, width, float(eps), *_rows((n, width), dtype, a), *_numbers(width, dtype, w, b),
        *_rows((n, width), out.dtype, out), *_numbers(n, dtype, mu, inv_sigma),
    )  # fmt: skip


def forward_rms(a: Tensor, w: Tensor, eps: float, out: Tensor, inv_rms: Tensor) -> None:
    (n, width), dtype = a.shape, COMPUTED[out.dtype]
    _call(
        "forward_rms", out.dtype, n, width, float(eps), *_rows((n, width), dtype, a), *_numbers(width, dtype, w),
        *_rows((n, width), out.dtype, out), *_numbers(n, dtype, inv_rms),
    )  # fmt: skip


def rebuild_norm(
    a: Tensor, mu: Tensor | None, inv: Tensor, w: Tensor, b: Tensor | None, a_bar: Tensor, out: Tensor
) -> None:
    (n, width), dtype = a.shape, COMPUTED[out.dtype]
    _call(
        "rebuild_norm", out.dtype, n, width, *_rows((n, width), dtype, a), *_numbers(n, dtype, mu, inv),
        *_numbers(width, dtype, w, b), *_rows((n, width), dtype, a_bar), *_rows((n, width), out.dtype, out),
    )  # fmt: skip


def backward_norm(delta: Tensor, a_bar: Tensor, inv: Tensor, w: Tensor, centered: bool, out: Tensor) -> None:
    (n, width), dtype = delta.shape, delta.dtype
    _call(
        "backward_norm", dtype, n, width, *_rows((n, width), dtype, delta, a_bar), *_numbers(n, dtype, inv),
        *_numbers(width, dtype, w), int(centered), *_rows((n, width), dtype, out),
    )  # fmt: skip


def column_sums(delta: Tensor, a_bar: Tensor | None, out: Tensor) -> None:
    (n, width), dtype = delta.shape, delta.dtype
    factor = [0, 0] if a_bar is None else _rows((n, width), dtype, a_bar)
    _call("column_sums", dtype, n, width, *_rows((n, width), dtype, delta), *factor, *_numbers(width, dtype, out))


# ── rotary positions, loss, attention ───────────────────────────────────────────────────────────────────────────────


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float, out: Tensor, neighbors: bool = False) -> None:
    """x, out (n, h, d_ρ); cos, sin (n, d_ρ/2), contiguous. The features of a plane are neighbors, or half a head apart."""
    (n, heads, width), dtype = x.shape, COMPUTED[out.dtype]
    half = width // 2
    _call(
        "rotate", out.dtype, n, heads, half, *_heads((n, heads, 2 * half), dtype, x), *_numbers(n * half, dtype, cos, sin),
        float(sign), *_heads((n, heads, width), out.dtype, out), int(neighbors),
    )  # fmt: skip


def softmax_loss(logits: Tensor, targets: Tensor, weight: float, losses: Tensor) -> None:
    """targets int64, losses float64, both contiguous"""
    (n, width), dtype = logits.shape, logits.dtype
    found = _call(
        "softmax_loss", dtype, n, width, *_rows((n, width), dtype, logits), *_numbers(n, torch.int64, targets),
        float(weight), *_numbers(n, torch.float64, losses),
    )  # fmt: skip
    _check(found, f"a target is not one of the {width:,} logits")


class Sequences(NamedTuple):
    """Sequences packed end to end, for attention. Rows ascend; a row of q that is in none of them is not a query."""

    rows: Tensor  # (count, 4) int64: first and end of the keys, first and end of the queries of each
    at: Tensor | None = None  # (rows of q) int32: each query's position in its sequence; None: every token is a query


@lru_cache(maxsize=64)  # the blocks of a model ask for the same
def table(rows: tuple[tuple[int, int, int, int], ...]) -> Tensor:
    """The rows of `Sequences`."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 4)


def forward_attention(
    sequences: Sequences, scores: Scores, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, a: Tensor, lse: Tensor
) -> None:
    """The tensors are (rows, heads, width), sinks (heads), lse (rows, heads)."""
    shape, operands = _attention(sequences, scores, q, k, v)
    (m, heads, _), wide = q.shape, COMPUTED[q.dtype]
    results = *_heads((m, heads, v.shape[2]), q.dtype, a), *_heads((m, heads), wide, lse)
    given = *_numbers(heads, wide, sinks), *operands
    _check(_call("forward_attention", q.dtype, *shape, *given, *results), WRONG_SEQUENCES)


def backward_attention(
    sequences: Sequences, scores: Scores, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, lse: Tensor,
    into: list[Tensor],
) -> None:  # fmt: skip
    """`into` are the error signals of q, k and v, those of k and v with a head for every query head."""
    shape, operands = _attention(sequences, scores, q, k, v)
    (m, heads, d_rho), n, d_h, dtype, wide = q.shape, k.shape[0], v.shape[2], q.dtype, COMPUTED[q.dtype]
    given = *operands, *_heads((m, heads, d_h), dtype, a), *_heads((m, heads), wide, lse)
    results = [
        x for target, size in zip(into, ((m, d_rho), (n, d_rho), (n, d_h)), strict=True)
        for x in _heads((size[0], heads, size[1]), wide, target)
    ]  # fmt: skip
    found = _call("backward_attention", dtype, *shape, *_heads((m, heads, d_h), dtype, delta), *given, *results)
    _check(found, WRONG_SEQUENCES)


def sum_heads(x: Tensor, out: Tensor) -> None:
    """x (n, r h, w) → out (n, h, w), the sums of r neighboring heads"""
    (n, heads, width), dtype = x.shape, x.dtype
    count = out.shape[1]
    given = *_heads((n, count * (heads // count), width), dtype, x), *_heads((n, count, width), dtype, out)
    _call("sum_heads", dtype, n, count, heads // count, width, *given)


WRONG_SEQUENCES = "a sequence has rows outside of q, k and v, rows of another sequence, or a query that sees no key"


def _attention(
    sequences: Sequences, scores: Scores, q: Tensor, k: Tensor, v: Tensor
) -> tuple[list[int | float], list[int]]:
    """What both passes have in common: sequences, sizes and scores, then q, k and v."""
    (rows, at), window = sequences, scores.window
    (m, heads, d_rho), (n, key_heads, _), d_h, dtype = q.shape, k.shape, v.shape[2], q.dtype
    if not key_heads or heads % key_heads or not d_rho or not d_h or (window is not None and window < 1):
        raise HandgradError(
            f"{heads} query heads on {key_heads} key heads, of {d_rho} and {d_h} numbers, window={window}"
        )
    count = rows.shape[0]
    where = count, *_numbers(4 * count, torch.int64, rows), *_numbers(m, torch.int32, at), n, m
    shape = [*where, heads, heads // key_heads, d_rho, d_h, *scores.numbers(d_rho), int(scores.causal), window or 0]
    operands = _heads((m, heads, d_rho), dtype, q) + _heads((n, key_heads, d_rho), dtype, k)
    return shape, operands + _heads((n, key_heads, d_h), dtype, v)


# ── packed weights ──────────────────────────────────────────────────────────────────────────────────────────────────

PACKED = {"Q8_0": 0, "Q4_0": 1, "Q4_1": 2, "BF16": 3, "MXFP4": 9}
PACKED_DTYPE = torch.float32  # of their products
BYTES_OF_BLOCK = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "BF16": 64, "MXFP4": 17}
NUMBERS_OF_BLOCK = 32
ROUNDED = ("Q8_0", "Q4_0", "Q4_1")  # whose products with activations rounded to 8 bits have a kernel


def packed_product(kind: str, a: Tensor, data: Tensor, out: Tensor) -> None:
    """out (n, f_out) = a (n, f_in) wᵗ; data (f_out, bytes per row), contiguous; float32"""
    _call("packed_product", PACKED_DTYPE, *_packed(kind, a, data, out))


def rounded_product(kind: str, a: Tensor, data: Tensor, out: Tensor) -> None:
    """The same, with a rounded to 8 bits; kinds of ROUNDED"""
    if kind not in ROUNDED:
        raise HandgradError(f"no product of rounded activations with {kind}: it has those with {', '.join(ROUNDED)}")
    _check(_call("rounded_product", PACKED_DTYPE, *_packed(kind, a, data, out)))


def _packed(kind: str, a: Tensor, data: Tensor, out: Tensor) -> list[int]:
    (n, f_in), f_out = a.shape, data.shape[0]
    if f_in % NUMBERS_OF_BLOCK:
        raise _unfit(a, (n, f_in // NUMBERS_OF_BLOCK * NUMBERS_OF_BLOCK), PACKED_DTYPE)
    size = f_out * (f_in // NUMBERS_OF_BLOCK) * BYTES_OF_BLOCK[kind]
    weights = _numbers(size, torch.uint8, data)
    rows = _rows((n, f_in), PACKED_DTYPE, a), _rows((n, f_out), PACKED_DTYPE, out)
    return [PACKED[kind], n, f_in, f_out, *rows[0], *weights, *rows[1]]


# What can be unpacked: its number in packed.c, and the numbers and bytes of a block.
UNPACKED = {
    "Q8_0": (0, 32, 34), "Q4_0": (1, 32, 18), "Q4_1": (2, 32, 20), "Q5_0": (4, 32, 22), "Q5_1": (5, 32, 24),
    "Q4_K": (6, 256, 144), "Q5_K": (7, 256, 176), "Q6_K": (8, 256, 210), "MXFP4": (9, 32, 17),
}  # fmt: skip


def unpacks(kind: str, data: Tensor, out: Tensor) -> bool:
    """Whether `packed_unpack` can be called with these."""
    if kind not in UNPACKED or not library.allowed() or library.load(PACKED_DTYPE) is None:
        return False
    kernel = out.dtype in (torch.float32, torch.bfloat16) and out.is_cpu and out.is_contiguous()
    return kernel and data.is_cpu and data.is_contiguous()


def packed_unpack(kind: str, data: Tensor, out: Tensor) -> None:
    """Bytes → the numbers `out`, float32 or rounded to bfloat16, both contiguous"""
    number, numbers, size = UNPACKED[kind]
    blocks = out.numel() // numbers
    exact = out.dtype is torch.float32
    given = _numbers(blocks * size, torch.uint8, data)
    result = _numbers(blocks * numbers, torch.float32 if exact else torch.bfloat16, out)
    _call("packed_unpack", PACKED_DTYPE, number, blocks, *given, *result, int(exact))


# ── results ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check(found: int, wrong: str = "") -> None:
    """What a kernel returned: 0, NO_MEMORY, or WRONG_TABLE before it computed anything (common.h)."""
    if found == 1:
        raise MemoryError("no memory for the buffers of a kernel")
    if found:
        raise HandgradError(wrong)

"""Products of a few rows with low-bit weights: handgrad's kernel, which rounds activations to 8 bits, against those of
torch, on which the choice of the kernel rests. Part of `generate`.

All take and return float32; those that compute with bfloat16 activations convert. Every layer has separate weights, so
that they come from memory, as in a network."""

import warnings
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from handgrad.kernels import library
from handgrad.ops import packed

from .attempts import Attempts, MissingError, WrongError
from .measure import take_turns, timed_rows
from .row import Row
from .sizes import Size

REFERENCE = "torch, float32"
GROUP = 32  # numbers that share a scale in torch's 4 bits, as in ours
# 1.5 times the relative error of a product with normally distributed weights. A step of 8 bits is 1/127 of the largest
# number of a scale, at most 3.5 σ: an error of 3.5 / 127 / √12 = 0.8 %, and about as much for activations of 8 bits. A step
# of 4 bits is 1/15 of the range of 32 numbers, on average 4.1 σ: 4.1 / 15 / √12 = 7.9 %.
LARGEST_ERROR = {8: 0.017, 4: 0.12}
Product = Callable[[Tensor], Tensor]
NOTE = (
    "low-bit products: one product with every layer; ratio: best time of float32 ÷ that of this one; weights are random, and"
    " the error of every product is checked"
)


def cases(size: Size) -> dict[str, Callable[[Attempts], list[Row]]]:
    return {
        case_name(bits, rows, size): partial(products, bits, rows, size)
        for bits in KERNELS
        for rows in size.low_bit_rows
    }


def case_name(bits: int, rows: int, size: Size) -> str:
    layers, f_out, f_in = size.low_bit_layers
    return f"products, {bits} bits, {layers} layers of {f_out} by {f_in}, rows×{rows}"


def products(bits: int, rows: int, size: Size, attempts: Attempts) -> list[Row]:
    """Time all kernels of as many bits in turns, after their results have been compared with those of float32."""
    a = torch.randn(rows, size.low_bit_layers[2], generator=torch.Generator().manual_seed(rows))
    layers = attempts.collect({name: partial(packed_layers, pack, size) for name, pack in KERNELS[bits].items()})
    for name, made in layers.items():
        attempts(name, partial(check, made, a, size, bits))
    runs = {name: partial(multiply, made, a) for name, made in layers.items()}
    timings = take_turns(runs, size.generate_rounds, attempts)
    found = timed_rows("generate", case_name(bits, rows, size), rows, KERNELS[bits], timings, REFERENCE, attempts)
    for row in found:
        row.note = NOTE
    return found


def multiply(layers: list[Product], a: Tensor) -> None:
    """One product with every layer."""
    for product in layers:
        product(a)


def check(layers: list[Product], a: Tensor, size: Size, bits: int) -> None:
    """Raise if the first layer's product has a larger error than rounding explains."""
    expected = a @ weights(size)[0].t()
    error = float((layers[0](a) - expected).norm() / expected.norm())
    if error > LARGEST_ERROR[bits]:
        raise WrongError(f"the product has an error of {error:.1%}; not timed")


@cache
def weights(size: Size) -> list[Tensor]:
    layers, f_out, f_in = size.low_bit_layers
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(f_out, f_in, generator=generator) for _ in range(layers)]


@cache
def packed_layers(pack: Callable[[Tensor], Product], size: Size) -> list[Product]:
    return [pack(w) for w in weights(size)]


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_float32(w: Tensor) -> Product:
    return lambda a: torch.nn.functional.linear(a, w)


def ours(kind: str, w: Tensor) -> Product:
    if library.load(torch.float32) is None:
        raise MissingError("there is no C compiler for handgrad's kernels")
    data = packed.pack(w, kind)
    return lambda a: packed.rounded_product(a, data, kind)


def linear_dynamic(w: Tensor) -> Product:
    """Weights and activations of 8 bits; a scale for every output, and one for the activations."""
    scales = w.abs().amax(1).double() / 127
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch will remove such tensors
        rounded = torch.quantize_per_channel(w, scales, torch.zeros(len(w), dtype=torch.int64), 0, torch.qint8)
    prepacked = torch.ops.quantized.linear_prepack(rounded, None)
    return lambda a: torch.ops.quantized.linear_dynamic(a, prepacked)  # type: ignore[no-any-return]


def int8pack(dtype: torch.dtype, w: Tensor) -> Product:
    """Weights of 8 bits with a scale for every output."""
    scales = w.abs().amax(1) / 127
    q, scales = (w / scales[:, None]).round().to(torch.int8), scales.to(dtype)
    return lambda a: torch._weight_int8pack_mm(a.to(dtype), q, scales).float()


def int4pack(dtype: torch.dtype, w: Tensor) -> Product:
    """Weights of 4 bits, (q − 8) scale + zero, with both for 32 numbers of an output."""
    groups = w.view(len(w), -1, GROUP)
    low, high = groups.aminmax(dim=2, keepdim=True)
    scale = (high - low) / 15
    q = ((groups - low) / scale).round().to(torch.int32).view(w.shape)
    data = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 2)
    both = torch.cat([scale, low + 8 * scale], 2).transpose(0, 1).contiguous().to(dtype)
    return lambda a: torch.ops.aten._weight_int4pack_mm_for_cpu(a.to(dtype), data, GROUP, both).float()  # type: ignore[no-any-return]


KERNELS: dict[int, dict[str, Callable[[Tensor], Product]]] = {
    8: {
        "handgrad": partial(ours, "Q8_0"),
        REFERENCE: in_float32,
        "torch, linear_dynamic": linear_dynamic,
        "torch, int8pack, bfloat16": partial(int8pack, torch.bfloat16),
        "torch, int8pack, float32": partial(int8pack, torch.float32),
    },
    4: {
        "handgrad": partial(ours, "Q4_1"),
        REFERENCE: in_float32,
        "torch, int4pack, bfloat16": partial(int4pack, torch.bfloat16),
        "torch, int4pack, float32": partial(int4pack, torch.float32),
    },
}

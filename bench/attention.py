"""Attention alone, forward and backward, against torch's kernels: long sequences, batches of short ones, several widths of
heads, grouped queries."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from handgrad.ops import attention

from .attempts import Attempts
from .compete import compare
from .measure import take_turns, timed_rows
from .row import Row
from .sizes import AttentionShape, Size

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
LIBRARY = "library kernel"
FORWARD, BACKWARD = "forward", "backward"
RESULTS = {FORWARD: ("a",), BACKWARD: ("∂q", "∂k", "∂v")}


class Inputs(NamedTuple):
    q: Tensor  # (n, h, w)
    k: Tensor  # (n, h_kv, w)
    v: Tensor
    delta: Tensor


def case_name(direction: str, shape: AttentionShape) -> str:
    groups = "" if shape.kv_heads == shape.heads else f" on {shape.kv_heads}"
    return f"{direction}, {shape.heads} heads of {shape.width}{groups}, {shape.sequences}×{shape.tokens}"


def cases(size: Size) -> dict[str, Callable[[Attempts], list[Row]]]:
    """The backward pass of every shape, then the forward pass."""
    return {
        case_name(direction, shape): partial(measure, direction, shape, size)
        for direction in (BACKWARD, FORWARD)
        for shape in size.attention
    }


def measure(direction: str, shape: AttentionShape, size: Size, attempts: Attempts) -> list[Row]:
    inputs = make_inputs(shape)
    ours, library = {FORWARD: (our_forward, library_forward), BACKWARD: (our_backward, library_backward)}[direction]
    makers = {"handgrad": ours, LIBRARY: library}
    runs = attempts.collect({name: partial(maker, shape, inputs) for name, maker in makers.items()})
    found = attempts.collect(runs)
    error: float | None = None
    if len(found) == 2:
        results = zip(found["handgrad"], found[LIBRARY], RESULTS[direction], strict=True)
        pairs = [(by_head(x, shape), y, what) for x, y, what in results]
        error = attempts("handgrad", lambda: max(compare(*pair) for pair in pairs))
    tokens = shape.sequences * shape.tokens
    in_a_row = 10 if tokens <= 1024 and size.rounds > 1 else 1  # so short that one alone is mostly noise
    rounds = min(size.rounds, 12 if tokens > 2048 else 40)
    timings = take_turns(runs, rounds, attempts, in_a_row)
    errors = {"handgrad": error, LIBRARY: 0.0}
    return timed_rows("attention", case_name(direction, shape), tokens, errors, timings, LIBRARY, attempts, errors)


def make_inputs(shape: AttentionShape) -> Inputs:
    """q, k and v as views of one tensor, as a fused projection returns them."""
    generator = torch.Generator().manual_seed(0)
    n, h, kv, w = shape.sequences * shape.tokens, shape.heads, shape.kv_heads, shape.width
    packed = torch.randn(n, h + 2 * kv, w, generator=generator)
    q, k, v = packed.split([h, kv, kv], 1)
    return Inputs(q, k, v, torch.randn(n, h, w, generator=generator))


Results = tuple[Tensor, ...]


def our_forward(shape: AttentionShape, x: Inputs) -> Callable[[], Results]:
    spans = attention.spans_of((shape.tokens,) * shape.sequences)
    return lambda: (attention.forward(x.q, x.k, x.v, spans)[0],)


def our_backward(shape: AttentionShape, x: Inputs) -> Callable[[], Results]:
    spans = attention.spans_of((shape.tokens,) * shape.sequences)
    _, saved = attention.forward(x.q, x.k, x.v, spans)
    grads = torch.empty(len(x.q), shape.heads + 2 * shape.kv_heads, shape.width)
    into = grads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)

    def run() -> Results:
        attention.backward(x.delta, saved, spans, into)
        return tuple(into)

    return run


def by_head(x: Tensor, shape: AttentionShape) -> Tensor:
    """(B · T, h, w) → (B, h, T, w), a view"""
    return x.unflatten(0, (shape.sequences, shape.tokens)).transpose(1, 2)


def library_forward(shape: AttentionShape, x: Inputs) -> Callable[[], Results]:
    q, k, v = (by_head(y, shape) for y in (x.q, x.k, x.v))
    grouped = shape.kv_heads < shape.heads
    return lambda: (F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped),)


def library_backward(shape: AttentionShape, x: Inputs) -> Callable[[], Results]:
    """torch's kernel has as many key heads as query heads: grouped keys are repeated, and their gradients summed, as by
    autograd."""
    repeat = shape.heads // shape.kv_heads
    q, k, v, delta = (by_head(y, shape) for y in x)
    k, v = (y.repeat_interleave(repeat, 1) if repeat > 1 else y for y in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)

    def run() -> Results:
        grads = KERNEL(delta, q, k, v, out, lse, 0.0, True)
        if repeat > 1:
            grads = (grads[0], *(y.unflatten(1, (-1, repeat)).sum(2) for y in grads[1:]))
        return tuple(grads)

    return run

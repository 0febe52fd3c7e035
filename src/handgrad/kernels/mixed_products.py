"""Products of operands rounded to bfloat16: by our kernel, or by torch where that is faster.

Under a switch of the process torch rounds the operands of float32 products, but only if oneDNN has instructions for
them (AMX) and no dimension is small; otherwise it silently multiplies in float32. So torch is a candidate only where
its results are seen to be products of rounded operands, and narrow products are always ours. Which one is faster is
measured once on a machine and stored in the cache, so that the machine keeps its bits; a run records it.
HANDGRAD_MIXED_PRODUCTS=own or torch decides by hand.

Both need the compiled kernels, which compute everything else in mixed precision: processors with AMX have AVX512_BF16.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import HandgradError, shown
from ..files.atomic import write_text
from ..machine import AMX_VARIABLE, amx_is_doubtful
from . import calls, library

OWN, TORCH = "own", "torch"
VARIABLE = "HANDGRAD_MIXED_PRODUCTS"
NARROW = 64  # a product with a smaller dimension is ours
PROBED = (NARROW, NARROW, NARROW), (65, 131, 97), (96, 512, 130)
SUMS = 1e-6  # largest error of float32 sums, relative to sums of absolute products; without rounding it is above 1e-4
TIMED, ROUNDS = (512, 768, 768), 6

_of_run: ContextVar[str] = ContextVar("mixed_products", default="")  # "": that of the machine
_switching = threading.Lock()


def product(
    a: Tensor, b: Tensor, out: Tensor, add: bool = False, bias: Tensor | None = None, branch: calls.Branch | None = None
) -> None:
    """`calls.mixed_product`, by the kernel or by torch."""
    if (_of_run.get() or choice()) == TORCH and min(*a.shape, b.shape[1]) >= NARROW:
        _by_torch(a, b, out, add, bias, branch)
    else:
        calls.mixed_product(a, b, out, add, bias, branch)


@contextlib.contextmanager
def using(chosen: str) -> Iterator[None]:
    """In this context `chosen` multiplies; \"\": the choice of this machine."""
    token = _of_run.set(chosen)
    try:
        yield
    finally:
        _of_run.reset(token)


@cache
def choice() -> str:
    """OWN or TORCH: given by the user, stored on this machine, or measured now."""
    given = os.environ.get(VARIABLE, "")
    if given not in ("", OWN, TORCH):
        raise HandgradError(f"{VARIABLE} must be {OWN} or {TORCH}, not {shown(given)}")
    if given == TORCH and not torch_rounds():
        raise HandgradError(
            f"{VARIABLE}={TORCH} needs products of rounded operands, and torch has none on this machine: unset it"
        )
    if given or not torch_rounds():
        return given or OWN
    path = library.path_beside(torch.bfloat16, f".torch-{torch.__version__}")
    with contextlib.suppress(OSError):
        if (stored := path.read_bytes().decode(errors="replace")) in (OWN, TORCH):
            return stored
    found = _faster()
    with contextlib.suppress(OSError):
        write_text(path, found, follow=False)
    return found


@cache
def torch_rounds() -> bool:
    """Whether torch's products under the switch are those of rounded operands: every orientation, written and added."""
    if amx_is_doubtful() and AMX_VARIABLE not in os.environ:
        return False  # trying it could end the process
    return all(_rounds(*shape) for shape in PROBED)


def _rounds(m: int, n: int, w: int) -> bool:
    a, b, before = _random((m, n), (n, w), (m, w))
    exact, size = a.bfloat16().double() @ b.bfloat16().double(), a.double().abs() @ b.double().abs()
    for x, y in ((a, b), (a, b.t().contiguous().t()), (a.t().contiguous().t(), b)):
        for add in (False, True):
            out = before.clone()
            _by_torch(x, y, out, add)
            if not ((out - add * before.double() - exact).abs() <= SUMS * (size + before.abs())).all():
                return False
    return True


def _random(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]


@contextlib.contextmanager
def switched() -> Iterator[None]:
    """Let torch round the operands of float32 products. The switch is that of the process: one thread at a time, so
    that each restores what it found; torch may also round what another thread multiplies meanwhile."""
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _switching:
        before = setting.fp32_precision
        setting.fp32_precision = "bf16"
        try:
            yield
        finally:
            setting.fp32_precision = before


def _by_torch(
    a: Tensor, b: Tensor, out: Tensor, add: bool = False, bias: Tensor | None = None, branch: calls.Branch | None = None
) -> None:
    a, b, wide = a.float(), b.float(), out if out.dtype is torch.float32 else torch.empty_like(out, dtype=torch.float32)
    with switched():
        wide.addmm_(a, b, beta=int(add))
    if branch is not None:
        wide.addmm_(*(x.bfloat16().float() for x in branch))  # too narrow for the switch
    if bias is not None:
        wide.add_(bias)
    if wide is not out:
        out.copy_(wide)


def _faster() -> str:
    """The faster one in the three products of a layer, with operands as in training; in turn: load hits both."""
    m, n, w = TIMED
    a, weight, delta, a_i, delta_i, grad = _random((m, n), (n, w), (m, w), (m, w), (m, n), (n, w))
    a, delta = a.bfloat16(), delta.bfloat16()
    multipliers = [(OWN, calls.mixed_product), (TORCH, _by_torch)]
    seconds = {OWN: math.inf, TORCH: math.inf}
    for _ in range(ROUNDS):
        for name, multiply in multipliers:
            start = time.perf_counter()
            multiply(a, weight, a_i)
            multiply(delta, weight.t(), delta_i)
            multiply(a.t(), delta, grad, add=True)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
        multipliers.reverse()
    return min(seconds, key=lambda name: seconds[name])

"""The shapes and the precision that the functions take. Kernels read tensors by address, so a wrong shape must not reach
them."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import MIXED, check_choice
from ..errors import HandgradError, HandgradWarning
from ..model.precision import without_mixing


def mixes(precision: str | None, **tensors: Tensor | None) -> bool:
    """Whether products of these tensors round their operands to bfloat16: in mixed precision, unless this machine has none,
    which is said."""
    check_choice(precision, None)
    if precision != MIXED:
        return False
    for name, x in tensors.items():
        if x is not None and x.dtype != torch.float32:
            raise HandgradError(f"mixed precision needs float32 tensors, and {name} is {x.dtype}: {name}.float()")
        if x is not None and torch.is_autocast_enabled(x.device.type):
            raise HandgradError(
                "mixed precision and autocast both choose what is rounded: leave out precision='mixed', or autocast, which"
                " bf16=True of a Trainer is too"
            )
    if line := without_mixing(precision):
        warnings.warn(HandgradWarning(line), stacklevel=4)
    return not line


def check_norm(a: Tensor, **gains: Tensor) -> None:
    """Require a (…, d), and gains and biases (d)."""
    width = _width(a)
    for name, x in gains.items():
        _expect(name, x, (width,))
    if "b" in gains and a.dtype.itemsize > 2:  # LayerNorm takes wider gains for narrow inputs; RMSNorm takes any
        _expect_dtype(a, **gains)


def check_linear(
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor | None = None,
    up: Tensor | None = None,
    magnitude: Tensor | None = None,
    in_out: bool = False,
) -> None:
    """Require a (…, f_in), weight (f_out, f_in), or (f_in, f_out) if `in_out`, down (r, f_in) and up (f_out, r), others
    (f_out)."""
    width = _width(a)
    if weight.ndim != 2 or weight.shape[0 if in_out else 1] != width:
        wanted = f"({width}, f_out)" if in_out else f"(f_out, {width})"
        raise HandgradError(f"weight has the shape {tuple(weight.shape)}; an input {tuple(a.shape)} needs {wanted}")
    f_out = weight.shape[1 if in_out else 0]
    _expect_dtype(a, weight=weight, bias=bias)
    _expect("bias", bias, (f_out,))
    _expect("magnitude", magnitude, (f_out,))
    if (down is None) != (up is None):
        raise HandgradError("a low-rank branch has two factors: give both down and up")
    if down is None or up is None:
        if magnitude is not None:
            raise HandgradError("a magnitude needs a low-rank branch: give down and up")
        return
    rank = down.shape[0] if down.ndim else 0
    _expect("down", down, (rank, width))
    _expect("up", up, (f_out, rank))


def check_activation(name: str, known: Sequence[str]) -> None:
    """Require one of the functions that have a hand-derived backward pass."""
    if name not in known:
        raise HandgradError(f"unknown activation {name!r}; choose one of {', '.join(known)}")


def check_gate(gate: Tensor, up: Tensor | None) -> None:
    """Require gate and up (…, f), or gate (…, 2 f)."""
    width = _width(gate)
    if up is not None:
        _expect("up", up, tuple(gate.shape))
    elif width % 2:
        raise HandgradError(f"gate and up side by side have an even width, not {gate.shape[-1]}")


def check_heads(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    n_heads: int,
    n_kv_heads: int,
    rotation: tuple[Tensor, Tensor] | None,
) -> None:
    """Require q (…, h d_ρ), k (…, h_kv d_ρ) and v (…, h_kv d_h), or all three side by side in q; cos and sin (n, d_ρ/2)."""
    if n_heads < 1 or n_kv_heads < 1 or n_heads % n_kv_heads:
        raise HandgradError(f"n_kv_heads={n_kv_heads} does not divide n_heads={n_heads}")
    if (k is None) != (v is None):
        raise HandgradError("give q, k and v, or q alone with all three side by side")
    parts = n_heads if k is not None else n_heads + 2 * n_kv_heads
    width = _width(q) // parts
    if q.shape[-1] != parts * width or not width:
        raise HandgradError(f"queries of width {q.shape[-1]} cannot be divided into {parts} heads")
    if not q.numel():
        raise HandgradError(f"q has the shape {tuple(q.shape)}: attention needs at least one token")
    if k is not None and v is not None:
        _expect_dtype(q, k=k, v=v)
        _expect("k", k, (*q.shape[:-1], n_kv_heads * width))
        _expect("v", v, (*q.shape[:-1], max(1, _width(v) // n_kv_heads) * n_kv_heads))
    if rotation is not None:
        if width % 2:
            raise HandgradError(
                f"rotary positions turn pairs of features: the width of a head must be even, not {width}"
            )
        for name, x in zip(("cos", "sin"), rotation, strict=True):
            _expect(name, x, (q.shape[:-1].numel(), width // 2))


def _width(x: Tensor) -> int:
    if x.ndim == 0:
        raise HandgradError("the input is a single number; its last dimension must be the features")
    if x.layout is not torch.strided:
        raise HandgradError("the input is a sparse tensor; convert it with x.to_dense()")
    if not x.shape[-1]:
        raise HandgradError(
            f"the input has the shape {tuple(x.shape)}: its last dimension must have at least one feature"
        )
    return x.shape[-1]


def _expect_dtype(a: Tensor, **others: Tensor | None) -> None:
    """Under autocast the function converts them."""
    for name, x in others.items():
        if x is not None and x.dtype != a.dtype and not torch.is_autocast_enabled(a.device.type):
            raise HandgradError(f"{name} is {x.dtype} and the input {a.dtype}: convert one of them, x.to({x.dtype})")


def _expect(name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is not None and tuple(x.shape) != shape:
        raise HandgradError(f"{name} has the shape {tuple(x.shape)}; the other arguments need {shape}")

"""Rotary positions: y = m R(t) x and Δ_x = m R(t)ᵗ Δ_y, which is the rotation by the opposite angles.

    x, y, Δ  (n, h, d_ρ)      positions  (n)      θ  (w/2)      cos, sin  (n, w/2), with the factor m

The first w features of a head are rotated, the others stay; w = d_ρ in most models. A plane holds the features i and
i + w/2, or `neighbors`, 2i and 2i + 1.

The tables are float32, as in Hugging Face's models, or float64 for a float64 model. bfloat16 is rotated in float32, so
that only results are rounded; `dtype` is that of y where mixed precision has it as an operand.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import HandgradError
from ..kernels import calls
from .rope_scaling import ROPE_TYPES, UNSCALED, Scaling

ENTRIES_AT_ONCE = 1 << 17  # so that the elementwise steps below work in the CPU cache


@lru_cache(maxsize=16)
def frequencies(
    d_rho: int,
    base: float,
    scaling: Scaling = UNSCALED,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    long: bool = False,
) -> tuple[Tensor, float]:
    """θ_i = base^(−2i/d_ρ), scaled, and the attention factor m by which cos and sin are multiplied. `long`: for sequences
    longer than the original context, which longrope scales differently."""
    if d_rho < 2 or d_rho % 2:
        raise ValueError(f"rotary positions need an even width of queries and keys, not {d_rho}")
    theta = 1 / base ** (torch.arange(0, d_rho, 2, dtype=dtype, device=device) / d_rho)
    if scaling.rope_type in (
        "default",
        "dynamic",
    ):  # dynamic changes the base beyond the context, which is never exceeded
        return theta, 1.0
    if scaling.rope_type == "linear":
        return theta / scaling.factor, 1.0
    if scaling.rope_type not in ROPE_TYPES:
        raise ValueError(f"unknown rope_type {scaling.rope_type!r}; choose one of {', '.join(ROPE_TYPES)}")
    n = scaling.original_max_position_embeddings
    if not n:
        raise ValueError(
            f"rope_type {scaling.rope_type!r} needs original_max_position_embeddings, the context trained on"
        )
    if scaling.rope_type == "longrope":
        factors = scaling.long_factor if long else scaling.short_factor
        if factors is None or len(factors) != len(theta):
            raise ValueError(f"longrope needs {len(theta)} short and long factors, one for each plane")
        return theta / theta.new_tensor(factors), _longrope_factor(scaling, n)
    if scaling.rope_type == "llama3":
        return _blend(theta, scaling.factor, _llama3_share(theta, scaling, n)), 1.0
    return _blend(theta, scaling.factor, _yarn_share(theta, base, scaling, n)), _attention_factor(scaling)


def angles(positions: Tensor, theta: Tensor, attention_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """m cos(θ_i t) and m sin(θ_i t) ∈ (n, d_ρ/2), in the dtype of θ"""
    angle = positions.to(theta.dtype)[:, None] * theta
    return angle.cos().mul_(attention_factor), angle.sin_().mul_(attention_factor)


def forward(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    into: Tensor | None = None,
    dtype: torch.dtype | None = None,
    neighbors: bool = False,
) -> Tensor:
    """y_i = x_i cos − x_j sin,  y_j = x_j cos + x_i sin, for the features i and j of each plane

    Written `into` this tensor, which may be x itself: less memory and less traffic."""
    if dtype not in (None, x.dtype):
        into = torch.empty(x.shape, dtype=dtype, device=x.device)
    return _rotate(x, cos, sin, 1, into, neighbors)


def backward(delta: Tensor, cos: Tensor, sin: Tensor, into: Tensor | None = None, neighbors: bool = False) -> Tensor:
    """Δ_x = m R(t)ᵗ Δ_y = m R(−t) Δ_y"""
    return _rotate(delta, cos, sin, -1, into, neighbors)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int, into: Tensor | None, neighbors: bool) -> Tensor:
    """The rotation by the angles (sign 1) or by the opposite ones (−1)."""
    if len(cos) not in (1, len(x)) or cos.shape != sin.shape:
        raise HandgradError(
            f"{len(x)} rows with angles of {tuple(cos.shape)} and {tuple(sin.shape)}: give one row for each"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if into is None else into
    width = 2 * cos.shape[1]
    if width < x.shape[-1]:
        if out is not x:
            out[..., width:].copy_(x[..., width:])
        _rotate(x[..., :width], cos, sin, sign, out[..., :width], neighbors)
        return out
    if (
        x.ndim == 3
        and len(x) == len(cos)
        and calls.fits(x, cos, sin, operands=(out,))
        and cos.is_contiguous()
        and sin.is_contiguous()
    ):
        calls.rotate(x, cos, sin, sign, out, neighbors)
        return out
    if sign < 0:
        sin = -sin
    both = cos.repeat_interleave(2, 1) if neighbors else torch.cat((cos, cos), 1)  # (n, w)
    rows = max(1, ENTRIES_AT_ONCE // x.shape[1:].numel())
    for part, result, c, s in zip(*(torch.split(tensor, rows) for tensor in (x, out, both, sin)), strict=True):
        if result.dtype == torch.bfloat16:
            wide, rotated = part.float(), torch.empty(part.shape, dtype=torch.float32, device=x.device)
        else:
            wide, rotated = part.clone() if result.data_ptr() == part.data_ptr() else part, result
        torch.mul(wide, c[:, None], out=rotated)  # the same angles for all heads
        (x_i, x_j), (y_i, y_j) = (_planes(tensor, neighbors) for tensor in (wide, rotated))
        y_i.addcmul_(x_j, s[:, None], value=-1)
        y_j.addcmul_(x_i, s[:, None])
        if rotated is not result:
            result.copy_(rotated)
    return out


def _planes(x: Tensor, neighbors: bool) -> tuple[Tensor, Tensor]:
    """The two features of every plane, views"""
    return (x[..., 0::2], x[..., 1::2]) if neighbors else x.chunk(2, -1)  # type: ignore[return-value]


def _blend(theta: Tensor, factor: float, share: Tensor) -> Tensor:
    """(1 − s) θ/f + s θ"""
    return (1 - share) * theta / factor + share * theta


def _llama3_share(theta: Tensor, scaling: Scaling, n: int) -> Tensor:
    """From 0 to 1 while the turns of a plane in n positions go from low_freq_factor to high_freq_factor."""
    turns = n / (2 * math.pi / theta)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp_(0, 1)


def _yarn_share(theta: Tensor, base: float, scaling: Scaling, n: int) -> Tensor:
    """From 1 to 0 between the planes with beta_fast and beta_slow turns in n positions."""
    d_rho = 2 * len(theta)
    first, last = (
        d_rho * math.log(n / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling.beta_fast or 32, scaling.beta_slow or 1)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d_rho - 1)
    width = last - first or 0.001  # Hugging Face's guard against a division by 0
    plane = torch.arange(len(theta), dtype=theta.dtype, device=theta.device)
    return 1 - ((plane - first) / width).clamp_(0, 1)


def _longrope_factor(scaling: Scaling, n: int) -> float:
    """m = √(1 + ln f/ln n), n the original context"""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return math.sqrt(1 + math.log(scaling.factor) / math.log(n)) if scaling.factor > 1 else 1.0


def _attention_factor(scaling: Scaling) -> float:
    """m = 0.1 ln f + 1, or the quotient of two of its kind"""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1)

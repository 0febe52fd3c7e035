"""The oracles: autograd, finite differences and a counter of operations.

CONTRIBUTING.md names the other files in which autograd may appear.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import HandgradError
from ..tolerances import FINITE_DIFFERENCE_TOLERANCE


def relative_error(ours: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """max|ours − expected| / max(max|expected|, floor); infinite if any entry is NaN or the shapes differ."""
    if ours.shape != expected.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    ours, expected = ours.detach().double(), expected.detach().double()
    difference = (ours - expected).abs().max().item()
    scale = max(expected.abs().max().item(), floor)
    if math.isnan(difference):
        return math.inf
    return difference if scale == 0 else difference / scale


def differentiate(f: Callable[..., Tensor], *inputs: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, ...]:
    """∂(upstream · f(inputs))/∂inputs by reverse-mode autograd; `upstream` is Δ_i, or 1 for a scalar f."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    # a checkpoint around the call counts the tensors that are saved within it: not these
    apart = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.enable_grad(), apart:
        out = f(*leaves)
        total = out.sum() if upstream is None else (out * upstream).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))


def loss_gradients(network: nn.Module, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """The loss that a PyTorch model computes of a batch, and by its own backward pass the gradient of every trainable
    parameter. `.grad` is left as it was."""
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    if not named:
        raise HandgradError("every parameter is frozen: set requires_grad=True on those that train")
    with torch.enable_grad():
        loss = getattr(network(**batch), "loss", None)
        if not isinstance(loss, Tensor):
            raise HandgradError("the model returned no loss for this batch: give what it needs for one, as labels")
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return loss.item(), {name: grad for name, grad in zip(named, grads, strict=True) if grad is not None}


def forward_mode(f: Callable[[Tensor], Tensor], x: Tensor, dx: Tensor) -> Tensor:
    """df for a given dx, by forward-mode autograd."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):  # raised inside torch.func.jvp
            warnings.simplefilter("ignore", kind)
        df: Tensor = torch.func.jvp(f, (x.detach(),), (dx,))[1]
    return df


def finite_difference(f: Callable[[Tensor], float], x: Tensor, direction: Tensor, step: float = 1e-3) -> float:
    """d f(x + s·direction)/ds at s = 0. Fourth-order central differences allow a large step, hence little rounding."""
    values = [f(torch.add(x, direction, alpha=k * step)) for k in (1, -1, 2, -2)]
    return (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step)


def direction_near(grad: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction plus the direction of `grad`: along an orthogonal one the derivative would be mere rounding."""
    direction = torch.randn(grad.shape, generator=generator, dtype=grad.dtype, device=grad.device)
    direction /= direction.norm()
    size = grad.norm().item()
    return direction if size == 0 else direction.add_(grad, alpha=1 / size)


def directional_error(
    f: Callable[[Tensor], float],
    x: Tensor,
    grad: Tensor,
    generator: torch.Generator,
    floor: float = 0.0,
    steps: Sequence[float] = (1e-3, 1e-4, 1e-5, 1e-6),
) -> float:
    """|⟨grad, u⟩ − finite difference of f along u| relative to ‖grad‖, for a random direction u."""
    u = direction_near(grad, generator)
    claimed = torch.dot(grad.reshape(-1), u.reshape(-1)).item()
    scale = max(grad.norm().item(), floor) or 1.0
    best = math.inf
    for step in steps:  # the best step depends on the curvature of f; a wrong gradient agrees with no step
        error = abs(claimed - finite_difference(f, x, u, step)) / scale
        best = min(best, math.inf if math.isnan(error) else error)
        if best < FINITE_DIFFERENCE_TOLERANCE / 10:
            break
    return best


def count_multiply_adds(f: Callable[[], object], batched: bool | None = None, attention_kernel: bool = False) -> int:
    """Number of multiply-adds in the matrix products of f: all of them, only the batched ones (attention's), or only the
    others. torch's counter reports two FLOP for each, and has to be told of products that are added in place, and of those
    inside torch's attention kernel if they are wanted: as if nothing were masked."""
    mapping: dict[object, Callable[..., int]] = dict.fromkeys(
        (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_), _flop_of_product
    )
    if attention_kernel:
        mapping[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu] = _flop_of_attention
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        f()
    total = 0
    for operator, flop in counter.get_flop_counts().get("Global", {}).items():
        if batched is None or batched == ("bmm" in str(operator)):
            total += flop
    return total // 2


def _flop_of_product(
    into: Sequence[int], a: Sequence[int], b: Sequence[int], *, out_shape: object = None, **options: object
) -> int:
    """Of shapes (…, n, f_in) and (…, f_in, f_out)"""
    return 2 * math.prod(a) * b[-1]


def _flop_of_attention(
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    *arguments: object,
    out_shape: object = None,
    **options: object,
) -> int:
    """q kᵗ and ρ v, of shapes (B, h, m, d_ρ), (B, h_kv, n, d_ρ) and (B, h_kv, n, d_h)"""
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])

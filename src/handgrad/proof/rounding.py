"""How much rounding in a narrower dtype may change a tensor.

The error that a dtype allows is measured, not fixed: the reference network runs several times in float64 with a random
rounding error of that dtype's size in every intermediate of both passes. A tensor in which much cancels is then allowed
more error than one in which nothing does.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..model.config import ModelConfig

SAMPLES = 4  # perturbed passes
STEPS = 4  # roundings between two intermediates of the reference: of a norm, a rotation, a softmax
MARGIN = 3.0  # times the largest error of the samples


class _Rounding(torch.autograd.Function):
    """Multiply by 1 + a random error in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: float, generator: torch.Generator) -> Tensor:
        ctx.size, ctx.generator = size, generator
        return perturbed(x, size, generator)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return perturbed(grad, ctx.size, ctx.generator), None, None


def perturbed(x: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """x with a random relative error of at most `size` in every entry."""
    errors = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device).mul_(2).sub_(1)
    return errors.mul_(size).add_(1).mul_(x)


def rounder(size: float, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """A function that perturbs an intermediate of the reference, and in the backward pass its error signal."""

    def change(x: Tensor) -> Tensor:
        return _Rounding.apply(x, size, generator)  # type: ignore[no-any-return,no-untyped-call]

    return change


def rounding_size(config: ModelConfig, tokens: int, dtype: torch.dtype) -> float:
    """The relative error of one intermediate: several roundings in the dtype, and the sums inside a product in float32 at
    least."""
    longest = max(config.d_model, config.hidden_width, config.n_heads * config.value_width, tokens)
    adding = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return math.sqrt(STEPS) * torch.finfo(dtype).eps / 2 + math.sqrt(longest) * adding / 2

"""The taps of a short convolution with their parameters. The arithmetic is `ops/short_conv.py`."""

import torch
from torch import Tensor, nn

from ...ops import linear, short_conv
from ...ops.short_conv import Borders
from ..passes.arguments import Pass
from .hookless import Hookless


class Taps(Hookless):
    """weight (d, 1, L) and bias (d), as torch's Conv1d of d groups has them"""

    def __init__(self, d: int, taps: int, bias: bool, device: torch.device | None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d, 1, taps, device=device))
        self.bias = nn.Parameter(torch.empty(d, device=device)) if bias else None

    @property
    def count(self) -> int:
        """L"""
        return self.weight.shape[2]

    def forward(self, z: Tensor, borders: Borders) -> Tensor:
        """z → c"""
        return short_conv.forward(z, self.weight, self.bias, borders)

    def backward(self, delta: Tensor, borders: Borders) -> Tensor:
        """Δ_c → Δ_z"""
        return short_conv.backward(delta, self.weight, borders)

    def accumulate(self, delta: Tensor, z: Tensor, borders: Borders, run: Pass) -> None:
        """Add ∂w and ∂b, from Δ_c and z, into `.grad`."""
        w, b = self.weight, self.bias
        if w.requires_grad:
            if run.examples is not None:
                run.examples.sums(w, short_conv.products(delta, z, borders))
            else:
                w.grad = short_conv.grad_w(delta, z, borders, w.grad)
        if b is not None and b.requires_grad:
            if run.examples is not None:
                run.examples.sums(b, delta)
            else:
                b.grad = linear.grad_b(delta, b.grad, b.dtype)

    @staticmethod
    def in_order(x: Tensor) -> Tensor:
        """The weight or its gradient (d, 1, L) → (L, d): row j multiplies the token j before"""
        return x[:, 0].flip(1).t()

    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        """The parameters by their letter."""
        return {"w": self.weight, "b": self.bias}

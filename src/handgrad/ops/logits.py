"""What some models do with the head's output before the softmax: y = s a, or c tanh(s a/c) where logits are capped.

    a = a_12, y, Δ  (m, V)      Δ_12 = s Δ_y, or s (1 − (y/c)²) ∘ Δ_y

Results overwrite what is given: (m, V) is the largest matrix of a pass.
"""

from typing import NamedTuple

from torch import Tensor


class LogitMap(NamedTuple):
    scale: float = 1.0  # s
    cap: float | None = None  # c

    @property
    def identity(self) -> bool:
        return self.scale == 1 and self.cap is None

    def forward(self, a: Tensor) -> Tensor:
        """y, in the place of a"""
        if self.cap is None:
            return a if self.identity else a.mul_(self.scale)
        return a.mul_(self.scale / self.cap).tanh_().mul_(self.cap)

    def backward(self, delta: Tensor, y: Tensor) -> Tensor:
        """Δ_12, in the place of Δ_y; y is lost if logits are capped"""
        if self.cap is None:
            return delta if self.identity else delta.mul_(self.scale)
        return delta.mul_(y.div_(self.cap).square_().neg_().add_(1).mul_(self.scale))

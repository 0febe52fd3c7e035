"""`Scores`: what a score of attention is, as kernels and torch compute it."""

import math
from typing import NamedTuple

from ..errors import HandgradError


class Scores(NamedTuple):
    """How a query and a key become a score, s = σ q·k or c tanh(s/c), and which keys a query sees."""

    causal: bool = True
    window: int | None = None  # keys that a query sees, itself included; None: all before it
    scale: float | None = None  # σ; None: 1/√d_ρ
    cap: float | None = None  # c, which no score exceeds; None: none

    def factor(self, d_rho: int) -> float:
        """σ"""
        return d_rho**-0.5 if self.scale is None else self.scale

    def numbers(self, d_rho: int) -> list[float]:
        """σ and c as kernels take them; no cap is 0."""
        factor, cap = self.factor(d_rho), self.cap
        if not 0 < factor < math.inf or (cap is not None and not 0 < cap < math.inf):
            raise HandgradError(f"scores with scale={self.scale} and cap={cap}: both must be numbers above 0")
        return [factor, cap or 0.0]

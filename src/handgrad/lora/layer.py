"""The LoRA layer: a linear layer with a low-rank branch added to it, and DoRA's magnitude."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model.layers.linear import Affine, Dtype, Linear
from ..model.passes.arguments import PLAIN, Pass
from ..model.passes.example_gradients import PieceExamples
from ..model.storage.weights import STORED, Weights
from ..ops import linear, lora


class Signals(NamedTuple):
    """The error signals that `backward` and `accumulate` share."""

    z: Tensor  # (n, f_out)   Δ ∘ m/c; Δ itself without a magnitude
    h: Tensor  # (n, r)   g


class LoRA(Affine):
    """A linear layer, which stays unchanged, with a low-rank branch added:

        y = base(a) + scale · ã d u
        y = (a w + scale · ã d u) ∘ m/c + b      with a magnitude m: DoRA; c are the norms of the columns of w + scale · d u

    ã is a after dropout. Masks depend on the dropout seed of the pass and on `salt`, a number unique to the layer: the
    backward pass draws the same masks again instead of storing them.
    """

    def __init__(
        self,
        base: Linear,
        rank: int,
        scale: float,
        *,
        dropout: float = 0.0,
        magnitude: bool = False,
        salt: int = 0,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.base = base
        self.scale, self.dropout, self.salt = scale, dropout, salt
        w = base.effective_weight()
        self.down = nn.Parameter(torch.empty(w.shape[0], rank, device=w.device, dtype=w.dtype))
        self.up = nn.Parameter(torch.zeros(rank, w.shape[1], device=w.device, dtype=w.dtype))
        nn.init.uniform_(self.down, -1 / math.sqrt(w.shape[0]), 1 / math.sqrt(w.shape[0]), generator)
        self.magnitude = nn.Parameter(self.column_norms().clone()) if magnitude else None

    def forward(
        self, a: Tensor, run: Pass = PLAIN, out: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        mask = self._mask(a, run)
        if self.magnitude is None:
            branch = lora.branch(lora.masked(a, mask), self.down, self.up, self.scale)
            return self.base.forward(a, run, out, dtype, branch)
        out = self._product(a, mask, run.weights, out).mul_(self._ratio(run.weights))
        b = self.base.added_bias()
        out = out if b is None else out.add_(b)
        return out if dtype is None else out.to(dtype)

    def add_branch(self, a: Tensor, into: Tensor) -> None:
        """Add scale · a d u to the output of the base."""
        lora.forward(a, self.down, self.up, self.scale, into=into)

    def upstream(self, delta: Tensor, run: Pass = PLAIN) -> "Signals":
        signal = delta if self.magnitude is None else delta * self._ratio(run.weights)
        if run.operand is not None:
            signal = signal.to(run.operand)  # once for the products that read it
        return Signals(signal, lora.upstream(signal, self.up, self.scale))

    def backward(
        self, delta: Tensor, run: Pass = PLAIN, into: Tensor | None = None, upstream: Any = None, dtype: Dtype = None
    ) -> Tensor:
        """The frozen layer still carries its part of Δ (R3)."""
        signal, of_h = upstream or self.upstream(delta, run)
        if run.dropout_seed is None or not self.dropout:
            return self.base.backward(signal, run, into, None, dtype, (of_h, self.down.t()))
        out = self.base.backward(signal, run, into)
        lora.backward(of_h.to(out.dtype), self.down, into=out, mask=self._mask(out, run))
        return out if dtype is None else out.to(dtype)

    def accumulate(self, delta: Tensor, a: Tensor, run: Pass = PLAIN, upstream: "Signals | None" = None) -> None:
        signal, of_h = upstream or self.upstream(delta, run)
        self.base.accumulate_weight(signal, a, run)
        self.base.accumulate_bias(delta, run)
        if run.examples is not None:
            self._measure(run.examples, delta, a, run, Signals(signal, of_h))
            return
        mask = self._mask(a, run)
        dropped = lora.masked(a, mask)
        if self.up.requires_grad:
            h = lora.project(dropped, self.down, self.scale)
            self.up.grad = lora.grad_u(signal, h, self.up.grad, self.up.dtype)
        if self.down.requires_grad:
            self.down.grad = lora.grad_d(of_h, dropped, self.down.grad, self.down.dtype)
        if self.magnitude is not None and self.magnitude.requires_grad:
            z, c = self._product(a, mask, run.weights), self.column_norms(run.weights)
            self.magnitude.grad = lora.grad_m(delta, z, c, self.magnitude.grad)

    def _measure(self, examples: PieceExamples, delta: Tensor, a: Tensor, run: Pass, signals: Signals) -> None:
        """Hand over the factors of ∂u = hᵗ Δ, ∂d = ãᵗ g and the rows of ∂m = Σ_tok Δ ∘ z / c."""
        mask = self._mask(a, run)
        dropped = lora.masked(a, mask)
        if self.up.requires_grad:
            examples.product(self.up, lora.project(dropped, self.down, self.scale), signals.z)
        if self.down.requires_grad:
            examples.product(self.down, dropped, signals.h)
        if self.magnitude is not None and self.magnitude.requires_grad:
            z, c = self._product(a, mask, run.weights), self.column_norms(run.weights)
            examples.sums(self.magnitude, delta * z / c)

    def effective_weight(self, weights: Weights = STORED) -> Tensor:
        w = self.base.effective_weight(weights) + self.scale * self.down @ self.up
        return w if self.magnitude is None else w * self._ratio(weights)

    def plain(self) -> Linear:
        return self.base

    def low_rank(self) -> list[tuple[Tensor, Tensor, float]] | None:
        return [(self.down, self.up, self.scale)] if self.magnitude is None else None

    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        return {"d": self.down, "u": self.up, "m": self.magnitude, **self.base.named_symbols()}

    def factors(self) -> list[nn.Parameter]:
        """The adapter's own parameters: down, up and, for DoRA, the magnitude."""
        return [p for p in (self.down, self.up, self.magnitude) if p is not None]

    def column_norms(self, weights: Weights = STORED) -> Tensor:
        """c (f_out). The backward pass treats it as a constant, as DoRA's authors do."""
        w = self.base.effective_weight(weights).detach()
        return lora.column_norms(w, self.down.detach(), self.up.detach(), self.scale)

    def _product(self, a: Tensor, mask: Tensor | None, weights: Weights, out: Tensor | None = None) -> Tensor:
        """z = a w + scale · ã d u"""
        branch = lora.branch(lora.masked(a, mask), self.down, self.up, self.scale)
        return linear.forward(a, self.base.effective_weight(weights), None, out, self.base.dtype, branch)

    def _ratio(self, weights: Weights) -> Tensor:
        assert self.magnitude is not None
        return self.magnitude / self.column_norms(weights)

    def _mask(self, like: Tensor, run: Pass) -> Tensor | None:
        if run.dropout_seed is None or not self.dropout:
            return None
        seed = (run.dropout_seed * 1_000_003 + self.salt) & (1 << 62) - 1
        if run.dropout_rows is None:
            return lora.mask(like, self.dropout, seed)
        first, count = run.dropout_rows
        return lora.mask(like.new_empty(count, like.shape[1]), self.dropout, seed)[first : first + len(like)]

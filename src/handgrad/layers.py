"""Thin modules that own parameters and call `ops`: `forward`, `backward` for the error signal, and `accumulate`, which adds
the gradients into `.grad`.

A frozen parameter (`requires_grad=False`) gets no gradient and no work. Nothing here remembers an activation: what a
backward pass needs, it is handed.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .ops import embedding, layernorm, linear, lora


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    """Stop training these. A gradient they have is discarded: an optimizer would still apply it."""
    for p in parameters:
        p.requires_grad_(False)
        p.grad = None


class Linear(nn.Module):
    """weight (f_in, f_out) as in the paper and in GPT-2's files; bias (f_out)"""

    def __init__(self, f_in: int, f_out: int, bias: bool = True, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(f_in, f_out, device=device))
        self.bias = nn.Parameter(torch.empty(f_out, device=device)) if bias else None

    def forward(self, a: Tensor, draw: int | None = None) -> Tensor:
        return linear.forward(a, self.weight, self.added())

    def backward(self, delta: Tensor, draw: int | None = None) -> Tensor:
        """Δ_i → Δ_{i−1}"""
        return linear.backward(delta, self.weight)

    def accumulate(self, delta: Tensor, a: Tensor, draw: int | None = None) -> None:
        """Δ_i and the input a_{i−1} → the gradients"""
        self.accumulate_weight(delta, a)
        self.accumulate_bias(delta)

    def accumulate_weight(self, delta: Tensor, a: Tensor) -> None:
        if self.weight.requires_grad:
            self.weight.grad = linear.grad_w(delta, a, self.weight.grad)

    def accumulate_bias(self, delta: Tensor) -> None:
        if self.bias is not None and self.bias.requires_grad:
            self.bias.grad = linear.grad_b(delta, self.bias.grad)

    def added(self) -> Tensor | None:
        """(f_out), what is added to the product"""
        return self.bias

    def effective_weight(self) -> Tensor:
        """(f_in, f_out), everything that multiplies the input."""
        return self.weight


class QueryKeyValue(Linear):
    """[w_q | w_k | w_v] side by side, of `queries`, `queries` and `values` columns, with the bias [b_q | b_k | b_v], or
    [b_q | b_v] without `key_bias`: b_k changes nothing (19), so its gradient is exactly 0 (29)."""

    def __init__(self, d: int, queries: int, values: int, key_bias: bool, device: torch.device | None = None):
        super().__init__(d, 2 * queries + values, device=device)
        self.queries = queries
        self.key_bias = key_bias
        if not key_bias:
            self.bias = nn.Parameter(torch.empty(queries + values, device=device))

    def added(self) -> Tensor | None:
        b: Tensor | None = self.bias
        if b is not None and not self.key_bias:
            b = torch.cat([b[: self.queries], b.new_zeros(self.queries), b[self.queries :]])
        return b

    def accumulate_bias(self, delta: Tensor) -> None:
        if self.bias is not None and self.bias.requires_grad:
            sums = delta.sum(0)  # (24), (32.a)
            if self.key_bias:
                sums[self.queries : 2 * self.queries] = 0  # (32.b); what is summed there is rounding (R32)
            else:
                sums = torch.cat([sums[: self.queries], sums[2 * self.queries :]])
            self.bias.grad = sums if self.bias.grad is None else self.bias.grad.add_(sums)


class Head(Linear):
    """The logits layer. weight (V, d) is w_11ᵗ: the orientation of the token embedding, with which it may be tied"""

    def __init__(self, weight: nn.Parameter, bias: bool, device: torch.device | None = None):
        nn.Module.__init__(self)
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(weight.shape[0], device=device)) if bias else None

    def forward(self, a: Tensor, draw: int | None = None) -> Tensor:
        return linear.forward(a, self.weight.t(), self.bias)

    def backward(self, delta: Tensor, draw: int | None = None) -> Tensor:
        """Δ_12 → Δ_11"""
        return linear.backward(delta, self.weight.t())

    def accumulate_weight(self, delta: Tensor, a: Tensor) -> None:
        """A tied weight's gradient is added to the embedding's own (R9)."""
        if self.weight.requires_grad:
            self.weight.grad = linear.grad_w(a, delta, self.weight.grad)  # (∂w_11)ᵗ = Δ_12ᵗ a_11

    def effective_weight(self) -> Tensor:
        return self.weight.t()


class LoRA(nn.Module):
    """A low-rank branch beside a linear layer, which stays as it is:

        y = base(a) + scale · ã d u
        y = (a w + scale · ã d u) ∘ m/c + b      with a magnitude m: DoRA; c are the norms of the columns of w + scale · d u

    ã is a, or with dropout what is left of it. Masks are drawn from `draw`, the seed of this pass, and `salt`, which
    tells the layers apart: the way up draws again what the way down drew, and nothing is kept.
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

    def forward(self, a: Tensor, draw: int | None = None) -> Tensor:
        kept = self._mask(a, draw)
        if self.magnitude is None:
            out = self.base.forward(a)
            lora.forward(_masked(a, kept), self.down, self.up, self.scale, into=out)
            return out
        out = self._product(a, kept).mul_(self._ratio())
        b = self.base.added()
        return out if b is None else out.add_(b)

    def backward(self, delta: Tensor, draw: int | None = None) -> Tensor:
        """The frozen path carries its part of Δ as ever (R3)."""
        signal = self._before_ratio(delta)
        out = self.base.backward(signal)
        g = lora.upstream(signal, self.up, self.scale)
        lora.backward(g, self.down, into=out, kept=self._mask(out, draw))
        return out

    def accumulate(self, delta: Tensor, a: Tensor, draw: int | None = None) -> None:
        signal = self._before_ratio(delta)
        self.base.accumulate_weight(signal, a)
        self.base.accumulate_bias(delta)
        kept = self._mask(a, draw)
        fed = _masked(a, kept)
        if self.up.requires_grad:
            self.up.grad = lora.grad_u(signal, torch.mm(fed, self.down), self.scale, self.up.grad)
        if self.down.requires_grad:
            self.down.grad = lora.grad_d(lora.upstream(signal, self.up, self.scale), fed, self.down.grad)
        if self.magnitude is not None and self.magnitude.requires_grad:
            z, c = self._product(a, kept), self.column_norms()
            self.magnitude.grad = lora.grad_m(delta, z, c, self.magnitude.grad)

    def effective_weight(self) -> Tensor:
        w = self.base.effective_weight() + self.scale * self.down @ self.up
        return w if self.magnitude is None else w * self._ratio()

    def column_norms(self) -> Tensor:
        """c (f_out). On the way up it counts as a constant, as DoRA's authors have it."""
        return lora.column_norms(
            self.base.effective_weight().detach(), self.down.detach(), self.up.detach(), self.scale
        )

    def _product(self, a: Tensor, kept: Tensor | None) -> Tensor:
        """z = a w + scale · ã d u"""
        z = linear.forward(a, self.base.effective_weight(), None)
        lora.forward(_masked(a, kept), self.down, self.up, self.scale, into=z)
        return z

    def _ratio(self) -> Tensor:
        assert self.magnitude is not None
        return self.magnitude / self.column_norms()

    def _before_ratio(self, delta: Tensor) -> Tensor:
        """Δ ∘ m/c, the error signal of z; Δ itself without a magnitude"""
        return delta if self.magnitude is None else delta * self._ratio()

    def _mask(self, like: Tensor, draw: int | None) -> Tensor | None:
        if draw is None or not self.dropout:
            return None
        return lora.mask(like, self.dropout, (draw * 1_000_003 + self.salt) & (1 << 62) - 1)


def _masked(a: Tensor, kept: Tensor | None) -> Tensor:
    return a if kept is None else a * kept


class LayerNorm(nn.Module):
    """weight and bias (d)"""

    def __init__(self, d: int, eps: float, device: torch.device | None = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d, device=device))
        self.bias = nn.Parameter(torch.empty(d, device=device))

    def forward(self, a: Tensor) -> tuple[Tensor, layernorm.Saved]:
        return layernorm.forward(a, self.weight, self.bias, self.eps)

    def again(self, saved: layernorm.Saved) -> tuple[Tensor, Tensor]:
        """ā and the output, from the saved statistics"""
        a_bar = layernorm.normalized(saved)
        return a_bar, layernorm.affine(a_bar, self.weight, self.bias)

    def backward(self, delta: Tensor, a_bar: Tensor, inv_sigma: Tensor) -> Tensor:
        if self.weight.requires_grad:
            self.weight.grad = layernorm.grad_w(delta, a_bar, self.weight.grad)
        if self.bias.requires_grad:
            self.bias.grad = layernorm.grad_b(delta, self.bias.grad)
        return layernorm.backward(delta, a_bar, inv_sigma, self.weight)


class Embedding(nn.Module):
    """weight (rows, d)"""

    def __init__(self, rows: int, d: int, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, d, device=device))

    def backward(self, delta: Tensor, ids: Tensor) -> None:
        if self.weight.requires_grad:
            self.weight.grad = embedding.grad_w(delta, ids, self.weight, self.weight.grad)

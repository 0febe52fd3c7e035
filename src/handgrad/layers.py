"""Thin modules that own parameters and call `ops`: `forward`, `backward` for the error signal, and `accumulate`, which adds
the gradients into `.grad`.

A frozen parameter (`requires_grad=False`) gets no gradient and no work. Nothing here remembers an activation: what a
backward pass needs, it is handed.
"""

import math

import torch
from torch import Tensor, nn

from .ops import embedding, layernorm, linear, lora


class Linear(nn.Module):
    """weight (f_in, f_out) as in the paper and in GPT-2's files; bias (f_out)"""

    def __init__(self, f_in: int, f_out: int, bias: bool = True, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(f_in, f_out, device=device))
        self.bias = nn.Parameter(torch.empty(f_out, device=device)) if bias else None

    def forward(self, a: Tensor) -> Tensor:
        return linear.forward(a, self.weight, self.bias)

    def backward(self, delta: Tensor) -> Tensor:
        """Δ_i → Δ_{i−1}"""
        return linear.backward(delta, self.weight)

    def accumulate(self, delta: Tensor, a: Tensor) -> None:
        """Δ_i and the input a_{i−1} → the gradients"""
        if self.weight.requires_grad:
            self.weight.grad = linear.grad_w(delta, a, self.weight.grad)
        if self.bias is not None and self.bias.requires_grad:
            self.bias.grad = linear.grad_b(delta, self.bias.grad)

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

    def forward(self, a: Tensor) -> Tensor:
        b: Tensor | None = self.bias
        if b is not None and not self.key_bias:
            b = torch.cat([b[: self.queries], b.new_zeros(self.queries), b[self.queries :]])
        return linear.forward(a, self.weight, b)

    def accumulate(self, delta: Tensor, a: Tensor) -> None:
        if self.weight.requires_grad:
            self.weight.grad = linear.grad_w(delta, a, self.weight.grad)
        if self.bias is not None and self.bias.requires_grad:
            sums = delta.sum(0)  # (24), (32.a)
            if self.key_bias:
                sums[self.queries : 2 * self.queries] = 0  # (32.b); what is summed there is rounding (R32)
            else:
                sums = torch.cat([sums[: self.queries], sums[2 * self.queries :]])
            self.bias.grad = sums if self.bias.grad is None else self.bias.grad.add_(sums)


class Head(nn.Module):
    """The logits layer. weight (V, d) is w_11ᵗ: the orientation of the token embedding, with which it may be tied"""

    def __init__(self, weight: nn.Parameter, bias: bool, device: torch.device | None = None):
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(weight.shape[0], device=device)) if bias else None

    def forward(self, a: Tensor) -> Tensor:
        return linear.forward(a, self.weight.t(), self.bias)

    def backward(self, delta: Tensor) -> Tensor:
        """Δ_12 → Δ_11"""
        return linear.backward(delta, self.weight.t())

    def accumulate(self, delta: Tensor, a: Tensor) -> None:
        """A tied weight's gradient is added to the embedding's own (R9)."""
        if self.weight.requires_grad:
            self.weight.grad = linear.grad_w(a, delta, self.weight.grad)  # (∂w_11)ᵗ = Δ_12ᵗ a_11
        if self.bias is not None and self.bias.requires_grad:
            self.bias.grad = linear.grad_b(delta, self.bias.grad)

    def effective_weight(self) -> Tensor:
        return self.weight.t()


class LoRA(nn.Module):
    """A low-rank branch beside a linear layer, which stays as it is: y = base(a) + scale · a d u"""

    def __init__(self, base: Linear | Head, rank: int, scale: float):
        super().__init__()
        self.base = base
        self.scale = scale
        w = base.effective_weight()
        self.down = nn.Parameter(torch.empty(w.shape[0], rank, device=w.device, dtype=w.dtype))
        self.up = nn.Parameter(torch.zeros(rank, w.shape[1], device=w.device, dtype=w.dtype))
        nn.init.kaiming_uniform_(self.down.t(), a=math.sqrt(5))

    def forward(self, a: Tensor) -> Tensor:
        out: Tensor = self.base.forward(a)
        lora.forward(a, self.down, self.up, self.scale, into=out)
        return out

    def backward(self, delta: Tensor) -> Tensor:
        """The frozen path carries its part of Δ as ever (R3)."""
        out = self.base.backward(delta)
        lora.backward(lora.upstream(delta, self.up, self.scale), self.down, into=out)
        return out

    def accumulate(self, delta: Tensor, a: Tensor) -> None:
        self.base.accumulate(delta, a)
        if self.up.requires_grad:
            self.up.grad = lora.grad_u(delta, torch.mm(a, self.down), self.scale, self.up.grad)
        if self.down.requires_grad:
            self.down.grad = lora.grad_d(lora.upstream(delta, self.up, self.scale), a, self.down.grad)

    def effective_weight(self) -> Tensor:
        return self.base.effective_weight() + self.scale * self.down @ self.up


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

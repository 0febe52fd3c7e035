"""Modules that own parameters and call `ops`: `forward`, `backward` for the error signal, `accumulate` for the gradients.

A frozen parameter (`requires_grad=False`) gets no gradient and costs nothing. No module stores activations: the caller
passes what a backward pass needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..ops import embedding, layernorm, linear
from .passes import PLAIN, Pass


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    """Freeze parameters and discard their gradients, which an optimizer would still apply."""
    for p in parameters:
        p.requires_grad_(False)
        p.grad = None


class Affine(nn.Module, ABC):
    """a → a w + b: the interface that `Linear` and an adapter around it share, so that no caller needs to know which it
    has. `dropout` is the share of its input that a layer drops while training."""

    dropout = 0.0

    @abstractmethod
    def forward(self, a: Tensor, run: Pass = PLAIN) -> Tensor:
        """a_{i−1} → a_i"""

    @abstractmethod
    def backward(self, delta: Tensor, run: Pass = PLAIN) -> Tensor:
        """Δ_i → Δ_{i−1}"""

    @abstractmethod
    def accumulate(self, delta: Tensor, a: Tensor, run: Pass = PLAIN) -> None:
        """Add the parameters' gradients, from Δ_i and the input a_{i−1}, into `.grad`."""

    @abstractmethod
    def effective_weight(self) -> Tensor:
        """(f_in, f_out), everything that multiplies the input"""

    @abstractmethod
    def plain(self) -> "Linear":
        """The linear layer itself, without an adapter."""

    @abstractmethod
    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        """The parameters by the letter the paper gives them: w and b, and an adapter's d, u and m."""

    @property
    def adapted(self) -> bool:
        """Whether the layer has an adapter."""
        return self.plain() is not self


class Linear(Affine):
    """weight (f_in, f_out) as in the paper and in GPT-2's files; bias (f_out)"""

    def __init__(self, f_in: int, f_out: int, bias: bool = True, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(f_in, f_out, device=device))
        self.bias = nn.Parameter(torch.empty(f_out, device=device)) if bias else None

    def forward(self, a: Tensor, run: Pass = PLAIN) -> Tensor:
        return linear.forward(a, self.weight, self.added_bias())

    def backward(self, delta: Tensor, run: Pass = PLAIN) -> Tensor:
        return linear.backward(delta, self.weight)

    def accumulate(self, delta: Tensor, a: Tensor, run: Pass = PLAIN) -> None:
        self.accumulate_weight(delta, a)
        self.accumulate_bias(delta)

    def accumulate_weight(self, delta: Tensor, a: Tensor) -> None:
        if self.weight.requires_grad:
            self.weight.grad = linear.grad_w(delta, a, self.weight.grad)

    def accumulate_bias(self, delta: Tensor) -> None:
        if self.bias is not None and self.bias.requires_grad:
            self.bias.grad = linear.grad_b(delta, self.bias.grad)

    def added_bias(self) -> Tensor | None:
        """(f_out), what is added to the product"""
        return self.bias

    def effective_weight(self) -> Tensor:
        return self.weight

    def set_effective_weight(self, w: Tensor) -> None:
        """Copy w (f_in, f_out) into the weight, in whichever orientation it is stored."""
        self.weight.copy_(w)

    def plain(self) -> "Linear":
        return self

    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        return {"w": self.weight, "b": self.bias}


class QueryKeyValue(Linear):
    """[w_q | w_k | w_v] side by side, of `queries`, `queries` and `values` columns, with the bias [b_q | b_k | b_v], or
    [b_q | b_v] without `key_bias`: b_k changes nothing (19), so its gradient is exactly 0 (29)."""

    def __init__(self, d: int, queries: int, values: int, key_bias: bool, device: torch.device | None = None):
        super().__init__(d, 2 * queries + values, device=device)
        self.queries = queries
        self.key_bias = key_bias
        if not key_bias:
            self.bias = nn.Parameter(torch.empty(queries + values, device=device))

    def added_bias(self) -> Tensor | None:
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
    """The logits layer. weight (V, d) is w_11ᵗ: the orientation of the token embedding, to which it may be tied."""

    def __init__(self, weight: nn.Parameter, bias: bool, device: torch.device | None = None):
        nn.Module.__init__(self)
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(weight.shape[0], device=device)) if bias else None

    def forward(self, a: Tensor, run: Pass = PLAIN) -> Tensor:
        return linear.forward(a, self.weight.t(), self.bias)

    def backward(self, delta: Tensor, run: Pass = PLAIN) -> Tensor:
        """Δ_12 → Δ_11"""
        return linear.backward(delta, self.weight.t())

    def accumulate_weight(self, delta: Tensor, a: Tensor) -> None:
        """A tied weight's gradient is added to the embedding's own (R9)."""
        if self.weight.requires_grad:
            self.weight.grad = linear.grad_w(a, delta, self.weight.grad)  # (∂w_11)ᵗ = Δ_12ᵗ a_11

    def effective_weight(self) -> Tensor:
        return self.weight.t()

    def set_effective_weight(self, w: Tensor) -> None:
        self.weight.copy_(w.t())


class LayerNorm(nn.Module):
    """weight and bias (d)"""

    def __init__(self, d: int, eps: float, device: torch.device | None = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d, device=device))
        self.bias = nn.Parameter(torch.empty(d, device=device))

    def forward(self, a: Tensor) -> tuple[Tensor, layernorm.Saved]:
        return layernorm.forward(a, self.weight, self.bias, self.eps)

    def rebuild_output(self, saved: layernorm.Saved) -> tuple[Tensor, Tensor]:
        """ā and the output, from the saved statistics"""
        a_bar = layernorm.normalized(saved)
        return a_bar, layernorm.affine(a_bar, self.weight, self.bias)

    def backward(self, delta: Tensor, a_bar: Tensor, inv_sigma: Tensor) -> Tensor:
        if self.weight.requires_grad:
            self.weight.grad = layernorm.grad_w(delta, a_bar, self.weight.grad)
        if self.bias.requires_grad:
            self.bias.grad = layernorm.grad_b(delta, self.bias.grad)
        return layernorm.backward(delta, a_bar, inv_sigma, self.weight)

    def trains(self) -> bool:
        return self.weight.requires_grad or self.bias.requires_grad

    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        return {"w": self.weight, "b": self.bias}


class Embedding(nn.Module):
    """weight (rows, d)"""

    def __init__(self, rows: int, d: int, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, d, device=device))

    def backward(self, delta: Tensor, ids: Tensor) -> None:
        if self.weight.requires_grad:
            self.weight.grad = embedding.grad_w(delta, ids, self.weight, self.weight.grad)

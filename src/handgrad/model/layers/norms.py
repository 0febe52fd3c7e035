"""The two norms with their parameters. Both return what `backward` needs as `saved`, and rebuild their output from it."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import layernorm, rmsnorm
from ..config import ModelConfig
from ..passes.arguments import PLAIN, Pass
from ..passes.example_gradients import PieceExamples
from .hookless import Hookless


class Norm(Hookless, ABC):
    """The interface of a norm. gain (d) multiplies the normalized input ā: weight, or 1 + weight."""

    weight: nn.Parameter
    offset = 0.0

    @property
    def gain(self) -> Tensor:
        return self.weight + self.offset if self.offset else self.weight

    @property
    def extras(self) -> tuple[str, ...]:
        """What distinguishes it from the paper's norm, for the step that it is."""
        no_bias = isinstance(self, LayerNorm) and self.bias is None
        return *(("gain 1 + w",) if self.offset else ()), *(("no bias",) if no_bias else ())

    @abstractmethod
    def forward(self, a: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Any]:
        """a → the output, in this dtype if it is given, and what `rebuild_output` and `backward` need"""

    @abstractmethod
    def rebuild_output(self, saved: Any, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """ā and the output, from the saved statistics"""

    @abstractmethod
    def backward(self, delta: Tensor, a_bar: Tensor, saved: Any, run: Pass = PLAIN) -> Tensor:
        """Δ_i → Δ_{i−1}; the parameters' gradients are added into `.grad`"""

    @abstractmethod
    def statistics(self, saved: Any) -> dict[str, Tensor]:
        """The statistics of every row by name, and ā, for a recorder."""

    @abstractmethod
    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        """The parameters by their letter."""

    @property
    def trains(self) -> bool:
        return any(p is not None and p.requires_grad for p in self._parameters.values())

    def _measure(self, examples: PieceExamples, delta: Tensor, a_bar: Tensor) -> None:
        """Hand over the gradients of the parameters, token by token; those of several heads are added."""
        for name, p in self.named_symbols().items():
            if p is not None and p.requires_grad:
                x = delta if name == "b" else delta * a_bar
                examples.sums(p, x if x.ndim == 2 else x.sum(1))


class LayerNorm(Norm, nn.LayerNorm):  # torch's too: by its class transformers.Trainer exempts it from weight decay
    """weight and bias (d), or no bias; an `offset` as RMSNorm has it"""

    def __init__(
        self, d: int, eps: float, device: torch.device | None = None, *, bias: bool = True, offset: float = 0.0
    ):
        super().__init__(d, eps, bias=bias, device=device)
        self.offset = offset

    def forward(  # type: ignore[override]
        self, a: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, layernorm.Saved]:
        return layernorm.forward(a, self.gain, self.bias, self.eps, dtype)

    def rebuild_output(self, saved: layernorm.Saved, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        return layernorm.rebuild(saved, self.gain, self.bias, dtype)

    def backward(self, delta: Tensor, a_bar: Tensor, saved: layernorm.Saved, run: Pass = PLAIN) -> Tensor:
        if run.examples is not None:
            self._measure(run.examples, delta, a_bar)
        else:
            if self.weight.requires_grad:
                self.weight.grad = layernorm.grad_w(delta, a_bar, self.weight.grad)
            if self.bias is not None and self.bias.requires_grad:
                self.bias.grad = layernorm.grad_b(delta, self.bias.grad)
        return layernorm.backward(delta, a_bar, saved.inv_sigma, self.gain)

    def statistics(self, saved: layernorm.Saved) -> dict[str, Tensor]:
        return {"mu": saved.mu, "sigma": 1 / saved.inv_sigma, "a_bar": layernorm.normalized(saved)}

    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        return {"w": self.weight, "b": self.bias}


class RMSNorm(Norm):
    """weight (d); over (n, d), or over every head of (n, h, d_ρ). With an `offset` of 1 the weight is what the gain differs
    from 1 by."""

    def __init__(self, d: int, eps: float, device: torch.device | None = None, *, offset: float = 0.0):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(d, device=device))

    def forward(self, a: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, rmsnorm.Saved]:
        return rmsnorm.forward(a, self.gain, self.eps, dtype)

    def rebuild_output(self, saved: rmsnorm.Saved, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        return rmsnorm.rebuild(saved, self.gain, dtype)

    def backward(self, delta: Tensor, a_bar: Tensor, saved: rmsnorm.Saved, run: Pass = PLAIN) -> Tensor:
        if run.examples is not None:
            self._measure(run.examples, delta, a_bar)
        elif self.weight.requires_grad:
            self.weight.grad = rmsnorm.grad_w(delta, a_bar, self.weight.grad)
        return rmsnorm.backward(delta, a_bar, saved.inv_rms, self.gain)

    def statistics(self, saved: rmsnorm.Saved) -> dict[str, Tensor]:
        return {"rms": 1 / saved.inv_rms, "a_bar": rmsnorm.normalized(saved)}

    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        return {"w": self.weight}


def norm_of(config: ModelConfig, device: torch.device | None) -> LayerNorm | RMSNorm:
    """A norm of the residual stream, as this model has them."""
    if config.norm == "layer":
        return LayerNorm(config.d_model, config.eps, device, bias=config.norm_bias, offset=config.gain_offset)
    return RMSNorm(config.d_model, config.eps, device, offset=config.gain_offset)

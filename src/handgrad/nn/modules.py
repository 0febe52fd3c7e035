"""Drop-in modules: torch's own layers, and the parts of a transformer, with hand-derived backward passes.

`LayerNorm`, `RMSNorm` and `Linear` are torch's classes with another `forward`: same arguments, same state_dict.
Modules that multiply have an attribute `precision`: None, or "mixed" as in `functions.linear`; those within one follow it.
"""

import math

import torch
from torch import Tensor, nn

from ..checks import check_choice
from ..errors import HandgradError
from ..model.config import ACTIVATIONS, GATES
from ..ops import rotary
from . import functions
from .arguments import check_activation
from .heads import attention
from .loss import linear_cross_entropy


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm over the last dimension, with weight and bias."""

    def forward(self, input: Tensor) -> Tensor:
        if len(self.normalized_shape) != 1 or self.bias is None:
            raise HandgradError("LayerNorm has a hand-derived backward for one dimension with weight and bias only")
        return functions.layer_norm(input, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm over the last dimension, with weight."""

    def forward(self, x: Tensor) -> Tensor:
        if len(self.normalized_shape) != 1 or self.weight is None:
            raise HandgradError("RMSNorm has a hand-derived backward for one dimension with weight only")
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return functions.rms_norm(x, self.weight, eps)


class Multiplies(nn.Module):
    _precision: str | None = None

    @property
    def precision(self) -> str | None:
        return self._precision

    @precision.setter
    def precision(self, value: str | None) -> None:
        check_choice(value, None)
        for module in self.modules():
            if isinstance(module, Multiplies):
                module._precision = value


class Linear(Multiplies, nn.Linear):
    """torch.nn.Linear"""

    def forward(self, input: Tensor) -> Tensor:
        return functions.linear(input, self.weight, self.bias, precision=self.precision)


class LoRALinear(Linear):
    """A linear layer, frozen, with a low-rank branch: y = a w + b + alpha/rank · ã d u; d is `down` (r, f_in), u is `up`
    (f_out, r)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int = 16,
        alpha: float | None = None,
        bias: bool = True,
        *,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        if rank < 1 or not 0 <= dropout < 1:
            raise HandgradError(f"rank={rank}, dropout={dropout}: a rank is at least 1, dropout at least 0 and below 1")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.requires_grad_(False)
        self.scale, self.dropout = (rank if alpha is None else alpha) / rank, dropout
        bound = 1 / math.sqrt(in_features)
        self.down = nn.Parameter(torch.empty(rank, in_features, device=device, dtype=dtype).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(out_features, rank, device=device, dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return functions.linear(
            input, self.weight, self.bias, down=self.down, up=self.up, scale=self.scale, dropout=dropout,
            precision=self.precision,
        )  # fmt: skip


class MLP(Multiplies):
    """(…, d) → g(a w_6 + b_6) w_8 + b_8; g is relu, gelu, gelu_tanh or relu2"""

    def __init__(self, d_model: int, d_hidden: int, activation: str = "gelu_tanh", bias: bool = True):
        super().__init__()
        check_activation(activation, ACTIVATIONS)
        self.activation = activation
        self.expand, self.contract = Linear(d_model, d_hidden, bias), Linear(d_hidden, d_model, bias)

    def forward(self, a: Tensor) -> Tensor:
        out: Tensor = self.contract(functions.activation(self.expand(a), self.activation))
        return out


class GatedMLP(Multiplies):
    """(…, d) → [g(a w_gate) ∘ a w_up] w_8; g is silu, gelu or gelu_tanh"""

    def __init__(self, d_model: int, d_hidden: int, activation: str = "silu", bias: bool = False):
        super().__init__()
        check_activation(activation, GATES)
        self.activation = activation
        self.gate, self.up = Linear(d_model, d_hidden, bias), Linear(d_model, d_hidden, bias)
        self.down = Linear(d_hidden, d_model, bias)

    def forward(self, a: Tensor) -> Tensor:
        out: Tensor = self.down(functions.gate(self.gate(a), self.up(a), self.activation))
        return out


class Attention(Multiplies):
    """Self-attention (B, T, d) → (B, T, d): causal, with grouped queries (n_kv_heads < n_heads), with a window of keys,
    with rotary positions if `rope_base` is given."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        d_head: int | None = None,
        causal: bool = True,
        window: int | None = None,
        rope_base: float | None = None,
        bias: bool = False,
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if n_heads % n_kv_heads:
            raise HandgradError(f"n_kv_heads={n_kv_heads} does not divide n_heads={n_heads}")
        if d_head is None and d_model % n_heads:
            raise HandgradError(f"d_model={d_model} is not divisible by n_heads={n_heads}: give d_head")
        d_head = d_model // n_heads if d_head is None else d_head
        if rope_base is not None and d_head % 2:
            raise HandgradError(f"rotary positions turn pairs of features: d_head must be even, not {d_head}")
        if window is not None and (window < 1 or not causal):
            raise HandgradError(f"window={window}: a window is at least 1, and only for causal attention")
        self.n_heads, self.n_kv_heads, self.d_head = n_heads, n_kv_heads, d_head
        self.causal, self.window, self.rope_base = causal, window, rope_base
        self.q, self.out = Linear(d_model, n_heads * d_head, bias), Linear(n_heads * d_head, d_model, bias)
        self.k, self.v = (Linear(d_model, n_kv_heads * d_head, bias) for _ in range(2))

    def forward(self, a: Tensor) -> Tensor:
        rotation = None
        if self.rope_base is not None:
            wide = torch.promote_types(a.dtype, torch.float32)
            theta, _ = rotary.frequencies(self.d_head, self.rope_base, dtype=wide, device=a.device)
            positions = torch.arange(a.shape[1], device=a.device).repeat(len(a))
            rotation = rotary.angles(positions, theta)
        q, k, v = self.q(a), self.k(a), self.v(a)
        heads = attention(
            q, k, v, self.n_heads, self.n_kv_heads, rotation=rotation, causal=self.causal, window=self.window,
            precision=self.precision,
        )  # fmt: skip
        out: Tensor = self.out(heads)
        return out


class LinearCrossEntropy(Multiplies, nn.Linear):
    """A logits layer with its loss: forward(a, targets) is the mean cross-entropy over the targets ≠ −100. The logits of
    all rows never exist together. weight (V, d)"""

    def __init__(self, in_features: int, n_vocab: int, bias: bool = False):
        super().__init__(in_features, n_vocab, bias)

    def forward(self, input: Tensor, targets: Tensor, n_targets: float | None = None) -> Tensor:  # type: ignore[override]
        given = input, self.weight, targets, self.bias
        return linear_cross_entropy(*given, n_targets=n_targets, precision=self.precision)

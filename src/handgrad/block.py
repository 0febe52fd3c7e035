"""One block of the paper's Table 2, read downwards in `forward` and upwards in `backward`.

    a_1 → a_2 norm → a_3 heads → a_4 projection → a_5 = a_1 + a_4
        → a_6 norm → a_7 expand → a_8 activation → a_9 contract → a_10 = a_5 + a_9

It keeps about 10·d numbers per token (a_1, q, k, v, a_3, a_5, a_7); norms and activations are computed again. `draw` is
the seed by which adapters drop parts of their input; without it nothing is dropped.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .config import GPTConfig
from .layers import LayerNorm, Linear, LoRA, QueryKeyValue
from .ops import activation, attention, layernorm

Record = Callable[[str, Tensor], None]  # given a name from the paper and the tensor that bears it


def ignore(name: str, value: Tensor) -> None:
    """The recorder that keeps nothing."""


class Saved(NamedTuple):
    """What a block keeps for its way back."""

    norm_1: layernorm.Saved  # holds a_1
    heads: attention.Saved  # holds q, k, v, a_3
    norm_5: layernorm.Saved  # holds a_5
    a_7: Tensor


class Attention(nn.Module):
    """c_attn is [w_q | w_k | w_v] side by side, (d, h(2 d_ρ + d_h)); c_proj is w_3."""

    def __init__(self, config: GPTConfig, device: torch.device | None):
        super().__init__()
        self.n_heads, self.causal = config.n_heads, config.causal
        self.queries, self.values = config.n_heads * config.query_width, config.n_heads * config.value_width
        self.c_attn: Linear | LoRA = QueryKeyValue(config.d_model, self.queries, self.values, config.key_bias, device)
        self.c_proj: Linear | LoRA = Linear(self.values, config.d_model, device=device)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(n, h(2 d_ρ + d_h)) → q, k (n, h, d_ρ) and v (n, h, d_h), views"""
        q, k, v = torch.split(qkv, [self.queries, self.queries, self.values], 1)
        n, h = len(qkv), self.n_heads
        return q.view(n, h, -1), k.view(n, h, -1), v.view(n, h, -1)

    def forward(
        self, a_2: Tensor, spans: attention.Spans, asking: Tensor | None, draw: int | None = None
    ) -> attention.Saved:
        q, k, v = self.split(self.c_attn.forward(a_2, draw))
        return attention.forward(q if asking is None else q[asking], k, v, spans, self.causal)[1]

    def backward(
        self, delta_3: Tensor, saved: attention.Saved, spans: attention.Spans, asking: Tensor | None
    ) -> Tensor:
        """Δ_3 → the error signal of q, k and v side by side. With [w_q | w_k | w_v]ᵗ it becomes Δ_2: there the three
        branches of (33) meet in one product."""
        delta_qkv = delta_3.new_empty(len(saved.k), 2 * self.queries + self.values)
        delta_q, delta_k, delta_v = self.split(delta_qkv)
        into = delta_q if asking is None else torch.empty_like(saved.q)
        attention.backward(delta_3.view_as(saved.a), saved, spans, self.causal, (into, delta_k, delta_v))
        if asking is not None:
            delta_q.zero_().index_copy_(0, asking, into)
        return delta_qkv


class MLP(nn.Module):
    """c_fc is w_6, c_proj is w_8."""

    def __init__(self, config: GPTConfig, device: torch.device | None):
        super().__init__()
        self.c_fc: Linear | LoRA = Linear(config.d_model, config.hidden_width, device=device)
        self.c_proj: Linear | LoRA = Linear(config.hidden_width, config.d_model, device=device)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, device: torch.device | None):
        super().__init__()
        self.g = config.activation
        self.ln_1 = LayerNorm(config.d_model, config.eps, device)
        self.attn = Attention(config, device)
        self.ln_2 = LayerNorm(config.d_model, config.eps, device)
        self.mlp = MLP(config, device)

    def forward(
        self,
        a_1: Tensor,
        spans: attention.Spans,
        asking: Tensor | None = None,
        record: Record = ignore,
        draw: int | None = None,
    ) -> tuple[Tensor, Saved]:
        """a_1 (n, d) → a_10 (n, d). If only the rows `asking` are wanted, as in the last block, where nothing but targets
        counts, everything after the keys and values is computed for them alone: a_10 (m, d)."""
        a_2, norm_1 = self.ln_1.forward(a_1)
        heads = self.attn.forward(a_2, spans, asking, draw)
        a_3 = heads.a.flatten(1)
        a_4 = self.attn.c_proj.forward(a_3, draw)
        a_5 = a_4 + (a_1 if asking is None else a_1[asking])
        a_6, norm_5 = self.ln_2.forward(a_5)
        a_7 = self.mlp.c_fc.forward(a_6, draw)
        a_8 = activation.forward(a_7, self.g)
        a_9 = self.mlp.c_proj.forward(a_8, draw)
        a_10 = a_5 + a_9
        if record is not ignore:
            for i, a in enumerate((a_1, a_2, a_3, a_4, a_5, a_6, a_7, a_8, a_9, a_10), 1):
                record(f"a_{i}", a)
            for name, x in zip("qkv", heads[:3], strict=True):
                record(name, x.transpose(0, 1))
            for i, norm in ((1, norm_1), (5, norm_5)):
                record(f"mu_{i}", norm.mu)
                record(f"sigma_{i}", 1 / norm.inv_sigma)
                record(f"a_bar_{i}", layernorm.normalized(norm))
        return a_10, Saved(norm_1, heads, norm_5, a_7)

    def backward(
        self,
        delta_10: Tensor,
        saved: Saved,
        spans: attention.Spans,
        asking: Tensor | None = None,
        lowest: bool = False,
        record: Record = ignore,
        draw: int | None = None,
    ) -> Tensor:
        """Δ_10 → Δ_1; the gradients of the block's parameters are added into `.grad`. Where the block is the `lowest`
        thing that trains, Δ_1 is not computed and what comes back means nothing."""
        norm_1, heads, norm_5, a_7 = saved
        delta_8 = self.mlp.c_proj.backward(delta_10, draw)  # Δ_9 = Δ_10
        delta_7, a_8 = activation.backward(delta_8, a_7, self.g)
        self.mlp.c_proj.accumulate(delta_10, a_8, draw)
        del a_8
        if record is ignore:
            del delta_8
        delta_6 = self.mlp.c_fc.backward(delta_7, draw)
        a_bar_5, a_6 = self.ln_2.again(norm_5)
        self.mlp.c_fc.accumulate(delta_7, a_6, draw)
        delta_5 = self.ln_2.backward(delta_6, a_bar_5, norm_5.inv_sigma).add_(delta_10)
        delta_3 = self.attn.c_proj.backward(delta_5, draw)  # Δ_4 = Δ_5
        self.attn.c_proj.accumulate(delta_5, heads.a.flatten(1), draw)
        delta_qkv = self.attn.backward(delta_3, heads, spans, asking)
        a_bar_1, a_2 = self.ln_1.again(norm_1)
        self.attn.c_attn.accumulate(delta_qkv, a_2, draw)
        if lowest and not self.ln_1.weight.requires_grad and not self.ln_1.bias.requires_grad:
            return delta_5
        delta_2 = self.attn.c_attn.backward(delta_qkv, draw)
        delta_1 = self.ln_1.backward(delta_2, a_bar_1, norm_1.inv_sigma)
        delta_1 = delta_1.add_(delta_5) if asking is None else delta_1.index_add_(0, asking, delta_5)
        if record is not ignore:
            deltas = (delta_1, delta_2, delta_3, delta_5, delta_5, delta_6, delta_7, delta_8, delta_10, delta_10)
            for i, delta in enumerate(deltas, 1):
                record(f"delta_{i}", delta)
            lengths = tuple(length for span in spans for length in (span.length,) * span.sequences)
            rho, signal = attention.maps(delta_3.view_as(heads.a), heads, lengths, self.attn.causal)
            record("rho", rho)
            record("delta_causal", signal)
            record("delta_raw", signal / math.sqrt(heads.q.shape[2]))
        return delta_1

    def trainable(self) -> bool:
        return any(p.requires_grad for p in self.parameters())

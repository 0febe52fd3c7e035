"""Multi-head self-attention with its parameters: q, k, v from one fused matrix. The arithmetic is `ops/attention.py`."""

import torch
from torch import Tensor, nn

from ..ops import attention
from .config import GPTConfig
from .layers import Affine, Linear, QueryKeyValue
from .passes import Pass


class Attention(nn.Module):
    """c_attn is [w_q | w_k | w_v] side by side, (d, h(2 d_ρ + d_h)); c_proj is w_3."""

    def __init__(self, config: GPTConfig, device: torch.device | None):
        super().__init__()
        self.n_heads, self.causal = config.n_heads, config.causal
        self.queries, self.values = config.n_heads * config.query_width, config.n_heads * config.value_width
        self.c_attn: Affine = QueryKeyValue(config.d_model, self.queries, self.values, config.key_bias, device)
        self.c_proj: Affine = Linear(self.values, config.d_model, device=device)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(n, h(2 d_ρ + d_h)) → q, k (n, h, d_ρ) and v (n, h, d_h), views"""
        q, k, v = torch.split(qkv, [self.queries, self.queries, self.values], 1)
        n, h = len(qkv), self.n_heads
        return q.view(n, h, -1), k.view(n, h, -1), v.view(n, h, -1)

    def forward(self, a_2: Tensor, run: Pass) -> attention.Saved:
        q, k, v = self.split(self.c_attn.forward(a_2, run))
        return attention.forward(q if run.query_rows is None else q[run.query_rows], k, v, run.spans, self.causal)[1]

    def backward(self, delta_3: Tensor, saved: attention.Saved, run: Pass) -> Tensor:
        """Δ_3 → the error signals of q, k and v side by side. The product with [w_q | w_k | w_v]ᵗ then sums the three
        branches of (33) into Δ_2."""
        delta_qkv = delta_3.new_empty(len(saved.k), 2 * self.queries + self.values)
        delta_q, delta_k, delta_v = self.split(delta_qkv)
        into = delta_q if run.query_rows is None else torch.empty_like(saved.q)
        attention.backward(delta_3.view_as(saved.a), saved, run.spans, self.causal, (into, delta_k, delta_v))
        if run.query_rows is not None:
            delta_q.zero_().index_copy_(0, run.query_rows, into)
        return delta_qkv

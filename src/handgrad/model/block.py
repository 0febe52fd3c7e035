"""One block of the paper's Table 2: downwards in `forward`, upwards in `backward`.

    a_1 → a_2 norm → a_3 heads → a_4 projection → a_5 = a_1 + a_4
        → a_6 norm → a_7 expand → a_8 activation → a_9 contract → a_10 = a_5 + a_9

It saves about 10·d numbers per token (a_1, q, k, v, a_3, a_5, a_7) and recomputes the outputs of norms and activation.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops import activation, attention, layernorm
from .attention import Attention
from .config import GPTConfig
from .layers import Affine, LayerNorm, Linear
from .passes import Pass


class Saved(NamedTuple):
    """What a block saves for its backward pass."""

    norm_1: layernorm.Saved  # holds a_1
    heads: attention.Saved  # holds q, k, v, a_3
    norm_5: layernorm.Saved  # holds a_5
    a_7: Tensor


class MLP(nn.Module):
    """c_fc is w_6, c_proj is w_8."""

    def __init__(self, config: GPTConfig, device: torch.device | None):
        super().__init__()
        self.c_fc: Affine = Linear(config.d_model, config.hidden_width, device=device)
        self.c_proj: Affine = Linear(config.hidden_width, config.d_model, device=device)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, device: torch.device | None):
        super().__init__()
        self.g = config.activation
        self.ln_1 = LayerNorm(config.d_model, config.eps, device)
        self.attn = Attention(config, device)
        self.ln_2 = LayerNorm(config.d_model, config.eps, device)
        self.mlp = MLP(config, device)

    def forward(self, a_1: Tensor, run: Pass) -> tuple[Tensor, Saved]:
        """a_1 (n, d) → a_10 (n, d), or (m, d) if the pass needs only some query rows: then everything after the keys and
        values is computed for those rows alone."""
        a_2, norm_1 = self.ln_1.forward(a_1)
        heads = self.attn.forward(a_2, run)
        a_3 = heads.a.flatten(1)
        a_4 = self.attn.c_proj.forward(a_3, run)
        a_5 = a_4 + (a_1 if run.query_rows is None else a_1[run.query_rows])
        a_6, norm_5 = self.ln_2.forward(a_5)
        a_7 = self.mlp.c_fc.forward(a_6, run)
        a_8 = activation.forward(a_7, self.g)
        a_9 = self.mlp.c_proj.forward(a_8, run)
        a_10 = a_5 + a_9
        if run.recording:
            for i, a in enumerate((a_1, a_2, a_3, a_4, a_5, a_6, a_7, a_8, a_9, a_10), 1):
                run.record(f"a_{i}", a)
            for name, x in zip("qkv", heads[:3], strict=True):
                run.record(name, x.transpose(0, 1))
            for i, norm in ((1, norm_1), (5, norm_5)):
                run.record(f"mu_{i}", norm.mu)
                run.record(f"sigma_{i}", 1 / norm.inv_sigma)
                run.record(f"a_bar_{i}", layernorm.normalized(norm))
        return a_10, Saved(norm_1, heads, norm_5, a_7)

    def backward(self, delta_10: Tensor, saved: Saved, run: Pass) -> Tensor:
        """Δ_10 → Δ_1; parameter gradients are added into `.grad`. Without `run.input_signal` Δ_1 is not computed, and the
        result has no meaning."""
        norm_1, heads, norm_5, a_7 = saved
        run.record("delta_10", delta_10)
        run.record("delta_9", delta_10)  # Δ_9 = Δ_10
        delta_8 = self.mlp.c_proj.backward(delta_10, run)
        run.record("delta_8", delta_8)
        delta_7, a_8 = activation.backward(delta_8, a_7, self.g)
        run.record("delta_7", delta_7)
        self.mlp.c_proj.accumulate(delta_10, a_8, run)
        del a_8, delta_8  # the largest tensors here
        delta_6 = self.mlp.c_fc.backward(delta_7, run)
        run.record("delta_6", delta_6)
        a_bar_5, a_6 = self.ln_2.rebuild_output(norm_5)
        self.mlp.c_fc.accumulate(delta_7, a_6, run)
        delta_5 = self.ln_2.backward(delta_6, a_bar_5, norm_5.inv_sigma).add_(delta_10)
        run.record("delta_5", delta_5)
        run.record("delta_4", delta_5)  # Δ_4 = Δ_5
        delta_3 = self.attn.c_proj.backward(delta_5, run)
        run.record("delta_3", delta_3)
        self.attn.c_proj.accumulate(delta_5, heads.a.flatten(1), run)
        if run.recording and run.query_rows is None:
            self._record_maps(delta_3, heads, run)
        delta_qkv = self.attn.backward(delta_3, heads, run)
        a_bar_1, a_2 = self.ln_1.rebuild_output(norm_1)
        self.attn.c_attn.accumulate(delta_qkv, a_2, run)
        if not run.input_signal and not self.ln_1.trains():
            return delta_5
        delta_2 = self.attn.c_attn.backward(delta_qkv, run)
        run.record("delta_2", delta_2)
        delta_1 = self.ln_1.backward(delta_2, a_bar_1, norm_1.inv_sigma)
        rows = run.query_rows
        delta_1 = delta_1.add_(delta_5) if rows is None else delta_1.index_add_(0, rows, delta_5)
        run.record("delta_1", delta_1)
        return delta_1

    def _record_maps(self, delta_3: Tensor, heads: attention.Saved, run: Pass) -> None:
        """Record ρ and its error signals, (h, n, n). Training never forms these matrices."""
        lengths = tuple(length for span in run.spans for length in (span.length,) * span.sequences)
        rho, signal = attention.maps(delta_3.view_as(heads.a), heads, lengths, self.attn.causal)
        run.record("rho", rho)
        run.record("delta_causal", signal)
        run.record("delta_raw", signal / math.sqrt(heads.q.shape[2]))

    def trains(self) -> bool:
        return any(p.requires_grad for p in self.parameters())

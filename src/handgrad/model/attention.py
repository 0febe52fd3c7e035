"""Multi-head self-attention with its parameters. The arithmetic is `ops/attention.py`.

a_2 → q, k, v → norms of q and k, if any → rotation, if any → heads a_3;   out is w_3
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import attention, rmsnorm, rotary
from . import branches
from .config import ModelConfig
from .layers import Affine, Linear, QueryKeyValue
from .norms import Norm, RMSNorm
from .parts import Parts, part
from .passes import Pass


class Saved(NamedTuple):
    """What the heads save for their backward pass."""

    heads: attention.Saved  # q, k, v, a_3 and the log-sum-exp
    q_norm: rmsnorm.Saved | None = None
    k_norm: rmsnorm.Saved | None = None


class Projected(NamedTuple):
    """Queries, keys and values as the heads read them: normalized and rotated, if the model does that."""

    q: Tensor  # (m, h, d_ρ)
    k: Tensor  # (n, h_kv, d_ρ)
    v: Tensor  # (n, h_kv, d_h)
    q_norm: rmsnorm.Saved | None = None
    k_norm: rmsnorm.Saved | None = None


class Attention(Parts):
    """Heads of queries, and as many or fewer of keys and values. q, k and v are separate layers or one, as the family
    has them."""

    q: Affine = part("q")
    k: Affine = part("k")
    v: Affine = part("v")
    qkv: Affine = part("qkv")
    out: Affine = part("out")
    q_norm: Norm = part("q_norm")
    k_norm: Norm = part("k_norm")

    def __init__(self, config: ModelConfig, i: int, device: torch.device | None):
        super().__init__()
        c, names = config, config.table.names
        self.n_heads, self.n_kv_heads = c.n_heads, c.kv_heads
        self.causal, self.window = c.causal, c.window_of(i)
        self.rotated, self.normed = c.rotated_block(i), c.qk_norm
        stored = c.table.stored
        widths = c.qkv_widths()
        self.inputs: tuple[str, ...] = ("qkv",) if "attn.qkv" in names else ("q", "k", "v")
        if self.inputs == ("qkv",):
            matters = c.positions == "rotary" or c.qk_norm
            fused = QueryKeyValue(c.d_model, widths, c.qkv_bias, c.key_bias, matters, device, stored=stored)
            self.add("qkv", names["attn.qkv"], fused)
        else:
            for letter, width in widths.items():
                layer = Linear(c.d_model, width, c.qkv_bias, device, stored=stored)
                self.add(letter, names[f"attn.{letter}"], layer)
        values = c.n_heads * c.value_width
        self.add("out", names["attn.out"], Linear(values, c.d_model, c.out_bias, device, stored=stored))
        if c.qk_norm:
            for letter in "qk":
                self.add(f"{letter}_norm", names[f"attn.{letter}_norm"], RMSNorm(c.query_width, c.eps, device))

    def projections(self) -> Sequence[Affine]:
        """The layers of q, k and v."""
        return [getattr(self, name) for name in self.inputs]

    def by_head(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(n, h d_ρ) and (n, h d_h) → (n, h, d_ρ) and (n, h, d_h), views"""
        return (
            q.view(len(q), self.n_heads, -1),
            k.view(len(k), self.n_kv_heads, -1),
            v.view(len(v), self.n_kv_heads, -1),
        )

    def project(self, a_2: Tensor, run: Pass) -> Projected:
        """a_2 → q, k and v"""
        q, k, v = self.by_head(*branches.forward(self.projections(), a_2, run, run.query_rows))
        q_norm = k_norm = None
        if self.normed:
            q, q_norm = self.q_norm.forward(q)
            k, k_norm = self.k_norm.forward(k)
        if self.rotated:
            q = rotary.forward(q, *run.query_rotation(), into=q)  # over what the projections computed for this alone
            k = rotary.forward(k, *run.key_rotation(), into=k)
        return Projected(q, k, v, q_norm, k_norm)

    def forward(self, a_2: Tensor, run: Pass) -> Saved:
        q, k, v, q_norm, k_norm = self.project(a_2, run)
        if run.cache is not None:
            return Saved(run.cache.attend(q, k, v, self.window))
        heads = attention.forward(q, k, v, run.spans, self.causal, self.window)[1]
        return Saved(heads, q_norm, k_norm)

    def backward(self, delta_3: Tensor, saved: Saved, a_2: Tensor, run: Pass, needs_input: bool) -> Tensor | None:
        """Δ_3 → the error signals of q, k and v, and the sum of their three branches, Δ_2 (33), if it is needed."""
        heads = saved.heads
        signals = branches.ErrorSignals.buffers(self.projections(), len(heads.k), delta_3, run.query_rows)
        into = self.by_head(*signals.parts)
        attention.backward(delta_3.view_as(heads.a), heads, run.spans, self.causal, into, self.window)
        return self.backward_projections(signals, saved.q_norm, saved.k_norm, a_2, run, needs_input)

    def backward_projections(
        self,
        signals: branches.ErrorSignals,
        q_norm: rmsnorm.Saved | None,
        k_norm: rmsnorm.Saved | None,
        a_2: Tensor,
        run: Pass,
        needs_input: bool = True,
    ) -> Tensor | None:
        """The error signals of q, k and v → Δ_2: back through rotation and norms, then the three branches."""
        into = self.by_head(*signals.parts)
        if self.rotated or self.normed:
            for i, norm, kept, rotation in (
                (0, "q_norm", q_norm, run.query_rotation), (1, "k_norm", k_norm, run.key_rotation)
            ):  # fmt: skip
                signal = rotary.backward(into[i], *rotation(), into=into[i]) if self.rotated else into[i]
                if self.normed:
                    layer: Norm = getattr(self, norm)
                    signal = layer.backward(signal, layer.rebuild_output(kept)[0], kept)
                    signals.replace(i, signal)
        return signals.backward(a_2, run, needs_input)

    def numbered(self) -> dict[str, Affine | Norm]:
        """The layers by the letter or number of their parameters: w_q, w_k, w_v, or all three as 2; w_3."""
        layers: dict[str, Affine | Norm] = {"2" if name == "qkv" else name: getattr(self, name) for name in self.inputs}
        norms: dict[str, Affine | Norm] = {n: getattr(self, n) for n in ("q_norm", "k_norm") if self.has(n)}
        return {**layers, **norms, "3": self.out}

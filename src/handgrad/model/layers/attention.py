"""Multi-head self-attention with its parameters. The arithmetic is `ops/attention.py`.

a_2 → q, k, v → norms of q and k, if any → rotation, if any → heads a_3 → projection a_4;   out is w_3
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops import attention, rmsnorm, rotary
from ..config import ModelConfig
from ..passes.arguments import Observer, Pass
from ..steps import Layer, Step
from . import attention_matrices as matrices
from . import branches
from .branches import BranchInput
from .linear import Affine, Linear, QueryKeyValue
from .norms import Norm, RMSNorm
from .parts import Parts, part


class Saved(NamedTuple):
    """What the branch saves for its backward pass."""

    heads: attention.Saved | matrices.Saved  # q, k, v, a_3 and the log-sum-exp; or ρ as a matrix
    a_3: Tensor  # (m, h d_h)
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

    def projected(self) -> tuple[str, str, str]:
        """The names of what the layers of q, k and v compute: x_q and x_k, if norm or rotation come before q and k."""
        return ("x_q", "x_k", "v") if self.rotated or self.normed else ("q", "k", "v")

    def by_head(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(n, h d_ρ) and (n, h d_h) → (n, h, d_ρ) and (n, h, d_h), views"""
        return (
            q.view(len(q), self.n_heads, -1),
            k.view(len(k), self.n_kv_heads, -1),
            v.view(len(v), self.n_kv_heads, -1),
        )

    def project(self, a_2: Tensor, run: Pass) -> Projected:
        """a_2 → q, k and v. In mixed precision they are rounded once, after norm and rotation."""
        dtype = None if run.cache is not None else run.operand  # the cache has the dtype of the stream
        direct = None if self.normed or self.rotated else dtype
        q, k, v = self.by_head(*branches.forward(self.projections(), a_2, run, run.query_rows, direct))
        q_norm = k_norm = None
        if self.normed:
            q, q_norm = self.q_norm.forward(q)
            k, k_norm = self.k_norm.forward(k)
        if self.rotated:
            # over what the projections computed for this alone
            q = rotary.forward(q, *run.query_rotation(), into=q, dtype=dtype)
            k = rotary.forward(k, *run.key_rotation(), into=k, dtype=dtype)
        if dtype is not None:
            q, k, v = (x.to(dtype) for x in (q, k, v))
        return Projected(q, k, v, q_norm, k_norm)

    def forward(self, a_2: Tensor, run: Pass) -> tuple[Tensor, Saved]:
        """a_2 → q, k, v → a_3 → a_4"""
        q, k, v, q_norm, k_norm = self.project(a_2, run)
        heads: attention.Saved | matrices.Saved
        if run.cache is not None:
            heads = run.cache.attend(q, k, v, self.window)
        elif run.edited:
            heads = matrices.forward(q, k, v, self.causal, self.window, run)
        else:
            heads = attention.forward(q, k, v, run.spans, self.causal, self.window)[1]
            if run.observer is not None:
                for name, x in zip("qkv", heads[:3], strict=True):
                    run.observer.note(name, x.transpose(0, 1))
        a_3 = heads.a.flatten(1)
        a_3 = run.at("a_3", a_3 if run.operand is None else a_3.to(run.operand))
        a_4 = run.at("a_4", self.out.forward(a_3, run))
        return a_4, Saved(heads, a_3, q_norm, k_norm)

    def backward(self, delta_4: Tensor, saved: Saved, a_2: BranchInput, run: Pass) -> Tensor | None:
        """Δ_4 → Δ_3 → the error signals of q, k and v → the sum of their three branches, Δ_2 (33), if it is needed."""
        upstream = self.out.upstream(delta_4, run)
        delta_3 = run.at("delta_3", self.out.backward(delta_4, run, None, upstream, run.operand))
        self.out.accumulate(delta_4, saved.a_3, run, upstream)
        heads = saved.heads
        n = len(delta_3) if run.query_rows is None else len(heads.k)
        signals = branches.ErrorSignals.buffers(self.projections(), n, delta_4, run.query_rows)
        into = self.by_head(*signals.parts)
        if isinstance(heads, matrices.Saved):
            matrices.backward(delta_3, heads, into, run)
        else:
            if run.observer is not None and run.query_rows is None:
                self._note_maps(delta_3, heads, run.observer, run.lengths)
            attention.backward(delta_3.view_as(heads.a), heads, run.spans, self.causal, into, self.window)
        return self.backward_projections(signals, saved, a_2, run)

    def _note_maps(self, delta_3: Tensor, heads: attention.Saved, observer: Observer, lengths: tuple[int, ...]) -> None:
        """Show ρ and its error signals, (h, n, n). Training never forms these matrices."""
        rho, signal = attention.maps(delta_3.view_as(heads.a), heads, lengths, self.causal, self.window)
        observer.note("rho", rho)
        observer.note("delta_causal", signal)
        observer.note("delta_raw", signal / math.sqrt(heads.q.shape[2]))

    def backward_projections(
        self, signals: branches.ErrorSignals, saved: Saved, a_2: BranchInput, run: Pass
    ) -> Tensor | None:
        """The error signals of q, k and v → Δ_2: back through rotation and norms, then the three branches."""
        into = self.by_head(*signals.parts)
        if self.rotated or self.normed:
            for i, norm, kept, rotation in (
                (0, "q_norm", saved.q_norm, run.query_rotation), (1, "k_norm", saved.k_norm, run.key_rotation)
            ):  # fmt: skip
                signal = rotary.backward(into[i], *rotation(), into=into[i]) if self.rotated else into[i]
                if self.normed:
                    layer: Norm = getattr(self, norm)
                    signal = layer.backward(signal, layer.rebuild_output(kept)[0], kept, run)
                    signals.replace(i, signal)
        if run.observer is not None:
            for i, (name, x) in enumerate(zip(self.projected(), self.by_head(*signals.parts), strict=True)):
                if not run.edited:
                    run.observer.note(f"delta_{name}", x.transpose(0, 1))
                elif name.startswith("x_"):  # the others were seen, and replaced, where the heads computed them
                    signals.replace(i, run.at(f"delta_{name}", x.transpose(0, 1)).transpose(0, 1).flatten(1))
        return signals.backward(a_2.tensor(), run, a_2.signal_needed)

    def steps(self) -> list[Step]:
        """a_2 → a_3 → a_4; the parameters of the first step are w_q, w_k, w_v, or all three as w_2."""
        layers: dict[str, Layer] = {"2" if name == "qkv" else name: getattr(self, name) for name in self.inputs}
        layers |= {name: getattr(self, name) for name in ("q_norm", "k_norm") if self.has(name)}
        return [
            Step("attention", "attention", ("a_2",), ("a_3",), layers, ("delta_raw", "delta_causal")),
            Step("projection", "linear", ("a_3",), ("a_4",), {"3": self.out}),
        ]

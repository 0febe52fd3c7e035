"""Multi-head self-attention with its parameters. The arithmetic is `ops/attention.py`.

a_2 → q, k, v → norms of q and k, if any → rotation, if any → heads a_3 → projection a_4;   out is w_3
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.calls import Scores
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
from .sinks import Sinks


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


def normalize(norm: Norm, x: Tensor) -> tuple[Tensor, Any]:
    """Queries or keys (n, h, d_ρ), every head by itself, or all together if the norm is as wide; and what is saved"""
    out, saved = norm.forward(x if len(norm.weight) == x.shape[2] else x.flatten(1))
    return out.view(x.shape), saved


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
        self.n_heads, self.n_kv_heads, self.q_width = c.n_heads, c.kv_heads, c.query_width
        self.scores = Scores(c.causal, c.window_of(i), c.attention_scale, c.score_cap)
        self.sinks = nn.Parameter(torch.empty(c.n_heads, device=device)) if c.sinks else None
        self.rotated, self.normed = c.rotated_block(i), c.qk_norm
        self.rotary_table, self.neighbors = c.rotary_table_of(i), c.rotary_neighbors
        self.partly_rotated = self.rotated and c.rotary_width_of_head < c.query_width
        stored = c.table.stored
        widths = c.qkv_widths()
        self.inputs: tuple[str, ...] = ("qkv",) if "attn.qkv" in names else ("q", "k", "v")
        if self.inputs == ("qkv",):
            matters = c.key_bias_matters
            fused = QueryKeyValue(c.d_model, widths, c.qkv_bias, c.key_bias, matters, device, stored=stored)
            fused.heads = c.n_heads if c.qkv_by_head else None
            self.add("qkv", names["attn.qkv"], fused)
        else:
            for letter, width in widths.items():
                layer = Linear(c.d_model, width, c.qkv_bias, device, stored=stored)
                self.add(letter, names[f"attn.{letter}"], layer)
        values = c.n_heads * c.value_width
        self.add("out", names["attn.out"], Linear(values, c.d_model, c.out_bias, device, stored=stored))
        if c.qk_norm:
            heads = {"q": c.n_heads, "k": c.kv_heads} if c.qk_norm_joint else {"q": 1, "k": 1}
            for letter, count in heads.items():
                norm = RMSNorm(count * c.query_width, c.eps, device, offset=c.gain_offset)
                self.add(f"{letter}_norm", names[f"attn.{letter}_norm"], norm)

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
            q, q_norm = normalize(self.q_norm, q)
            k, k_norm = normalize(self.k_norm, k)
        if self.rotated:
            # over what the projections computed for this alone
            at, kind = self.rotary_table, self.neighbors
            q = rotary.forward(q, *run.query_rotation(at), into=q, dtype=dtype, neighbors=kind)
            k = rotary.forward(k, *run.key_rotation(at), into=k, dtype=dtype, neighbors=kind)
        if dtype is not None:
            q, k, v = (x.to(dtype) for x in (q, k, v))
        return Projected(q, k, v, q_norm, k_norm)

    def forward(self, a_2: Tensor, run: Pass) -> tuple[Tensor, Saved]:
        """a_2 → q, k, v → a_3 → a_4"""
        q, k, v, q_norm, k_norm = self.project(a_2, run)
        heads: attention.Saved | matrices.Saved
        if run.cache is not None:
            heads = run.cache.attend(q, k, v, self.scores, self.sinks)
        elif run.edited:
            heads = matrices.forward(q, k, v, self.scores, self.sinks, run)
        else:
            heads = attention.forward(q, k, v, run.spans, self.scores, self.sinks)[1]
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
            of_sinks = matrices.backward(delta_3, heads, into, run)
        else:
            delta = delta_3.view_as(heads.a)
            if run.observer is not None and run.query_rows is None:
                self._note_maps(delta, heads, run.observer, run.lengths)
            attention.backward(delta, heads, run.spans, into, self.scores)
            sinks_train = self.sinks is not None and self.sinks.requires_grad
            of_sinks = attention.sink_signals(delta, heads, run.spans) if sinks_train else None
        if self.sinks is not None and of_sinks is not None:
            Sinks(self.sinks).accumulate(of_sinks, run)
        return self.backward_projections(signals, saved, a_2, run)

    def _note_maps(self, delta: Tensor, heads: attention.Saved, observer: Observer, lengths: tuple[int, ...]) -> None:
        """Show ρ and its error signals, (h, n, n). Training never forms these matrices."""
        maps = attention.maps(delta, heads, lengths, self.scores)
        for name, x in zip(("rho", "delta_causal", "delta_raw"), maps, strict=True):
            observer.note(name, x)

    def backward_projections(
        self, signals: branches.ErrorSignals, saved: Saved, a_2: BranchInput, run: Pass
    ) -> Tensor | None:
        """The error signals of q, k and v → Δ_2: back through rotation and norms, then the three branches."""
        into = self.by_head(*signals.parts)
        if self.rotated or self.normed:
            for i, norm, kept, rotation in (
                (0, "q_norm", saved.q_norm, run.query_rotation), (1, "k_norm", saved.k_norm, run.key_rotation)
            ):  # fmt: skip
                signal = into[i]
                if self.rotated:
                    angles = rotation(self.rotary_table)
                    signal = rotary.backward(signal, *angles, into=signal, neighbors=self.neighbors)
                if self.normed:
                    layer: Norm = getattr(self, norm)
                    a_bar = layer.rebuild_output(kept)[0]
                    signals.replace(i, layer.backward(signal.reshape(a_bar.shape), a_bar, kept, run))
        if run.observer is not None:
            for i, (name, x) in enumerate(zip(self.projected(), self.by_head(*signals.parts), strict=True)):
                if not run.edited:
                    run.observer.note(f"delta_{name}", x.transpose(0, 1))
                elif name.startswith("x_"):  # the others were seen, and replaced, where the heads computed them
                    signals.replace(i, run.at(f"delta_{name}", x.transpose(0, 1)).transpose(0, 1).flatten(1))
        return signals.backward(a_2.tensor(), run, a_2.signal_needed)

    def steps(self, reads: str) -> list[Step]:
        """The activation of that name → a_3 → a_4; the first step has w_q, w_k, w_v, or all three as w_2, and b_sink."""
        layers: dict[str, Layer] = {"2" if name == "qkv" else name: getattr(self, name) for name in self.inputs}
        layers |= {name: getattr(self, name) for name in ("q_norm", "k_norm") if self.has(name)}
        layers |= {} if self.sinks is None else {"sink": Sinks(self.sinks)}
        extras = {
            "neighboring features rotated": self.rotated and self.neighbors,
            "some features rotated": self.partly_rotated,
            "rotated as blocks with a window": self.rotated and self.rotary_table > 0,
            "norms over all heads": self.normed and len(self.q_norm.weight) > self.q_width,
        }
        more = tuple(what for what, does in extras.items() if does)
        inside = ("delta_raw", "delta_causal")
        return [
            Step("attention", "attention", (reads,), ("a_3",), layers, inside, extras=more),
            Step("projection", "linear", ("a_3",), ("a_4",), {"3": self.out}),
        ]

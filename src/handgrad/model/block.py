"""One block of the paper's Table 2: downwards in `forward`, upwards in `backward`.

    a_1 → a_2 norm → a_3 heads → a_4 projection → a_5 = a_1 + a_4
        → a_6 norm → a_7 expand → a_8 activation → a_9 contract → a_10 = a_5 + a_9

It saves about 10·d numbers per token (a_1, q, k, v, a_3, a_5, a_7) and recomputes the outputs of norms and activation.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import attention
from .attention import Attention
from .attention import Saved as SavedHeads
from .config import ModelConfig
from .layers import Affine
from .mlp import MLP
from .norms import NORMS, Norm
from .parts import Parts, part
from .passes import Pass


class Saved(NamedTuple):
    """What a block saves for its backward pass."""

    norm_1: Any  # holds a_1
    heads: SavedHeads  # holds q, k, v, a_3
    norm_5: Any  # holds a_5
    a_7: list[Tensor]  # a_7, or gate and up


class Block(Parts):
    """norm_1, attn, norm_2 and mlp, under the family's names."""

    norm_1: Norm = part("norm_1")
    attn: Attention = part("attn")
    norm_2: Norm = part("norm_2")
    mlp: MLP = part("mlp")

    def __init__(self, config: ModelConfig, i: int, device: torch.device | None):
        super().__init__()
        names, norm = config.table.names, NORMS[config.norm]
        self.add("norm_1", names["norm_1"], norm(config.d_model, config.eps, device))
        self.add("attn", names["attn"], Attention(config, i, device))
        self.add("norm_2", names["norm_2"], norm(config.d_model, config.eps, device))
        self.add("mlp", names["mlp"], MLP(config, device))

    def forward(self, a_1: Tensor, run: Pass) -> tuple[Tensor, Saved]:
        """a_1 (n, d) → a_10 (n, d), or (m, d) if the pass needs only some query rows: then everything after the keys and
        values is computed for those rows alone."""
        attn, mlp = self.attn, self.mlp
        a_2, norm_1 = self.norm_1.forward(a_1)
        saved = attn.forward(a_2, run)
        a_3 = saved.heads.a.flatten(1)
        a_4 = attn.out.forward(a_3, run)
        a_5 = a_4 + (a_1 if run.query_rows is None else a_1[run.query_rows])
        a_6, norm_5 = self.norm_2.forward(a_5)
        a_7 = mlp.forward(a_6, run)
        a_8 = mlp.activate(a_7)
        a_9 = mlp.contract.forward(a_8, run)
        a_10 = a_5 + a_9
        if run.recording:
            inner = dict(zip((f"a_{letter}" for letter in mlp.letters()), a_7, strict=True))
            named = {"a_1": a_1, "a_2": a_2, "a_3": a_3, "a_4": a_4, "a_5": a_5, "a_6": a_6, **inner}
            for name, a in {**named, "a_8": a_8, "a_9": a_9, "a_10": a_10}.items():
                run.record(name, a)
            for name, x in zip("qkv", saved.heads[:3], strict=True):
                run.record(name, x.transpose(0, 1))
            for i, norm, kept in ((1, self.norm_1, norm_1), (5, self.norm_2, norm_5)):
                for name, x in norm.statistics(kept).items():
                    run.record(f"{name}_{i}", x)
        return a_10, Saved(norm_1, saved, norm_5, a_7)

    def backward(self, delta_10: Tensor, saved: Saved, run: Pass) -> Tensor:
        """Δ_10 → Δ_1; parameter gradients are added into `.grad`. Without `run.input_signal` Δ_1 is not computed, and the
        result has no meaning."""
        attn, mlp = self.attn, self.mlp
        norm_1, heads, norm_5, a_7 = saved
        run.record("delta_10", delta_10)
        run.record("delta_9", delta_10)  # Δ_9 = Δ_10
        shared = mlp.contract.share(delta_10)
        delta_8 = mlp.contract.backward(delta_10, run, None, shared)
        run.record("delta_8", delta_8)
        signals, a_8 = mlp.backward_activation(delta_8, a_7)
        for letter, delta_7 in zip(mlp.letters(), signals.parts, strict=True):
            run.record(f"delta_{letter}", delta_7)
        mlp.contract.accumulate(delta_10, a_8, run, shared)
        del a_8, delta_8, shared  # the largest tensors here
        a_bar_5, a_6 = self.norm_2.rebuild_output(norm_5)
        delta_6 = signals.backward(a_6, run)
        assert delta_6 is not None
        del signals, a_6
        run.record("delta_6", delta_6)
        delta_5 = self.norm_2.backward(delta_6, a_bar_5, norm_5, run).add_(delta_10)
        run.record("delta_5", delta_5)
        run.record("delta_4", delta_5)  # Δ_4 = Δ_5
        shared = attn.out.share(delta_5)
        delta_3 = attn.out.backward(delta_5, run, None, shared)
        run.record("delta_3", delta_3)
        attn.out.accumulate(delta_5, heads.heads.a.flatten(1), run, shared)
        if run.recording and run.query_rows is None:
            self._record_maps(delta_3, heads.heads, run)
        a_bar_1, a_2 = self.norm_1.rebuild_output(norm_1)
        needs_input = run.input_signal or self.norm_1.trains()
        delta_2 = attn.backward(delta_3, heads, a_2, run, needs_input)
        if delta_2 is None:
            return delta_5
        run.record("delta_2", delta_2)
        delta_1 = self.norm_1.backward(delta_2, a_bar_1, norm_1, run)
        rows = run.query_rows
        delta_1 = delta_1.add_(delta_5) if rows is None else delta_1.index_add_(0, rows, delta_5)
        run.record("delta_1", delta_1)
        return delta_1

    def _record_maps(self, delta_3: Tensor, heads: attention.Saved, run: Pass) -> None:
        """Record ρ and its error signals, (h, n, n). Training never forms these matrices."""
        lengths = tuple(length for span in run.spans for length in (span.length,) * span.sequences)
        rho, signal = attention.maps(delta_3.view_as(heads.a), heads, lengths, self.attn.causal, self.attn.window)
        run.record("rho", rho)
        run.record("delta_causal", signal)
        run.record("delta_raw", signal / math.sqrt(heads.q.shape[2]))

    def trains(self) -> bool:
        return any(p.requires_grad for p in self.parameters())

    def numbered(self) -> dict[str, Affine | Norm]:
        """The layers by the letter or number that the paper gives their parameters."""
        return {"1": self.norm_1, **self.attn.numbered(), "5": self.norm_2, **self.mlp.numbered()}

"""One block of the paper's Table 2: downwards in `forward`, upwards in `backward`.

    a_1 → a_2 norm → a_3 heads → a_4 projection → a_5 = a_1 + a_4
        → a_6 norm → a_7 expand → a_8 activation → a_9 contract → a_10 = a_5 + a_9

Twice x + branch(norm(x)). This file is where the order is defined: `steps` lists it, and whatever describes, checks or
explains a block reads that list. A block saves about 10·d numbers per token (a_1, q, k, v, a_3, a_5, a_7) and recomputes the
outputs of norms and activation.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import ModelConfig
from .layers.attention import Attention
from .layers.branches import BranchInput
from .layers.mlp import MLP
from .layers.norms import NORMS, Norm
from .layers.parts import Parts, part
from .layers.short_conv import ShortConv
from .passes.arguments import Pass
from .steps import Layer, Step, signal


class SavedHalf(NamedTuple):
    """What half a block saves for its backward pass."""

    norm: Any  # holds x
    branch: Any
    a: Tensor | None = None  # the norm's output: rebuilt, unless it may have been replaced


class Residual(NamedTuple):
    """y = x + branch(norm(x)), half a block."""

    number: str  # of the half: norm_1 and skip_1, norm_2 and skip_2
    x: str  # the names of its tensors: a_1 or a_5
    normed: str
    branched: str
    y: str
    norm: Norm
    branch: Attention | ShortConv | MLP

    def forward(self, x: Tensor, run: Pass) -> tuple[Tensor, SavedHalf]:
        """x (n, d) → y (n, d), or (m, d) if the branch computes only the rows that the pass needs"""
        a, saved = self.norm.forward(x, run.operand)
        run.note_statistics(self.norm.statistics, saved, self.norm_number)
        a = run.at(self.normed, a)
        out, kept = self.branch.forward(a, run)
        skipped = run.at(f"skip_{self.y[2:]}", x) if run.edited else x
        skipped = skipped if len(out) == len(x) else skipped[run.query_rows]
        y = out.add_(skipped) if run.observer is None else out + skipped  # an observer may keep what it has seen
        return run.at(self.y, y), SavedHalf(saved, kept, a if run.edited else None)

    def backward(self, delta: Tensor, saved: SavedHalf, run: Pass, needed: bool = True) -> Tensor:
        """Δ_y → Δ_x. If that is not `needed`, the result has no meaning."""
        needed = needed or self.norm.trains
        a = BranchInput(self.norm, saved.norm, saved.a, needed, run.operand)
        delta_a = self.branch.backward(run.at(signal(self.branched), delta), saved.branch, a, run)
        if delta_a is None:
            return delta
        delta_x = a.backward(run.at(signal(self.normed), delta_a), run)
        skipped = run.at(f"delta_skip_{self.y[2:]}", delta) if run.edited else delta
        if len(skipped) == len(delta_x):
            delta_x.add_(skipped)
        else:
            assert run.query_rows is not None
            delta_x.index_add_(0, run.query_rows, skipped)
        return run.at(signal(self.x), delta_x)

    def steps(self) -> list[Step]:
        """What it computes, in order."""
        return [
            Step(f"norm_{self.number}", "norm", (self.x,), (self.normed,), {self.norm_number: self.norm}),
            *self.branch.steps(),
            Step(f"skip_{self.number}", "add", (self.x, self.branched), (self.y,)),
        ]

    @property
    def norm_number(self) -> str:
        """The number of the norm's parameters: w_1 or w_5, after its input."""
        return self.x[2:]


class Saved(NamedTuple):
    """What a block saves for its backward pass."""

    first: SavedHalf  # holds a_1, q, k, v, a_3
    second: SavedHalf  # holds a_5, a_7


class Block(Parts):
    """norm_1, attn or conv, norm_2 and mlp, under the family's names."""

    norm_1: Norm = part("norm_1")
    attn: Attention = part("attn")  # a block has this or conv
    conv: ShortConv = part("conv")
    norm_2: Norm = part("norm_2")
    mlp: MLP = part("mlp")

    def __init__(self, config: ModelConfig, i: int, device: torch.device | None):
        super().__init__()
        names, norm = config.table.names, NORMS[config.norm]
        self.add("norm_1", names["norm_1"], norm(config.d_model, config.eps, device))
        first, branch = ("conv", ShortConv) if i in config.conv_blocks else ("attn", Attention)
        self.add(first, names[first], branch(config, i, device))
        self.add("norm_2", names["norm_2"], norm(config.d_model, config.eps, device))
        self.add("mlp", names["mlp"], MLP(config, device))

    def halves(self) -> tuple[Residual, Residual]:
        """The order of the block."""
        return (
            Residual("1", "a_1", "a_2", "a_4", "a_5", self.norm_1, self.conv if self.has("conv") else self.attn),
            Residual("2", "a_5", "a_6", "a_9", "a_10", self.norm_2, self.mlp),
        )

    def forward(self, a_1: Tensor, run: Pass) -> tuple[Tensor, Saved]:
        """a_1 (n, d) → a_10 (n, d), or (m, d) if the pass needs only some query rows: then everything after the keys and
        values is computed for those rows alone."""
        first, second = self.halves()
        a_5, saved_1 = first.forward(run.at("a_1", a_1), run)
        a_10, saved_5 = second.forward(a_5, run)
        return a_10, Saved(saved_1, saved_5)

    def backward(self, delta_10: Tensor, saved: Saved, run: Pass) -> Tensor:
        """Δ_10 → Δ_1; parameter gradients are added into `.grad`. Without `run.input_signal` Δ_1 is not computed, and the
        result has no meaning."""
        first, second = self.halves()
        delta_5 = second.backward(run.at("delta_10", delta_10), saved.second, run)
        return first.backward(delta_5, saved.first, run, run.input_signal)

    def steps(self) -> list[Step]:
        """What the block computes, in order."""
        return [step for half in self.halves() for step in half.steps()]

    @property
    def trains(self) -> bool:
        return any(p.requires_grad for p in self.parameters())

    def numbered(self) -> dict[str, Layer]:
        """The layers by the letter or number that the paper gives their parameters."""
        return {number: layer for step in self.steps() for number, layer in step.layers.items()}

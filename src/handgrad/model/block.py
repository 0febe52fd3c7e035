"""One block of the paper's Table 2: downwards in `forward`, upwards in `backward`.

    a_1 → a_2 norm → a_3 heads → a_4 projection → a_5 = a_1 + a_4
        → a_6 norm → a_7 expand → a_8 activation → a_9 contract → a_10 = a_5 + a_9

Twice x + branch(norm(x)). In other families the norm comes after the branch (a_4 → a_4_norm), or both are there, or the two
branches are parallel: a_10 = a_1 + a_4 + a_9, with one norm or two; or a convolution is in the place of attention. This file
is where the order is defined: `steps` lists it, and whatever describes, checks or explains a block reads that list. A block
saves about 10·d numbers per token (a_1, q, k, v, a_3, a_5, a_7) and recomputes the outputs of norms and activation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import ModelConfig
from .layers.attention import Attention
from .layers.branches import BranchInput
from .layers.experts import Experts, feed_forward
from .layers.mlp import MLP
from .layers.norms import Norm, norm_of
from .layers.parts import Parts, part
from .layers.short_conv import ShortConv
from .passes.arguments import Pass
from .steps import Layer, Step, signal


class SavedBranch(NamedTuple):
    """What a branch saves for its backward pass."""

    layers: Any
    post: Any = None  # of the norm after it


class Branch(NamedTuple):
    """post(layers(a)), or layers(a)"""

    layers: Attention | ShortConv | MLP | Experts
    output: str  # of the layers: a_4 or a_9
    post: Norm | None = None

    def forward(self, a: Tensor, run: Pass) -> tuple[Tensor, SavedBranch]:
        """a → the branch's output, of all rows or of those that the pass needs"""
        out, saved = self.layers.forward(a, run)
        if self.post is None:
            return out, SavedBranch(saved)
        normed, kept = self.post.forward(out)
        run.note_statistics(self.post.statistics, kept, self.output[2:])
        return run.at(self.added, normed), SavedBranch(saved, kept)

    def backward(self, delta: Tensor, saved: SavedBranch, a: BranchInput, run: Pass) -> Tensor | None:
        """Δ of the branch's output → that of a, if it is needed"""
        delta = run.at(signal(self.added), delta)
        if self.post is not None:
            a_bar, _ = self.post.rebuild_output(saved.post)
            delta = run.at(signal(self.output), self.post.backward(delta, a_bar, saved.post, run))
        return self.layers.backward(delta, saved.layers, a, run)

    @property
    def added(self) -> str:
        """The name of what is added to the stream."""
        return self.output if self.post is None else f"{self.output}_norm"

    def steps(self, reads: str) -> list[Step]:
        """What it computes from the activation of that name, in order."""
        number = self.output[2:]
        after = {} if self.post is None else {number: self.post}
        return [
            *self.layers.steps(reads),
            *(
                Step(f"norm_{number}", "norm", (self.output,), (self.added,), {n: norm}, extras=norm.extras)
                for n, norm in after.items()
            ),
        ]


class SavedPath(NamedTuple):
    """What a path saves for its backward pass."""

    norm: Any  # holds x
    branches: tuple[SavedBranch, ...]
    a: Tensor | None = (
        None  # what the branches read, where it is not rebuilt: no norm computes it, or it may be replaced
    )


class Path(NamedTuple):
    """Branches that read norm(x), or x itself."""

    x: str
    normed: str
    norm: Norm | None
    number: str  # of the norm and its parameters: norm_1 and w_1
    branches: tuple[Branch, ...]

    def forward(self, x: Tensor, run: Pass) -> tuple[list[Tensor], SavedPath]:
        """x → the outputs of the branches"""
        if self.norm is None:
            a, saved = x if run.operand is None else x.to(run.operand), None
        else:
            a, saved = self.norm.forward(x, run.operand)
            run.note_statistics(self.norm.statistics, saved, self.number)
            a = run.at(self.normed, a)
        outputs, kept = zip(*(branch.forward(a, run) for branch in self.branches), strict=True)
        return [*outputs], SavedPath(saved, kept, a if run.edited or self.norm is None else None)

    def backward(self, delta: Tensor, saved: SavedPath, run: Pass, needed: bool) -> Tensor | None:
        """Δ of every branch's output → what reaches Δ_x by this path, if it is `needed`"""
        needed = needed or (self.norm is not None and self.norm.trains)
        a = BranchInput(self.norm, saved.norm, saved.a, needed, run.operand)
        total: Tensor | None = None
        for branch, kept in reversed(list(zip(self.branches, saved.branches, strict=True))):
            found = branch.backward(delta, kept, a, run)
            total = found if total is None or found is None else total.add_(found)
        if total is None or self.norm is None:
            return total
        return a.backward(run.at(signal(self.normed), total), run)

    def steps(self) -> list[Step]:
        """What it computes, in order."""
        reads = self.x if self.norm is None else self.normed
        norm = {} if self.norm is None else {self.number: self.norm}
        return [
            *(
                Step(f"norm_{n}", "norm", (self.x,), (self.normed,), {n: layer}, extras=layer.extras)
                for n, layer in norm.items()
            ),
            *(step for branch in self.branches for step in branch.steps(reads)),
        ]


class Residual(NamedTuple):
    """y = x + scale · Σ branch: half a block, or a block whose branches are parallel."""

    x: str  # the names of its tensors: a_1 → a_5 or a_5 → a_10
    y: str
    paths: tuple[Path, ...]
    scale: float = 1.0

    def forward(self, x: Tensor, run: Pass) -> tuple[Tensor, tuple[SavedPath, ...]]:
        """x (n, d) → y (n, d), or (m, d) if the branch computes only the rows that the pass needs"""
        outputs, saved = zip(*(path.forward(x, run) for path in self.paths), strict=True)
        out, *others = (x for found in outputs for x in found)
        alone = run.observer is None  # an observer may keep what it has seen
        for other in others:
            out = out.add_(other) if alone else out + other
        if self.scale != 1:
            out = out.mul_(self.scale) if alone else out * self.scale
        skipped = run.at(f"skip_{self.y[2:]}", x) if run.edited else x
        skipped = skipped if len(out) == len(x) else skipped[run.query_rows]
        y = out.add_(skipped) if alone else out + skipped
        return run.at(self.y, y), saved

    def backward(self, delta: Tensor, saved: tuple[SavedPath, ...], run: Pass, needed: bool = True) -> Tensor:
        """Δ_y → Δ_x. If that is not `needed`, the result has no meaning."""
        branched = delta if self.scale == 1 else delta * self.scale
        delta_x: Tensor | None = None
        for path, kept in reversed(list(zip(self.paths, saved, strict=True))):
            found = path.backward(branched, kept, run, needed)
            delta_x = found if delta_x is None or found is None else delta_x.add_(found)
        if delta_x is None:
            return delta
        skipped = run.at(f"delta_skip_{self.y[2:]}", delta) if run.edited else delta
        if len(skipped) == len(delta_x):
            delta_x.add_(skipped)
        else:
            assert run.query_rows is not None
            delta_x.index_add_(0, run.query_rows, skipped)
        return run.at(signal(self.x), delta_x)

    def steps(self) -> list[Step]:
        """What it computes, in order."""
        added = tuple(branch.added for path in self.paths for branch in path.branches)
        skip = Step(f"skip_{self.y[2:]}", "add", (self.x, *added), (self.y,), scale=self.scale)
        return [*(step for path in self.paths for step in path.steps()), skip]


class Block(Parts):
    """norm_1, attn or conv, norm_2, mlp, and the norms post_1 and post_2 after the branches, under the family's names."""

    norm_1: Norm = part("norm_1")
    post_1: Norm = part("post_1")
    attn: Attention = part("attn")  # a block has this or conv
    conv: ShortConv = part("conv")
    norm_2: Norm = part("norm_2")
    post_2: Norm = part("post_2")
    mlp: MLP | Experts = part("mlp")

    def __init__(self, config: ModelConfig, i: int, device: torch.device | None):
        super().__init__()
        names = config.table.names
        self.parallel, self.scale = config.parallel, config.residual_scale
        branches: dict[str, Callable[[], Any]] = {
            "attn": partial(Attention, config, i, device),
            "conv": partial(ShortConv, config, device),
            "mlp": partial(feed_forward, config, i, device),
        }
        first = "conv" if i in config.conv_blocks else "attn"
        for name in ("norm_1", first, "post_1", "norm_2", "mlp", "post_2"):
            if name in names:
                self.add(name, names[name], branches.get(name, partial(norm_of, config, device))())

    def halves(self) -> tuple[Residual, ...]:
        """The order of the block."""
        norm_1, norm_2, post_1, post_2 = (
            getattr(self, name) if self.has(name) else None for name in ("norm_1", "norm_2", "post_1", "post_2")
        )
        attention, feed_forward = Branch(self.mixing, "a_4", post_1), Branch(self.mlp, "a_9", post_2)
        if not self.parallel:
            first = Path("a_1", "a_2", norm_1, "1", (attention,))
            second = Path("a_5", "a_6", norm_2, "5", (feed_forward,))
            return Residual("a_1", "a_5", (first,), self.scale), Residual("a_5", "a_10", (second,), self.scale)
        if norm_2 is None:
            both: tuple[Path, ...] = (Path("a_1", "a_2", norm_1, "1", (attention, feed_forward)),)
        else:
            both = Path("a_1", "a_2", norm_1, "1", (attention,)), Path("a_1", "a_6", norm_2, "5", (feed_forward,))
        return (Residual("a_1", "a_10", both, self.scale),)

    def forward(self, a_1: Tensor, run: Pass) -> tuple[Tensor, list[Any]]:
        """a_1 (n, d) → a_10 (n, d), or (m, d) if the pass needs only some query rows: then everything after the keys and
        values is computed for those rows alone. And what each half saves."""
        a, saved = run.at("a_1", a_1), []
        for half in self.halves():
            a, kept = half.forward(a, run)
            saved.append(kept)
        return a, saved

    def backward(self, delta_10: Tensor, saved: list[Any], run: Pass) -> Tensor:
        """Δ_10 → Δ_1; parameter gradients are added into `.grad`. Without `run.input_signal` Δ_1 is not computed, and the
        result has no meaning."""
        delta, halves = run.at("delta_10", delta_10), self.halves()
        for half, kept in reversed(list(zip(halves, saved, strict=True))):
            delta = half.backward(delta, kept, run, half is not halves[0] or run.input_signal)
        return delta

    def steps(self) -> list[Step]:
        """What the block computes, in order."""
        return [step for half in self.halves() for step in half.steps()]

    @property
    def mixing(self) -> Attention | ShortConv:
        """The branch in which tokens exchange information."""
        return self.conv if self.has("conv") else self.attn

    @property
    def trains(self) -> bool:
        return any(p.requires_grad for p in self.parameters())

    def numbered(self) -> dict[str, Layer]:
        """The layers by the letter or number that the paper gives their parameters."""
        return {number: layer for step in self.steps() for number, layer in step.layers.items()}

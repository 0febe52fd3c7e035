"""Path patching: how the objective changes if a sender's patch reaches one receiver by the residual stream alone.

    predicted   ⟨Δ_path, a′ − a⟩: of the error of the objective, the part that comes back through the receiver and from it by
                skip connections alone. Every other error path is cut: the error past the receiver, and what the other
                branches send back. One backward pass gives it for every sender at once.
    measured    twice forward: the sender patched, every other branch between it and the receiver frozen, which gives the
                receiver's new value; then that value put in its place, and everything after it computed.

The stream in between adds, so there the prediction is exact. It is to first order in three places: from the sender to the
stream (exact for a_3, a_4, a_8 and a_9 of blocks without a norm after the branch), the receiver's norm and projection, and
everything after the receiver.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import HandgradError, shown
from ..block import Branch, Path, Residual
from ..gpt import GPT
from ..passes.objective import MEAN_LOSS, Objective
from ..steps import signal
from .edits import Edits
from .patch import Place, Rows, check_index
from .patch_map import Cell, PatchMap, axes_of, patch_of, predictions
from .trace import Trace, edited_forward, trace, without_gradients

HEADS = ("q", "k", "v")


class Receiver(NamedTuple):
    """What a path ends at: the queries, keys or values of a block, the input of a branch, or that of the logits."""

    name: str
    block: int  # the number of blocks for a_11
    letter: str
    half: int = 0  # of the block
    head: int | None = None
    position: int | None = None

    def place(self, values: Tensor) -> Place:
        """Its entries, and those that replace them."""
        positions = None if self.position is None else (self.position,)
        return Place(self.name, values, None, positions, head=self.head)

    def kept(self, delta: Tensor) -> Tensor:
        """Its error signal, 0 elsewhere."""
        place = self.place(delta)
        rows = slice(None) if self.position is None else slice(self.position, self.position + 1)
        found = torch.zeros_like(delta)
        place.entries(found)[rows] = place.entries(delta)[rows]
        return found


def path_map(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    other: Trace,
    receiver: str,
    of: str = "a_3",
    by: str | Sequence[str] = ("head", "position"),
    *,
    head: int | None = None,
    position: int | None = None,
    objective: Objective = MEAN_LOSS,
    align: Rows | None = None,
) -> PatchMap:
    """Predict, for every sender before the receiver at once, how the objective changes if the sender's patch reaches the
    receiver by the residual stream alone; `.measure()` patches such paths, with everything else frozen.

    receiver        "blocks.3.q", "blocks.3.k", "blocks.3.v", or the input of a branch, "blocks.3.a_2" or "blocks.3.a_6", or
                    "a_11", from which the logits are computed.
    head, position  The part of the receiver; default: all of it.
    of, by          The senders, as for hg.patch_map: what a branch computes (a_3, a_4, v, a_8, a_9), or the stream (a_1,
                    a_5).
    """
    axes = axes_of(by)
    end = _receiver(model, receiver, head, position)
    if position is not None:
        check_index("position", position, tokens.numel())
    senders = _senders(model, end, of)
    with without_gradients(model):
        begin = time.perf_counter()
        cut = trace(model, tokens, targets, objective=objective, edit=_cut(model, end))
        found = predictions(cut, other, of, axes, align, senders)
        seconds = time.perf_counter() - begin
    value, base = edited_forward(model, tokens, targets, {}, objective)

    def measure(cell: Cell) -> float:
        frozen = {name: partial(_instead, base[name]) for name in _others(model, end, cell[0], of)}
        patch = patch_of(other, of, axes, align, cell)
        _, seen = edited_forward(model, tokens, targets, {**patch, **frozen}, objective)
        arrived = {end.name: end.place(seen[end.name]).replaced}
        return edited_forward(model, tokens, targets, arrived, objective)[0] - value

    return PatchMap(of, axes, found, value, seconds, measure, cut.words, passes=2)


def _instead(value: Tensor, x: Tensor) -> Tensor:
    return value


def _receiver(model: GPT, name: str, head: int | None, position: int | None) -> Receiver:
    """The receiver of that name, or an error."""
    here, _, letter = name.rpartition(".")
    if head is not None:
        if letter not in HEADS:
            raise HandgradError(f"{name} has no heads: the receivers q, k and v have them")
        check_index("head", head, model.config.n_heads if letter == "q" else model.config.kv_heads)
    if name == "a_11":
        return Receiver(name, len(model.blocks), letter, 0, None, position)
    for b, i, half in _halves(model, len(model.blocks)):
        inputs = {path.normed for path in half.paths if path.norm is not None}
        inputs |= {*HEADS} if any(_attends(path, branch) for path in half.paths for branch in path.branches) else set()
        if here == f"blocks.{b}" and letter in inputs:
            return Receiver(name, b, letter, i, head, position)
    raise HandgradError(
        f"{shown(name)} is no receiver: choose q, k or v of a block, as in blocks.1.q, the input of a branch, blocks.1.a_2"
        f" or blocks.1.a_6, or a_11; blocks go from 0 to {len(model.blocks) - 1}"
    )


def _halves(model: GPT, end: int) -> list[tuple[int, int, Residual]]:
    """The halves of the blocks before `end`: block, number, half."""
    return [(b, i, half) for b in range(end) for i, half in enumerate(model.blocks[b].halves())]


def _before(model: GPT, end: Receiver) -> list[tuple[int, int, Residual]]:
    """The halves that are complete before the receiver reads the stream."""
    return [found for found in _halves(model, len(model.blocks)) if found[:2] < (end.block, end.half)]


def _attends(path: Path, branch: Branch) -> bool:
    return any(step.kind == "attention" for step in branch.steps(path.normed))


def _computed(path: Path, branch: Branch) -> set[str]:
    """What a branch computes, its output included."""
    names = {name for step in branch.steps(path.normed) for name in step.outputs}
    return names | ({*HEADS, "rho"} if _attends(path, branch) else set())


def _senders(model: GPT, end: Receiver, of: str) -> list[int]:
    """The blocks in which a sender of that name is before the receiver, or an error."""
    found = []
    for b, _, half in _before(model, end):
        if any(path.norm is None for path in half.paths):
            raise HandgradError(
                "paths are cut at the norm before each branch, and this model has none there: use hg.patch_map"
            )
        if any(of == path.normed for path in half.paths):
            raise HandgradError(
                f"{of} is where paths are cut: choose what a branch computes, a_3 or a_9, or the stream, a_1"
            )
        if any(of in _computed(path, branch) for path in half.paths for branch in path.branches) or of in half[:2]:
            found.append(b)
    if end.block < len(model.blocks) and of == model.blocks[end.block].halves()[end.half].x:
        found.append(end.block)
    if not found:
        raise HandgradError(f"no {of} is before {end.name}: choose another sender, or a later receiver")
    return [*dict.fromkeys(found)]


def _cut(model: GPT, end: Receiver) -> Edits:
    """Edits that leave of the error only what comes back through the receiver, and then by skip connections alone."""
    cut = torch.zeros_like
    edits: dict[str, Callable[[Tensor], Tensor]] = {
        f"blocks.{b}.{signal(path.normed)}": cut for b, _, half in _before(model, end) for path in half.paths
    }
    if end.block == len(model.blocks):
        return {**edits, "delta_11": end.kept}
    here, half = f"blocks.{end.block}.", model.blocks[end.block].halves()[end.half]
    edits[f"{here}delta_skip_{half.y[2:]}"] = cut
    for path in half.paths:
        attention = [branch for branch in path.branches if _attends(path, branch)]
        if end.letter == path.normed:
            edits[here + signal(path.normed)] = end.kept
        elif end.letter in HEADS and attention:
            edits |= {f"{here}delta_{x}": end.kept if x == end.letter else cut for x in HEADS}
            for branch in path.branches:
                if branch not in attention:  # it reads the same norm
                    edits |= {here + signal(name): cut for name in branch.steps(path.normed)[0].outputs}
        else:
            edits[here + signal(path.normed)] = cut
    return edits


def _others(model: GPT, end: Receiver, block: int, of: str) -> list[str]:
    """What every branch between a sender and the receiver adds to the stream, except the sender's own."""
    return [
        f"blocks.{b}.{branch.added}"
        for b, _, half in _before(model, end)
        if b >= block
        for path in half.paths
        for branch in path.branches
        if not (b == block and of in _computed(path, branch))
    ]

"""`ByHand`: what the formulas compute in float64, a block at a time."""

import copy
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..model.block import Block
from ..model.gpt import GPT
from ..model.passes import Pass


class ByHand(Mapping[str, Tensor]):
    """The tensors of a pass by name. What is outside the blocks is stored, and of each block what enters it from both
    sides; all others of a block are computed again when one is read, and stay until another block is read.

    inputs   a_1 of every block, and a_10 of the last
    deltas   Δ_10 of every block; at −1, Δ_1 of the first
    outside  the tensors outside the blocks
    blocks   the number of its block, by the name of every tensor inside one
    """

    def __init__(self, model: GPT, run: Pass, pause: Callable[[], None]):
        self.inputs: list[Tensor] = []
        self.deltas: dict[int, Tensor] = {}
        self.outside: dict[str, Tensor] = {}
        self.blocks: dict[str, int] = {}
        self._model, self._run, self._pause = model, run, pause
        self._latest: tuple[int, dict[str, Tensor]] = (-1, {})

    def block(self, i: int) -> Block:
        """A copy of a block in float64."""
        self._pause()
        return copy.deepcopy(self._model.blocks[i]).double()

    def forward(self, a_1: Tensor) -> None:
        """a_1 → the inputs of all blocks, and the output of the last"""
        self.inputs.append(a_1)
        for i in range(len(self._model.blocks)):
            self.inputs.append(self.block(i).forward(self.inputs[i], self._run)[0])

    @torch.no_grad()
    def run_block(self, i: int) -> tuple[dict[str, Tensor], Block]:
        """Both passes of a block: all it records, and the block with its gradients."""
        values: dict[str, Tensor] = {}
        block = self.block(i)
        run = self._run._replace(record=lambda name, x: values.__setitem__(f"blocks.{i}.{name}", x))
        saved = block.forward(self.inputs[i], run)[1]
        self.deltas[i - 1] = block.backward(self.deltas[i], saved, run)
        self.blocks |= dict.fromkeys(values, i)
        return values, block

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.blocks:
            return self.outside[name]
        i = self.blocks[name]
        if self._latest[0] != i:
            self._latest = (-1, {})
            self._latest = (i, self.run_block(i)[0])
        return self._latest[1][name]

    def __contains__(self, name: object) -> bool:
        return name in self.blocks or name in self.outside

    def __iter__(self) -> Iterator[str]:
        yield from self.outside
        yield from self.blocks

    def __len__(self) -> int:
        return len(self.outside) + len(self.blocks)

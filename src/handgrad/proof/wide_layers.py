"""The layers of a model in float64, and the copies of a model that are checked."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..model.gpt import GPT
from ..model.layers.linear import Affine
from .reference import Pair, weight_and_bias

ROWS_AT_ONCE = 4096  # of the head and the embeddings


def float64_copy(model: GPT) -> GPT:
    """A copy of the model in float64, without dropout: it is checked as a whole."""
    return in_one_dtype(copy.deepcopy(model)).double().eval()


def in_one_dtype(model: GPT) -> GPT:
    """The same model, not in mixed precision."""
    model.precision = str(model.dtype).removeprefix("torch.")
    return model


def shared_copy(model: GPT) -> GPT:
    """A copy with the same weights in memory, without dropout: it is checked a block at a time, unless it is in float64.
    Replace the weights of the original meanwhile, but do not change them in place."""
    known: dict[int, Any] = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, known).eval()


def row_groups(n: int) -> Iterator[slice]:
    """n rows, some at a time."""
    return (slice(start, min(start + ROWS_AT_ONCE, n)) for start in range(0, n, ROWS_AT_ONCE))


class WideLayers:
    """The layers of a model in float64: its own if that is its dtype, otherwise a copy of the one that was asked for last.

    names   the model's names of its parameters
    """

    def __init__(self, model: GPT, pause: Callable[[], None]):
        self.model, self.pause = model, pause
        self.whole = model.dtype is torch.float64
        self.names = {p: name for name, p in model.named_parameters()}
        self.originals: list[nn.Module] = [*model.blocks, model.final_norm]
        numbered = reversed(list(enumerate(self.originals)))
        self._owners = {self.names[p]: i for i, layer in numbered for p in layer.parameters()}
        self._copied: tuple[int, Any] = (-1, None)

    def number_of(self, name: str) -> int | None:
        """The number of the lowest block that has this parameter; after the last one, the final norm; None for others."""
        return self._owners.get(name)

    def layer(self, i: int) -> Any:
        """Block i; after the last one, the final norm."""
        self.pause()
        if self.whole:
            return self.originals[i]
        if self._copied[0] != i:
            self._copied = (-1, None)  # freed before the next one is made
            self._copied = (i, copy.deepcopy(self.originals[i]).double())
        return self._copied[1]

    def parameters(self, i: int, layer: nn.Module) -> dict[str, nn.Parameter]:
        """The trainable parameters of layer i, by the model's names."""
        pairs = zip(self.originals[i].parameters(), layer.parameters(), strict=True)
        return {self.names[p]: q for p, q in pairs if p.requires_grad}

    def head(self) -> Affine:
        """The logits layer as a whole."""
        return self.model.head if self.whole else copy.deepcopy(self.model.head).double()

    def head_parts(self) -> Iterator[tuple[slice, Pair]]:
        """Columns of the logits, and what they are computed with: w (d, columns) and b (columns)"""
        w, b = weight_and_bias(self.head() if self.model.head.adapted else self.model.head)
        for rows in row_groups(w.shape[1]):
            self.pause()
            yield rows, (w[:, rows].double(), None if b is None else b[rows].double())

    def embeddings(self, ids: Tensor, positions: Tensor) -> Tensor:
        """a_1"""
        table, rows = self.model.embed.table(ids)
        a = table[rows].double() * self.model.config.embedding_scale
        return a + self.model.positions.w[positions].double() if self.model.has("positions") else a

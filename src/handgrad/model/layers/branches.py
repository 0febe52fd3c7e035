"""The input of a branch: several products of it, such as q, k and v, in separate layers or in one layer with their columns
side by side; and the input itself in the backward pass, which is rebuilt from its norm."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..passes.arguments import Pass
from .linear import Affine
from .norms import Norm


class BranchInput:
    """What a branch reads, a = norm(x), in its backward pass. It is rebuilt when a layer asks for it, so that it does not
    exist beside the branch's larger tensors.

    stored          a itself, if no norm computes it, or if it may not be the norm's any more
    signal_needed   whether anything below needs its error signal
    dtype           of a, if it is not that of x
    """

    def __init__(
        self,
        norm: Norm | None,
        saved: Any,
        stored: Tensor | None = None,
        signal_needed: bool = True,
        dtype: torch.dtype | None = None,
    ):
        self.norm, self.saved, self.stored, self.signal_needed, self.dtype = norm, saved, stored, signal_needed, dtype
        self.a_bar: Tensor | None = None

    def tensor(self) -> Tensor:
        """a"""
        if self.norm is None:
            assert self.stored is not None
            return self.stored
        self.a_bar, a = self.norm.rebuild_output(self.saved, self.dtype)
        return a if self.stored is None else self.stored

    def backward(self, delta: Tensor, run: Pass) -> Tensor:
        """The error signal of a → that of x; the norm's gradients are added into `.grad`"""
        assert self.norm is not None and self.a_bar is not None  # the branch's gradients need a, and come first
        return self.norm.backward(delta, self.a_bar, self.saved, run)


def forward(
    layers: Sequence[Affine], a: Tensor, run: Pass, first_rows: Tensor | None = None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """a (n, d) → the outputs (n, width), views of a fused layer's, in this dtype if it is given. With `first_rows` the first
    has these rows only."""
    outputs: list[Tensor] = []
    for layer in layers:
        fused = len(layer.plain().widths) > 1
        some = first_rows is not None and not outputs and not fused
        out = layer.forward(a[first_rows] if some else a, run, dtype=dtype)
        outputs += layer.plain().split(out) if fused else [out]
    if first_rows is not None and len(outputs[0]) == len(a):
        outputs[0] = outputs[0][first_rows]
    return outputs


class ErrorSignals:
    """The error signals of the outputs: `parts`, one for each output, belong to `wholes`, one for each layer."""

    def __init__(self, layers: Sequence[Affine], parts: list[Tensor], wholes: list[Tensor] | None = None):
        """From finished signals; those of a fused layer are copied side by side."""
        self.layers = layers
        self.parts = parts
        self.fused = len(layers) < len(parts)
        if wholes is None:
            wholes = [torch.cat([part.flatten(1) for part in parts], 1)] if self.fused else parts
        self.wholes = wholes
        self.first_rows: Tensor | None = None

    @classmethod
    def buffers(
        cls, layers: Sequence[Affine], n: int, like: Tensor, first_rows: Tensor | None = None
    ) -> "ErrorSignals":
        """Empty parts to write into, of n rows, or of `first_rows` for the first. Those of a fused layer are views."""
        widths = [width for layer in layers for width in layer.plain().widths]
        fused = len(layers) < len(widths)
        if fused:
            wholes = [like.new_empty(n, sum(widths))]
            parts = layers[0].plain().split(wholes[0])
        else:
            parts = wholes = [like.new_empty(n, width) for width in widths]
        if first_rows is not None:
            parts[0] = like.new_empty(len(first_rows), widths[0])
        signals = cls(layers, parts, wholes)
        signals.first_rows = first_rows
        return signals

    def replace(self, i: int, signal: Tensor) -> None:
        """Put another tensor in the place of a part."""
        signal = signal.view_as(self.parts[i])
        if self.fused:
            self.parts[i].copy_(signal)
        else:
            self.wholes[i] = self.parts[i] = signal

    def backward(self, a: Tensor, run: Pass, needs_input: bool = True) -> Tensor | None:
        """Add the layers' gradients, and return the sum of the branches' error signals of a, if it is needed."""
        rows = self.first_rows
        if self.fused and rows is not None:
            first = self.layers[0].plain().split(self.wholes[0])[0]
            first.zero_().index_copy_(0, rows, self.parts[0].view(-1, *first.shape[1:]))
        delta: Tensor | None = None
        for layer, whole in reversed(list(zip(self.layers, self.wholes, strict=True))):
            some = rows is not None and whole is self.parts[0]
            upstream = layer.upstream(whole, run)
            layer.accumulate(whole, a[rows] if some else a, run, upstream)
            if not needs_input:
                continue
            if some:
                assert delta is not None and rows is not None  # the first layer comes last
                delta.index_add_(0, rows, layer.backward(whole, run, None, upstream))
            else:
                delta = layer.backward(whole, run, delta, upstream)
        return delta

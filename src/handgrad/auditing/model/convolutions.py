"""What known mistakes would have made of a short convolution with gates: of its output, and of the error signals of B, C, x.

The rows are those of all sequences, end to end."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...model.layers.short_conv import ShortConv
from ...ops import attention, short_conv
from ...ops.short_conv import Borders


class _Conv:
    """c = conv(z) and back, with weights and borders that may be wrong."""

    def __init__(self, conv: ShortConv, lengths: Sequence[int], flipped: bool = False, joined: bool = False):
        w = conv.taps.weight.detach()
        self.w, self.b = w.flip(2) if flipped else w, conv.taps.bias
        spans = attention.spans_of((sum(lengths),) if joined else tuple(lengths))
        self.borders = Borders(spans, conv.taps.count, w.device)

    def forward(self, z: Tensor) -> Tensor:
        return short_conv.forward(z, self.w, self.b, self.borders)

    def backward(self, delta: Tensor) -> Tensor:
        return short_conv.backward(delta, self.w, self.borders)


def _wrong(conv: ShortConv, lengths: Sequence[int]) -> dict[str, _Conv]:
    return {
        "the taps were in the other order": _Conv(conv, lengths, flipped=True),
        "the convolution read the sequence before": _Conv(conv, lengths, joined=True),
    }


@torch.no_grad()
def convolution_mistakes(conv: ShortConv, gates: Sequence[Tensor], lengths: Sequence[int]) -> dict[str, Tensor]:
    """Of the output C ∘ conv(B ∘ x)"""
    b, c, x = gates
    right = _Conv(conv, lengths)
    return {
        **{name: c * wrong.forward(b * x) for name, wrong in _wrong(conv, lengths).items()},
        "the gate B were missing": c * right.forward(x),
        "the gate C were missing": right.forward(b * x),
        "the gates B and C were exchanged": b * right.forward(c * x),
        "the convolution were left out": c * b * x,
    }


@torch.no_grad()
def convolution_slopes(
    conv: ShortConv, gates: Sequence[Tensor], delta: Tensor, lengths: Sequence[int]
) -> tuple[dict[str, Tensor], ...]:
    """Of the error signals of B, C and x, from that of the output"""
    b, c, x = gates
    right, wrong = _Conv(conv, lengths), _wrong(conv, lengths)
    signals = {name: made.backward(delta * c) for name, made in wrong.items()}
    signals["the gate C were missing"] = right.backward(delta)
    signals["the error signal went through the taps forward"] = right.forward(delta * c)
    signals["the convolution passed its error signal on unchanged"] = delta * c
    outputs = {name: made.forward(b * x) for name, made in wrong.items()}
    outputs["the gate B were missing"] = right.forward(x)
    passed = right.backward(delta * c)
    return (
        {**{name: s * x for name, s in signals.items()}, "the factor x were missing": passed},
        {**{name: delta * y for name, y in outputs.items()}, "the convolution's output were missing": delta},
        {**{name: s * b for name, s in signals.items()}, "the gate B were missing": passed},
    )

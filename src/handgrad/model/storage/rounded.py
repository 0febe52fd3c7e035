"""Frozen matrices in two bytes: rounded to bfloat16 once, which is what products read in mixed precision.

    round_frozen(model)         after adapters were injected or loaded: half the memory of the base

Layers then hold `Packed` bytes, so that nothing that changes or saves weights takes the rounded ones for the model's own.
"""

import torch
from torch import Tensor

from ..gpt import GPT
from ..layers.linear import Embedding, Linear
from .packed import Packed
from .weights import Scratch

KIND = "BF16"


@torch.no_grad()
def round_frozen(model: GPT, by_output: bool = False) -> GPT:
    """Store every matrix that does not train in bfloat16, in place, a tied one once. Returns the model.

    by_output   store linear layers as (f_out, f_in), whatever their file has: for generation, whose kernel reads those
    """
    done: dict[Tensor, Packed] = {}
    for layer in model.modules():
        if not isinstance(layer, Linear | Embedding) or layer.trains:
            continue
        turn = by_output and isinstance(layer, Linear) and layer.in_out
        rounded = layer.packed is not None and layer.packed.kind == KIND
        if layer.weight is None and not (rounded and turn):
            continue
        w = layer.packed.tensor() if layer.packed is not None else layer.weight
        assert w is not None
        if w not in done:
            done[w] = Packed.of((w.detach().t() if turn else w.detach()).bfloat16().contiguous())
        layer.pack(done[w], model.dtype)
        if turn:
            layer.in_out = False
        model.scratch = model.scratch or Scratch()
    return model

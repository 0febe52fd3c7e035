"""Low-bit weights for generation: the matrices of blocks and head in 8 or 4 bits, frozen, and packed as GGUF packs them.

    bits   blocks   head
       8   Q8_0     Q8_0      w = d q, q of 8 bits, a float16 d for every 32 numbers: 8.5 bits per weight
       4   Q4_1     Q8_0      w = d q + m, q of 4 bits, float16 d and m for every 32 numbers: 5 bits per weight

The head keeps 8 bits: its rounding changes every logit directly. Matrices that a GGUF file stores in as few bits stay as
they are, exactly. A matrix with rows that are not a multiple of 32 numbers stays float32.

When generating, what these matrices multiply is rounded to 8 bits as well, with a scale for every 32 numbers of a row
(`ops/packed.py`), whatever the number of rows; `model.rounds_activations = False` leaves it float32. Sums are float32.
"""

import torch

from ...errors import HandgradError, option, shown
from ..gpt import GPT
from ..layers.linear import Linear
from .packed import Packed
from .weights import Scratch

BITS = (4, 8)
NUMBERS = 32  # that share a scale
_NARROW = {4: ("Q4_0", "Q4_1", "MXFP4"), 8: ("Q8_0", "Q4_0", "Q4_1", "MXFP4")}
_KIND = {4: "Q4_1", 8: "Q8_0"}


def check_bits(bits: object) -> None:
    """Raise unless bits is 4 or 8."""
    if type(bits) is not int or bits not in BITS:
        raise HandgradError(
            f"{option('bits')} must be 8 or 4, not {shown(bits)}: leave it out to keep the weights as they are"
        )


@torch.no_grad()
def quantize(model: GPT, bits: int) -> GPT:
    """Round the matrices of the model to 8 or 4 bits, in place, and freeze it. Returns the model."""
    check_bits(bits)
    if model.dtype != torch.float32:
        raise HandgradError(
            f"bits={bits} computes in float32 and the model is {str(model.dtype).removeprefix('torch.')}: load it with"
            ' dtype="float32", or call model.to(torch.float32)'
        )
    head = model.head.plain()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    wanted = {name: 8 if layer is head else bits for name, layer in layers.items()}
    fitting = {name: b for name, b in wanted.items() if layers[name].w.shape[0] % NUMBERS == 0}
    if not fitting:
        raise HandgradError(
            f"low-bit weights share a scale among {NUMBERS} numbers, and no matrix of this model has rows of a multiple of"
            " that: use it without bits"
        )
    todo = {name: b for name, b in fitting.items() if not _narrow(layers[name], b)}
    for name in todo:
        if not torch.isfinite(layers[name].w).all():
            raise HandgradError(f"the weights hold NaN or infinity in {name}: load an intact checkpoint")
    for name, b in todo.items():
        layer = layers[name]
        matrix = Packed.of(layer.w.t().contiguous(), _KIND[b])
        layer.pack(matrix, torch.float32)
        layer.in_out = False  # the numbers of a block are of one output
        if layer is head and model.config.tied:
            model.embed.pack(matrix, torch.float32)
    model.scratch = model.scratch or Scratch()
    model.rounds_activations = True
    model.requires_grad_(False)
    return model


def _narrow(layer: Linear, bits: int) -> bool:
    """Whether the weight has at most this many bits already."""
    return layer.packed is not None and layer.packed.kind in _NARROW[bits]

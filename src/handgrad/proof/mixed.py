"""Mixed precision, proven in two steps, for every product, error signal and parameter.

1. Each product of a recorded pass against the float64 product of its rounded operands: only float32 sums may differ, and the
   rounding of a result that is stored in bfloat16. A wrong formula is a large error here, however much the network rounds.
2. Each error signal and gradient against autograd in float64: the error may be as large as what rounding explains. That is
   measured, by passes of the reference with a random rounding error in every intermediate.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..model.gpt import GPT
from ..model.inspect.trace import own_gradients, record_pass
from ..model.layers.linear import Affine
from ..model.steps import signal
from ..ops import attention
from ..tolerances import NORM_FLOOR, TOLERANCE
from .paths import Batch, Outcome, Path, gradients_of, training_paths
from .reference_model import ReferenceModel
from .rounding import MARGIN, SAMPLES, rounder
from .tensor_errors import TensorErrors

HALF_STEP = 2.0**-8  # the largest relative error of rounding to bfloat16
SUMS = 2e-6  # of float32, relative to the sum of the products' absolute values
INSIDE = 3 * HALF_STEP  # attention rounds ρ and its output
ROUNDED = HALF_STEP / math.sqrt(2)  # a random error of this size has the variance of rounding, which a mantissa reduces


class _Product(NamedTuple):
    """found = left right + added, of tensors that were recorded"""

    found: Tensor
    left: Tensor
    right: Tensor
    added: Tensor | None = None

    def error(self) -> float:
        """The largest error, relative to the sum of absolute products, beyond the rounding of a stored result."""
        left, right = (x.to(torch.bfloat16).double() for x in (self.left, self.right))
        exact, size = left @ right, left.abs() @ right.abs()
        if self.added is not None:
            exact, size = exact + self.added, size + self.added.abs()
        stored = HALF_STEP * (1 + SUMS) * exact.abs() if self.found.dtype == torch.bfloat16 else 0.0
        beyond = ((self.found.double() - exact).abs() - stored) / size.clamp(min=torch.finfo(torch.float32).tiny)
        return math.inf if beyond.isnan().any() else max(beyond.max().item(), 0.0)


def mixed_paths(model: GPT, batch: Batch, reference: ReferenceModel, seed: int) -> Iterator[Path]:
    """The checks of a model in mixed precision; `reference` is that of its weights."""
    seen: dict[str, Tensor] = {}
    with own_gradients(model.parameters()):
        record_pass(
            model, batch.tokens, batch.targets, batch.lengths, record=seen.__setitem__, objective=batch.objective
        )
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        products = list(_products(model, seen))
    section = "Products in mixed precision"
    for id, product in products:
        yield Path(section, id, "rounded operands", "float64", SUMS, partial(_outcome, product.error))
    for i, block in enumerate(model.blocks):
        q, k, v = (seen[f"blocks.{i}.{letter}"].transpose(0, 1).double() for letter in "qkv")
        spans = attention.spans_of(model.pack(batch.tokens, batch.lengths).lengths)
        exact = attention.forward(q, k, v, spans, block.attn.causal, block.attn.window)[0].flatten(1)
        error = ((seen[f"blocks.{i}.a_3"].double() - exact).norm() / exact.norm()).item()
        yield Path(
            section, f"blocks.{i}.a_3 of q, k, v", "rounded operands", "float64", INSIDE, partial(_outcome, error)
        )
    found, explained = TensorErrors(), TensorErrors()
    generator = torch.Generator(model.device).manual_seed(seed)
    passes = [reference.parts(rounder(ROUNDED, generator)) for _ in range(SAMPLES)]
    for exact_part, *samples in zip(reference.parts(), *passes, strict=True):
        for own, kind in ((seen, "deltas"), (grads, "grads")):
            for name, x in getattr(exact_part, kind).items():
                rows = exact_part.rows if kind == "grads" else None
                ours = own.get(name, torch.full_like(x, math.nan) if rows is None else None)
                if ours is None or name.endswith(("delta_raw", "delta_causal")):  # never formed in training
                    continue
                found.add(name, ours if rows is None else ours[rows], x, norm=True)
                for sample in samples:
                    explained.add(name, getattr(sample, kind)[name], x, norm=True)
    limits = explained.relative(NORM_FLOOR)
    section = "Computed in mixed precision"
    for name, error in found.relative(NORM_FLOOR).items():
        id, limit = f"{name} in mixed precision", MARGIN * limits[name]
        yield Path(section, id, "", "autograd", limit, partial(_outcome, error))
    expected = gradients_of(model, batch)
    for path in training_paths(model, batch, expected, "one pass"):
        yield path._replace(
            section="Code paths in mixed precision", id=f"{path.id}, mixed", limit=TOLERANCE[torch.float32]
        )


def _outcome(error: float | Callable[[], float]) -> Outcome:
    return (error() if callable(error) else error), ""


def _products(model: GPT, seen: dict[str, Tensor]) -> Iterator[tuple[str, _Product]]:
    """The three products of every linear layer whose inputs and outputs are recorded: a w, Δ wᵗ and aᵗ Δ."""
    for i, block in enumerate(model.blocks):
        for step in block.steps():
            layers = [x for x in step.layers.values() if isinstance(x, Affine)]
            if step.kind == "linear" and not any(layer.adapted for layer in layers):
                outputs = [f"blocks.{i}.{name}" for name in step.outputs]
                yield from _of_layers(layers, f"blocks.{i}.{step.inputs[0]}", outputs, seen)
    if not model.head.adapted:
        yield from _of_layers([model.head], "a_11", ["a_12"], seen, shared=model.config.tied)


def _of_layers(
    layers: list[Affine], given: str, outputs: list[str], seen: dict[str, Tensor], shared: bool = False
) -> Iterator[tuple[str, _Product]]:
    """Layers of one input, whose outputs are side by side."""
    a, out = seen[given], torch.cat([seen[x] for x in outputs], 1)
    delta = torch.cat([seen[signal(x)] for x in outputs], 1)
    w = torch.cat([layer.plain().effective_weight() for layer in layers], 1)
    biases = [layer.plain().added_bias() for layer in layers]
    b = None if biases[0] is None else torch.cat([x for x in biases if x is not None])
    yield f"{outputs[0]} of {given}", _Product(out, a, w, b)
    yield f"{signal(given)} of {signal(outputs[0])}", _Product(seen[signal(given)], delta, w.t())
    columns = torch.split(delta, [sum(layer.plain().widths) for layer in layers], 1)
    for layer, its_delta, name in zip(layers, columns, outputs, strict=False):
        weight = layer.plain().weight
        if weight is not None and weight.grad is not None and not shared:
            grad = weight.grad if layer.plain().in_out else weight.grad.t()
            yield f"∂w of {given} and {signal(name)}", _Product(grad.clone(), a.t(), its_delta)

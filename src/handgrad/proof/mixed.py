"""Mixed precision, proven in two steps, for every error signal and every parameter.

1. Each step of a recorded pass against float64, from the rounded operands that it read: only float32 sums may differ, and
   the rounding of a result that is stored in bfloat16. A wrong formula is a large error here, whatever the network rounds.
2. Each error signal and gradient of the whole network against autograd in float64: the error may be as large as what
   rounding explains.

What rounding explains is measured by passes with a random rounding error: in every intermediate of the network, and where
attention and adapters round inside a step.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..checks import MIXED
from ..model.gpt import GPT
from ..model.inspect.trace import own_gradients, record_pass
from ..model.passes.objective import MeanLoss
from ..ops.linear import FEW_ROWS
from ..tolerances import ENTRY_FLOOR, NORM_FLOOR, TOLERANCE
from .paths import (
    PASSES,
    SMALL_MODEL,
    Batch,
    Outcome,
    Path,
    batches_with_prefixes,
    example_paths,
    generation_paths,
    gradients_of,
    training_paths,
    worst_error,
)
from .recorded_steps import Inside, RecordedSteps
from .reference import reference_logits
from .reference_model import Part, ReferenceModel
from .rounding import MARGIN, SAMPLES, rounder
from .tensor_errors import TensorErrors

HALF_STEP = 2.0**-8  # the largest relative error of rounding to bfloat16
SUMS = 1e-5  # of float32: sums, norms, exponentials, relative to the largest entry
NUDGE = 2.0**-21  # by which two chains of a few operations in float32 may differ
ROUNDED = HALF_STEP / math.sqrt(2)  # a random error of this size has the variance of rounding, which a mantissa reduces


def mixed_paths(model: GPT, batch: Batch, reference: ReferenceModel, seed: int) -> Iterator[Path]:
    """The checks of a model in mixed precision; `reference` is that of its weights."""
    seen = {"loss": torch.zeros((), dtype=torch.float64)}
    with own_gradients(model.parameters()):
        loss = record_pass(
            model, batch.tokens, batch.targets, batch.lengths, record=seen.__setitem__, objective=batch.objective
        )
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen["loss"].fill_(loss)
    change = rounder(ROUNDED, torch.Generator(model.device).manual_seed(seed))
    recorded = RecordedSteps(reference, seen)
    found = _Computed(recorded.seen, grads)
    steps, sums = {}, SUMS + max(reference.lengths) * torch.finfo(torch.float32).eps  # angles grow with the position
    inside = [Inside(), *(Inside(change, x) for x in (NUDGE, -NUDGE) * (SAMPLES // 2))]
    kinds = {"values": 0.0, "deltas": ENTRY_FLOOR, "grads": ENTRY_FLOOR}
    for name, error, explained in found.errors(recorded.parts(inside), kinds):
        note, steps[name] = "rounds inside" if explained else "", error
        id, limit = f"{name}, its step", sums + MARGIN * explained
        yield Path("Mixed precision, each step from what it read", id, note, "float64", limit, partial(_outcome, error))
    logits: list[Tensor] = []

    def passes() -> Iterator[Sequence[Part]]:
        for parts in zip(reference.parts(), *(reference.parts(change) for _ in range(SAMPLES)), strict=True):
            found_12 = (part.values["a_12"] for part in parts if "a_12" in part.values)
            logits.extend(torch.log_softmax(reference_logits(x, reference.choices), 1) for x in found_12)
            yield parts

    for name, error, explained in found.errors(passes(), {"deltas": NORM_FLOOR, "grads": NORM_FLOOR}, norm=True):
        id, note, limit = f"{name}, mixed", f"its step: {steps[name]:.1e}", MARGIN * explained
        yield Path("Mixed precision, the whole network", id, note, "autograd", limit, partial(_outcome, error))
    exact, *samples = logits
    explained = max((x - exact).abs().max().item() for x in samples) / exact.abs().max().item()
    float32 = TOLERANCE[torch.float32]
    paths = [(path, float32) for path in training_paths(model, batch, (loss, grads), "recorded pass")]
    paths += [(path, path.limit) for path in _prefix_paths(model, batch)]
    if model.size <= SMALL_MODEL and type(batch.objective) is MeanLoss:
        paths += [(path, HALF_STEP) for path in example_paths(model, batch)]
    if model.config.causal:  # products of a few rows round nothing, unless the weights are rounded
        limits = [float32 + (MARGIN * explained if n > FEW_ROWS or model.packed else 0.0) for n in PASSES.values()]
        paths += zip(generation_paths(model, batch, exact, ""), limits, strict=True)
    for path, limit in paths:
        yield path._replace(section="Code paths in mixed precision", id=f"{path.id}, mixed", limit=limit)


def _prefix_paths(model: GPT, batch: Batch) -> Iterator[Path]:
    """Prefixes computed once round what sequences alone do not, sums over branches, and may be `MARGIN` times as far from
    float32 as those are."""
    for name, given in batches_with_prefixes(model, batch).items():
        alone = gradients_of(model, given)
        model.precision = "float32"
        right = gradients_of(model, given)
        model.precision = MIXED
        right = right[0], {name: x for name, x in right[1].items() if not x.isnan().any()}
        limit = MARGIN * worst_error(alone, right, norm=True)[0]
        measure = lambda given=given, right=right: worst_error(gradients_of(model, given, share=True), right, norm=True)  # noqa: E731
        yield Path("", f"gradients, {name} prefixes computed once", "", "float32", limit, measure)


def _outcome(error: float) -> Outcome:
    return error, ""


class _Computed:
    """What a pass computed, in its order: tensors by name, and gradients by parameter name."""

    def __init__(self, seen: dict[str, Tensor], grads: dict[str, Tensor]):
        self.tensors = {"values": seen, "deltas": seen, "grads": grads}
        self.order = {name: i for i, name in enumerate([*seen, *grads])}

    def errors(
        self, parts: Iterable[Sequence[Part]], kinds: dict[str, float], norm: bool = False
    ) -> list[tuple[str, float, float]]:
        """Name, error and the largest error of the samples, which are all parts but the first, of every tensor of these
        kinds. Errors are relative to at least the given share of the largest tensor of a kind; they are those of norms, or
        of entries beyond the rounding of a stored result."""
        found, explained = ({kind: TensorErrors() for kind in kinds} for _ in range(2))
        for exact, *samples in parts:
            for kind in kinds:
                for name, x in getattr(exact, kind).items():
                    if name.endswith(("delta_raw", "delta_causal")):  # never formed in training
                        continue
                    ours = self.tensors[kind].get(name)
                    if ours is None:
                        ours = torch.full_like(x, math.nan)
                    elif exact.rows is not None:
                        ours = ours[exact.rows]
                    found[kind].add(name, ours if norm else _beyond_storage(ours, x), x, norm)
                    for sample in samples:
                        explained[kind].add(name, getattr(sample, kind)[name], x, norm)
        limits = {name: x for kind, floor in kinds.items() for name, x in explained[kind].relative(floor).items()}
        errors = {name: x for kind, floor in kinds.items() for name, x in found[kind].relative(floor).items()}
        return [(name, errors[name], limits[name]) for name in sorted(errors, key=lambda x: self.order.get(x, -1))]


def _beyond_storage(found: Tensor, exact: Tensor) -> Tensor:
    """What was found, without the error that storing it in bfloat16 explains"""
    if found.dtype is not torch.bfloat16:
        return found
    difference = found.double() - exact
    return exact + difference.sign() * (difference.abs() - HALF_STEP * exact.abs()).clamp(min=0)

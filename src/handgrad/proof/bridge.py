"""Compare the gradients of a PyTorch model before and after parts of it were replaced (`hg.nn.replace`)."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import HandgradError
from ..tolerances import ENTRY_FLOOR, NORM_FLOOR, TOLERANCE
from . import new_adapters
from .oracles import differentiate, loss_gradients, relative_error
from .tensor_errors import TensorErrors

MARGIN = 3.0  # times the error that the original itself has in a narrow dtype


class Gradients(NamedTuple):
    """The loss of a batch and the gradient of every trainable parameter."""

    loss: float
    grads: dict[str, Tensor]


class Original(NamedTuple):
    """What a replaced model must give: the original's loss and gradients, in float32 if it computes in less, and the
    largest relative error of each, by norm where it rounds: a single entry is then off by chance."""

    right: Gradients
    allowed: dict[str, float]
    allowed_loss: float
    by_norm: bool


class Comparison(NamedTuple):
    """The largest error of a gradient, relative to its largest entry or its norm, and where it is."""

    error: float
    parameter: str
    tolerance: float
    compared: int

    def __str__(self) -> str:
        return (
            f"{self.compared} gradients equal to the original's: largest relative error {self.error:.1e} in {self.parameter}"
            f" (allowed {self.tolerance:.0e})"
        )


def gradients_of(network: nn.Module, batch: Mapping[str, Any]) -> Gradients:
    """Of the network without dropout, by its own backward pass. Its `.grad`, its modes and its random numbers are
    restored."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    for module in modes:
        if "lm_head" in module._modules:
            module.training = True  # of this module alone: it then computes its loss as in training
    try:
        with torch.random.fork_rng(devices=()), new_adapters.filled(network):
            loss, grads = loss_gradients(network, dict(batch))
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not math.isfinite(loss):
        raise HandgradError(f"the loss of this batch is {loss}: there is nothing to compare")
    if not grads:
        raise HandgradError("the loss depends on no trainable parameter")
    return Gradients(loss, grads)


def original_of(
    network: nn.Module, batch: Mapping[str, Any], tolerance: float | None = None, mixed: bool = False
) -> Original:
    """The gradients before anything is replaced. A model in bfloat16 or under autocast rounds: it is compared with float32,
    and a replaced one may be `MARGIN` times as far from that. For one in mixed precision, which rounds what autocast does
    except results, autocast is the measure."""
    kind = next(network.parameters()).device.type
    if mixed and tolerance is None:
        with torch.autocast(kind, torch.bfloat16):
            return original_of(network, batch)
    found = gradients_of(network, batch)
    dtypes = {p.dtype for p in network.parameters() if p.is_floating_point()}
    wide = dtypes == {torch.float32}
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    if tolerance is not None or not dtypes & {torch.bfloat16, torch.float16}:
        # transformers computes norms, rotations and the loss in float32 even in a float64 model
        limit = TOLERANCE[torch.float32] if tolerance is None else tolerance
        return Original(found, dict.fromkeys(found.grads, limit), limit, by_norm=False)
    with torch.autocast(kind, enabled=False):
        right = gradients_of(network if wide else copy.deepcopy(network).float(), batch)
    least = TOLERANCE[torch.bfloat16]
    own = {name: max(least, MARGIN * error) for name, error in _errors(found, right, by_norm=True).items()}
    return Original(right, own, max(least, MARGIN * abs(found.loss - right.loss)), by_norm=True)


def compare(before: Original, after: Gradients) -> Comparison:
    """Compare every gradient; raises if one differs by more than is allowed, or if one is missing."""
    right = before.right
    missing = sorted(set(right.grads) ^ set(after.grads))
    if missing:
        raise HandgradError(f"{missing[0]} has a gradient only {'before' if missing[0] in right.grads else 'after'}")
    errors = _errors(after, right, before.by_norm)
    worst = max(errors, key=lambda name: errors[name] / before.allowed[name])
    error, allowed = errors[worst], before.allowed[worst]
    if not error <= allowed:
        raise HandgradError(
            f"the gradient of {worst} differs from the original's by {error:.1e} (allowed {allowed:.0e}):"
            " the replacement was undone"
        )
    if not abs(after.loss - right.loss) <= before.allowed_loss * max(1.0, abs(right.loss)):
        raise HandgradError(f"the loss is {after.loss} instead of {right.loss}: the replacement was undone")
    return Comparison(error, worst, allowed, len(errors))


def _errors(found: Gradients, right: Gradients, by_norm: bool) -> dict[str, float]:
    """Relative to the largest entry of each gradient, or to its norm."""
    errors = TensorErrors()
    for name, grad in right.grads.items():
        if name in found.grads:
            errors.add(name, found.grads[name], grad, by_norm)
    return errors.relative(NORM_FLOOR if by_norm else ENTRY_FLOOR)


def function_error(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: Sequence[Tensor], *, gradients: bool
) -> float | None:
    """The largest relative error of a function's value and, if asked for, of its gradients: of `ours` in the dtype of the
    inputs, against `theirs` in a wider one. None if the latter is not finite."""
    wide = torch.float32 if inputs[0].dtype == torch.bfloat16 else torch.float64
    widened = [x.to(wide) for x in inputs]
    with torch.no_grad():
        pairs = [(ours(*inputs), theirs(*widened))]
    if gradients:
        size = pairs[0][1].numel()
        upstream = (
            torch.linspace(0, 7.0 * size**0.5, size, dtype=wide, device=inputs[0].device).cos().view_as(pairs[0][1])
        )
        signal = upstream.to(inputs[0].dtype)
        found = differentiate(ours, *inputs, upstream=signal)
        pairs += zip(found, differentiate(theirs, *widened, upstream=signal.to(wide)), strict=True)
    if not all(bool(x.isfinite().all()) for _, x in pairs):
        return None
    floor = NORM_FLOOR * max(x.abs().max().item() for _, x in pairs)  # gradients may cancel to 0
    return max(relative_error(x, y, floor=floor) for x, y in pairs)

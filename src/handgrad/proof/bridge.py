"""Compare the gradients of a PyTorch model before and after parts of it were replaced (`hg.nn.replace`)."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import HandgradError
from ..tolerances import ENTRY_FLOOR, TOLERANCE
from . import new_adapters
from .oracles import loss_gradients, relative_error


class Gradients(NamedTuple):
    """The loss of a batch and the gradient of every trainable parameter."""

    loss: float
    grads: dict[str, Tensor]
    dtype: torch.dtype  # the narrowest in which anything is computed; an adapter may be wider than its model


class Comparison(NamedTuple):
    """The largest error of a gradient, relative to its largest entry, and where it is."""

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
    state = torch.get_rng_state()
    network.eval()
    for module in modes:
        if "lm_head" in module._modules:
            module.training = True  # of this module alone: it then computes its loss as in training
    try:
        with new_adapters.filled(network):
            loss, grads = loss_gradients(network, dict(batch))
    finally:
        for module, mode in modes.items():
            module.training = mode
        torch.set_rng_state(state)
    return Gradients(loss, grads, _narrowest(network))


def _narrowest(network: nn.Module) -> torch.dtype:
    dtypes = {p.dtype for p in network.parameters() if p.is_floating_point()}
    kind = next(network.parameters()).device.type
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    # transformers computes norms, rotations and the loss in float32 even in a float64 model
    return max((torch.float32, *dtypes), key=lambda d: torch.finfo(d).eps)


def compare(before: Gradients, after: Gradients, tolerance: float | None = None) -> Comparison:
    """Compare every gradient; raises if one differs by more than the tolerance, or if one is missing."""
    missing = sorted(set(before.grads) ^ set(after.grads))
    if missing:
        raise HandgradError(f"{missing[0]} has a gradient only {'before' if missing[0] in before.grads else 'after'}")
    if not before.grads:
        raise HandgradError("the loss depends on no trainable parameter")
    if not math.isfinite(before.loss):
        raise HandgradError(f"the loss of the original is {before.loss}: nothing can be compared, and nothing was replaced")
    largest = max(grad.abs().max().item() for grad in before.grads.values())
    errors = {
        name: relative_error(after.grads[name], grad, floor=ENTRY_FLOOR * largest)
        for name, grad in before.grads.items()
    }
    worst = max(errors, key=errors.__getitem__)
    allowed = TOLERANCE.get(before.dtype, TOLERANCE[torch.bfloat16]) if tolerance is None else tolerance
    if not errors[worst] <= allowed:
        raise HandgradError(
            f"the gradient of {worst} differs from the original's by {errors[worst]:.1e} (allowed {allowed:.0e}):"
            " the replacement was undone"
        )
    if not abs(after.loss - before.loss) <= allowed * max(1.0, abs(before.loss)):
        raise HandgradError(f"the loss is {after.loss} instead of {before.loss}: the replacement was undone")
    return Comparison(errors[worst], worst, allowed, len(errors))

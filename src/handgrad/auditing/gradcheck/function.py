"""The checked function: a forward pass, and the gradients that its backward pass gives for it.

It may be an autograd.Function, any function of tensors that autograd differentiates, or a pair of plain functions. Autograd
here runs the backward pass that is checked; it is never the judge.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import HandgradError


@dataclass(frozen=True)
class Function:
    """forward(*inputs) → outputs; backward(*deltas, *inputs) → one gradient per input, or autograd's if it is None"""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None

    def outputs(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The outputs that are floating-point tensors, without a graph."""
        with torch.no_grad():
            return [x.detach() for x in self._call(inputs)]

    def gradients(self, inputs: Sequence[Any], deltas: Sequence[Tensor]) -> list[Tensor | None]:
        """What the backward pass gives for every floating-point input."""
        if self.backward is not None:
            with torch.no_grad():
                found = self.backward(*deltas, *inputs)
            found = list(found) if isinstance(found, tuple | list) else [found]
            wanted = sum(is_float(x) for x in inputs)
            if len(found) == len(inputs) != wanted:
                found = [g for g, x in zip(found, inputs, strict=True) if is_float(x)]
            if len(found) != wanted:
                raise HandgradError(f"backward returned {len(found)} gradients for {wanted} floating-point inputs")
            return found
        leaves = [x.detach().requires_grad_() if is_float(x) else x for x in inputs]
        with torch.enable_grad():
            outputs = self._call([_view(x) for x in leaves])
        kept = [(y, d) for y, d in zip(outputs, deltas, strict=True) if y.requires_grad]
        floats = [x for x in leaves if is_float(x)]
        if not kept:
            return [None] * len(floats)
        chosen, given = zip(*kept, strict=True)
        return list(torch.autograd.grad(chosen, floats, given, allow_unused=True))

    def _call(self, inputs: Sequence[Any]) -> list[Tensor]:
        made = self.forward(*inputs)
        outputs = list(made) if isinstance(made, tuple | list) else [made]
        found = [y for y in outputs if isinstance(y, Tensor) and y.is_floating_point()]
        if not found:
            raise HandgradError(f"{self.name} returned no floating-point tensor")
        return found


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _view(x: Any) -> Any:
    """The same memory, no longer a leaf: a function may then work in place."""
    return x.as_strided(x.shape, x.stride(), x.storage_offset()) if is_float(x) else x


def as_function(function: Any, backward: Callable[..., Any] | None) -> Function:
    """What is checked: `function` with its own backward pass, or with `backward`."""
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        if backward is not None:
            raise HandgradError("an autograd.Function has its own backward: leave out backward=")
        return Function(function.__name__, function.apply, None)
    if not callable(function):
        raise HandgradError(f"the function must be callable, or an autograd.Function, not a {type(function).__name__}")
    return Function(getattr(function, "__name__", type(function).__name__), function, backward)

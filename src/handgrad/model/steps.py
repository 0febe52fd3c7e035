"""`Step`: what a block computes, as data. `Block.steps()` lists them in order; whatever describes, checks or explains a
block reads that list instead of knowing the order itself.

    for step in block.steps():
        step.kind, step.inputs, step.outputs      "norm", ("a_1",), ("a_2",)
"""

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

from ..errors import HandgradError
from .layers.linear import Affine
from .layers.norms import Norm


class Step(NamedTuple):
    """One step of a block. The error signal of an activation has its name with `delta` instead of `a`: see `signal`."""

    name: str  # norm_1, attention, projection, skip_1 …
    kind: str  # norm, attention, linear, activation, gated, add
    inputs: tuple[str, ...]  # activations, by their names in a trace, without the block's prefix
    outputs: tuple[str, ...]
    layers: dict[str, Affine | Norm] = {}  # by the number or letter of their parameters: w_1, w_q  # noqa: RUF012
    inside: tuple[str, ...] = ()  # error signals inside the step that a trace records


@cache
def signal(name: str) -> str:
    """The name of an activation's error signal: a_4 → delta_4, blocks.0.a_gate → blocks.0.delta_gate"""
    block, dot, last = name.rpartition(".")
    if not last.startswith("a_"):
        raise ValueError(f"{name} is not the name of an activation, which begins with a_")
    return f"{block}{dot}delta_{last[2:]}"


class UnknownStep(HandgradError):
    """A block has a step that a reader does not know."""


def require(steps: Iterable[Step], known: Collection[str], reader: str) -> None:
    """Raise if a step has a kind that `reader` does not know."""
    for step in steps:
        if step.kind not in known:
            raise UnknownStep(
                f"{reader} cannot read the step {step.name!r} of this model's blocks, which is of kind {step.kind!r};"
                f" it knows {', '.join(sorted(known))}"
            )


def require_order(steps: Iterable[Step], known: Sequence[str], reader: str) -> None:
    """Raise unless these are the steps that `reader`, who computes a block in its own way, knows: by name and in order."""
    for step, expected in zip_longest(steps, known):
        if step is None:
            raise UnknownStep(f"{reader} expects the step {expected!r}, which this model's blocks do not have")
        if step.name != expected:
            raise UnknownStep(f"{reader} does not know the step {step.name!r} of this model's blocks ({step.kind})")

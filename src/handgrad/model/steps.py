"""`Step`: what a block computes, as data. `Block.steps()` lists them in order; whatever describes, checks or explains a
block reads that list instead of knowing the order itself.

    for step in block.steps():
        step.kind, step.inputs, step.outputs      "norm", ("a_1",), ("a_2",)
"""

from collections.abc import Collection, Iterable
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

from ..errors import HandgradError
from .layers.linear import Affine
from .layers.norms import Norm
from .layers.sinks import Sinks
from .layers.taps import Taps

Layer = Affine | Norm | Sinks | Taps  # the parameters of a step


class Step(NamedTuple):
    """One step of a block. The error signal of an activation has its name with `delta` instead of `a`: see `signal`."""

    name: str  # norm_1, attention, projection, skip_5 …
    kind: str  # norm, attention, convolution, linear, activation, gated, add
    inputs: tuple[str, ...]  # activations, by their names in a trace, without the block's prefix
    outputs: tuple[str, ...]
    layers: dict[str, Layer] = {}  # by the number or letter of their parameters: w_1, w_q  # noqa: RUF012
    inside: tuple[str, ...] = ()  # error signals inside the step that a trace records
    scale: float = 1.0  # of what an addition adds to the stream
    extras: tuple[str, ...] = ()  # what it does besides, each in a word or two

    def __str__(self) -> str:
        """All that distinguishes it: norm_1: norm of a_1 → a_2 by 1"""
        by = f" by {' '.join(self.layers)}" if self.layers else ""
        scaled = () if self.scale == 1 else (f"scale {self.scale:g}",)
        more = "".join(f", {extra}" for extra in (*scaled, *self.extras))
        return f"{self.name}: {self.kind} of {', '.join(self.inputs)} → {', '.join(self.outputs)}{by}{more}"


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


# The block of the paper's Table 2, and its gated form, step by step, each in the forms that it may have. What computes a
# block in another way than model/ knows these and no others: a step that is added, or does more, is not in this list.
PAPER_BLOCK: tuple[tuple[str, ...], ...] = (
    ("norm_1: norm of a_1 → a_2 by 1",),
    tuple(
        f"attention: attention of a_2 → a_3 by {layers}{norms}{sink}"
        for layers in ("2", "q k v")
        for norms in ("", " q_norm k_norm")
        for sink in ("", " sink")
    ),
    ("projection: linear of a_3 → a_4 by 3",),
    ("skip_5: add of a_1, a_4 → a_5",),
    ("norm_5: norm of a_5 → a_6 by 5",),
    ("expand: linear of a_6 → a_7 by 6", *(f"expand: linear of a_6 → a_gate, a_up by {x}" for x in ("6", "gate up"))),
    ("activation: activation of a_7 → a_8", "activation: gated of a_gate, a_up → a_8"),
    ("contract: linear of a_8 → a_9 by 8",),
    ("skip_10: add of a_5, a_9 → a_10",),
)


def require_block(steps: Iterable[Step], reader: str) -> None:
    """Raise unless these are the steps that `reader`, who computes a block in its own way, knows, in this order."""
    for step, forms in zip_longest(steps, PAPER_BLOCK):
        if step is None:
            raise UnknownStep(f"{reader} expects the step {forms[0]!r}, which this model's blocks do not have")
        if forms is None or str(step) not in forms:
            raise UnknownStep(f"{reader} does not know the step {step.name!r} of this model's blocks ({step})")

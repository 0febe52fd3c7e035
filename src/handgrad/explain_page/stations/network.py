"""The network as a list of steps under the names of a trace: the embedding, every block's own steps, the last norm, the head
and the loss. What the page shows, follows and checks reads this list: a rule per kind of step, and no second order.

    NetworkStep(0, "norm_1", "norm", ("blocks.0.a_1",), ("blocks.0.a_2",), …)
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from ...errors import HandgradError
from ...model.gpt import GPT
from ...model.layers.linear import Affine
from ...model.layers.norms import Norm
from ...model.steps import Layer, require, signal

KINDS = (  # of a block's steps
    "norm", "attention", "convolution", "linear", "add", "activation", "gated", "router", "experts", "mixture",
)  # fmt: skip
NEURONS = ("activation", "gated")  # the activation of a feed-forward layer that every token passes
FINAL_NORM, HEAD = "10", "11"  # the numbers of their parameters


class NetworkStep(NamedTuple):
    """A step with the names that its tensors have in a trace. Kinds outside the blocks: embedding, next (the input of a
    block is the output of the one before), loss."""

    block: int | None
    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layers: dict[str, Layer] = {}  # noqa: RUF012
    inside: tuple[str, ...] = ()  # error signals
    scale: float = 1.0  # of what an addition adds to the stream

    @property
    def here(self) -> str:
        """What the names of its parameters and gradients begin with."""
        return "" if self.block is None else f"blocks.{self.block}."

    @property
    def signals(self) -> tuple[str, ...]:
        """The error signals of its outputs."""
        return tuple(map(signal, self.outputs))

    def products(self) -> Iterator[tuple[str, Affine, tuple[str, ...]]]:
        """The number of each linear layer, the layer, and the letters of the matrices that it holds side by side: w_8 alone,
        w_gate and w_up, or w_q, w_k and w_v."""
        letters = self._letters()
        for number, layer in self.layers.items():
            if isinstance(layer, Affine):
                yield number, layer, tuple(islice(letters, len(layer.plain().widths)))

    def _letters(self) -> Iterator[str]:
        if self.kind == "attention":
            return iter("qkv")
        return iter(map(letter_of, self.outputs) if len(self.outputs) > 1 else self.layers)

    def norm(self) -> tuple[str, Norm]:
        """The number and the layer of a norm."""
        ((number, layer),) = self.layers.items()
        assert isinstance(layer, Norm)
        return number, layer


class Network:
    """The steps of a model in the order of the forward pass."""

    def __init__(self, model: GPT):
        self.blocks = [block_steps(model, b) for b in range(len(model.blocks))]
        self.start, self.end = self.blocks[0][0].inputs[0], self.blocks[-1][-1].outputs[0]  # of the residual stream
        self.steps = [NetworkStep(None, "embedding", "embedding", ("a_0",), (self.start,))]
        for b, steps in enumerate(self.blocks):
            if b:
                before = self.blocks[b - 1][-1].outputs
                self.steps.append(NetworkStep(b, "next", "next", before, steps[0].inputs))
            self.steps += steps
        self.steps += [
            NetworkStep(None, "last_norm", "norm", (self.end,), ("a_11",), {FINAL_NORM: model.final_norm}),
            NetworkStep(None, "head", "linear", ("a_11",), ("a_12",), {HEAD: model.head}),
            NetworkStep(None, "loss", "loss", ("a_12",), ("y_pred",)),
        ]
        self._makers = {name: step for step in self.steps for name in step.outputs}
        self._readers: dict[str, list[NetworkStep]] = {}
        for step in self.steps:
            for name in step.inputs:
                self._readers.setdefault(name, []).append(step)

    def maker(self, name: str) -> NetworkStep | None:
        """The step that computes an activation."""
        return self._makers.get(name)

    def readers(self, name: str) -> list[NetworkStep]:
        """The steps that read an activation. Its error signal is the sum of what they send back."""
        return self._readers.get(name, [])

    def first_read(self, step: NetworkStep) -> tuple[str, ...]:
        """The inputs whose error signal is complete once the backward pass has passed the step."""
        return tuple(name for name in step.inputs if self.readers(name)[0] is step)

    def added(self, name: str) -> NetworkStep | None:
        """The addition that alone reads an activation, and so passes its own error signal on to it, unless it scales it."""
        readers = self.readers(name)
        return readers[0] if len(readers) == 1 and readers[0].kind == "add" and readers[0].scale == 1 else None

    def beside(self, step: NetworkStep, name: str) -> tuple[list[str], bool]:
        """What reaches the error signal of an activation besides what `step`, which reads it, sends back: the error signals
        that additions pass on, and whether another branch sends one as well."""
        others = [x for x in self.readers(name) if x is not step]
        return [x for other in others if other.kind == "add" for x in other.signals], any(
            x.kind != "add" for x in others
        )

    def find(self, block: int, *kinds: str) -> NetworkStep:
        """The first step of a block that is of one of these kinds."""
        for step in self.blocks[block]:
            if step.kind in kinds:
                return step
        raise HandgradError(f"block {block} has no step of kind {' or '.join(kinds)}")

    def having(self, *kinds: str) -> list[int]:
        """The blocks with a step of one of these kinds."""
        return [b for b, steps in enumerate(self.blocks) if any(step.kind in kinds for step in steps)]

    def every(self, *kinds: str) -> str:
        """The same as a loop in Python: for b in range(4)"""
        found, n = self.having(*kinds), len(self.blocks)
        return f"for b in range({n})" if len(found) == n else f"for b in {found}"

    def neurons(self, block: int) -> tuple[NetworkStep, NetworkStep, NetworkStep]:
        """The feed-forward layer around the activation: what computes its inputs, itself, and what reads its output."""
        if block not in self.having(*NEURONS):
            raise HandgradError(f"block {block} has no neurons that all tokens pass: it has a mixture of experts")
        activation = self.find(block, *NEURONS)
        before = self.maker(activation.inputs[0])
        assert before is not None
        return before, activation, self.readers(activation.outputs[0])[0]

    def branches(self, step: NetworkStep) -> list[list[NetworkStep]]:
        """The steps of each branch that an addition adds to the stream, its first input."""
        stream, *ends = step.inputs
        found: list[list[NetworkStep]] = []
        for name in ends:
            steps: list[NetworkStep] = []
            while name != stream and (maker := self.maker(name)) is not None and maker.block == step.block:
                steps.append(maker)
                name = maker.inputs[0]
            found.append(steps[::-1])
        return found

    def holder(self, here: str, letter: str) -> tuple[NetworkStep, str] | None:
        """The step that holds w_letter, and the number of its layer: w_q may be a part of w_2."""
        for step in (step for step in self.steps if step.here == here):
            if letter in step.layers:
                return step, letter
            for number, _, letters in step.products():
                if letter in letters:
                    return step, number
        return None


def block_steps(model: GPT, block: int) -> list[NetworkStep]:
    """The steps of one block. Raises if one is of a kind that the page does not know."""

    def named(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"blocks.{block}.{name}" for name in names)

    steps = model.blocks[block].steps()
    require(steps, KINDS, "the explain page")
    return [
        NetworkStep(block, s.name, s.kind, named(s.inputs), named(s.outputs), s.layers, named(s.inside), s.scale)
        for s in steps
    ]


def letter_of(name: str) -> str:
    """The number or letter of an activation or its error signal: blocks.0.a_gate → gate"""
    return name.rpartition(".")[2].partition("_")[2]

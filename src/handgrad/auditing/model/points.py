"""The points of the network at which the audited model and ours are compared, and what computes each of them.

A point is an activation and its error signal, under the activation's name in a trace: blocks.0.a_5. Which there are, and
which modules they pass, follows from the steps of the blocks.
"""

from typing import NamedTuple

from ...model.block import Block
from ...model.gpt import GPT
from ...model.layers.experts import Experts
from ...model.layers.linear import Affine
from ...model.steps import Step, require, signal

MIXING = ("router", "experts", "mixture")  # the steps of a mixture of experts that are no layer
KINDS = (
    "norm",
    "attention",
    "convolution",
    "linear",
    "activation",
    "gated",
    "add",
    *MIXING,
)  # of steps whose places and mistakes are known
WHAT = {
    "norm_1": "the first norm's output", "attention": "the heads' output", "projection": "the attention's output",
    "convolution": "the gated convolution's output", "out_projection": "the convolution branch's output",
    "skip_5": "the stream after attention", "norm_5": "the second norm's output",
    "norm_4": "the output of the norm after attention",
    "norm_9": "the output of the norm after the feed-forward layer", "expand": "the expanded features",
    "router": "the score of each expert", "gates": "the gate of each expert", "mixture": "the mixture's output",
    "shared_gate": "the score of the shared expert", "activation": "the activated features",
    "contract": "the feed-forward layer's output", "skip_10": "the block's output",
}  # fmt: skip


class Point(NamedTuple):
    """Where a tensor is seen, and which modules compute its activation and its error signal."""

    name: str  # blocks.0.a_5
    module: str  # our name of the module that it passes
    side: str  # "in" or "out" of that module; "gates": what it is given beside the numbers of experts, as (n, E)
    made_by: str  # the module that computes the activation
    signal_by: str  # the module whose backward pass computes the error signal
    what: str  # the activation in words
    part: int = 0  # which half of the module's output, where it computes two at once
    parts: int = 1

    @property
    def signal(self) -> str:
        """The recorder's name of the error signal."""
        return signal(self.name)


class BlockSteps:
    """The steps of a block, and which of them compute and read an activation."""

    def __init__(self, block: Block):
        self.steps = block.steps()
        require(self.steps, KINDS, "the audit")
        self.makers = {name: step for step in self.steps for name in step.outputs}
        self.input, self.output = self.steps[0].inputs[0], self.steps[-1].outputs[0]

    def readers(self, name: str) -> list[Step]:
        """The steps that read an activation."""
        return [step for step in self.steps if name in step.inputs]

    def reader(self, name: str, *kinds: str) -> Step | None:
        """The first of them that is of one of these kinds."""
        return next((step for step in self.readers(name) if step.kind in kinds), None)

    def joined(self, name: str) -> str:
        """The activation with the same error signal: where a branch joins the stream as it is, that of the sum."""
        readers = self.readers(name)
        alone = len(readers) == 1 and readers[0].kind == "add" and readers[0].scale == 1
        return readers[0].outputs[0] if alone else name

    def branch(self, name: str) -> str:
        """What the branch is that ends in this activation."""
        step = self.makers[name]
        while step.kind not in ("norm", "attention", "convolution") and step.inputs[0] in self.makers:
            step = self.makers[step.inputs[0]]
        return step.kind if step.kind in ("attention", "convolution") else "feed-forward"

    def layer_of(self, name: str) -> Affine | None:
        """The linear layer that computes an activation; None if none does."""
        step = self.makers.get(name)
        if step is None or step.kind != "linear":
            return None
        layers = list(step.layers.values())
        found = layers[step.outputs.index(name) if len(layers) > 1 else 0]
        assert isinstance(found, Affine)
        return found


def points_of(model: GPT) -> list[Point]:
    """Every point, in the order of the forward pass."""
    n, last = model.config.table.names, len(model.blocks) - 1
    found: list[Point] = []
    for i, block in enumerate(model.blocks):
        here = f"{n['blocks']}.{i}"
        below = n["embed"] if i == 0 else f"{n['blocks']}.{i - 1}"
        above = n["final_norm"] if i == last else f"{n['blocks']}.{i + 1}"
        found += _points_of_block(block, f"blocks.{i}.", here, below, above)
    return [*found, Point("a_11", n["final_norm"], "out", n["final_norm"], n["head"], "the final norm's output")]


def _points_of_block(block: Block, prefix: str, here: str, below: str, above: str) -> list[Point]:
    """Norms and linear layers show their output; what the heads and the activation function compute is seen where the next
    layer reads it, a sum where the next norm does, and gates where experts do. What experts compute inside is not seen."""
    steps = BlockSteps(block)
    paths = {id(module): f"{here}.{name}" for name, module in block.named_modules()}

    def layers(step: Step) -> list[str]:
        return [paths.get(id(layer), paths[id(block.mixing)]) for layer in step.layers.values()]  # sinks are no module

    def source(step: Step) -> Step:  # the step, or the one before it that has layers
        return step if step.layers else source(steps.makers[step.inputs[0]])

    def branch(step: Step) -> str:  # the module that holds its layers
        return layers(source(step))[0].rpartition(".")[0]

    def routed(step: Step) -> str:  # the router, or the whole mixture
        return layers(source(step))[0] if step.kind == "router" else paths[id(block.mlp)]

    def reads(name: str) -> str:  # the module that computes the error signal of an activation
        readers = steps.readers(name)
        computing = [step for step in readers if step.kind != "add"]
        if not readers:
            return above
        for step in computing:
            if step.kind in MIXING:
                gates = name in steps.makers and steps.makers[name].kind == "router"
                return paths[id(block.mlp.experts)] if gates else routed(step)
        if len(computing) != 1:  # an addition, or several branches
            return here
        (step,) = computing
        inside = name in steps.makers and steps.makers[name].kind == "norm"
        return branch(step) if inside or step.kind not in ("norm", "linear") else layers(step)[0]

    points = [Point(prefix + steps.input, here, "in", below, reads(steps.input), "the block's input")]
    for step in steps.steps:
        for j, name in enumerate(step.outputs if step.kind != "experts" else ()):
            what, part, parts = WHAT.get(step.name, f"the output of {step.name}"), 0, 1
            if step.kind in ("norm", "linear"):
                own = layers(step)
                made = module = own[j if len(own) > 1 else 0]
                side = "out"
                if len(own) < len(step.outputs):
                    what, part, parts = f"the {name[2:]} projection's output", j, len(step.outputs)
            elif step.kind == "router":
                made, module, side = routed(step), paths[id(block.mlp.experts)], "gates"
            elif step.kind == "mixture":
                made, module, side = routed(step), routed(step), "out"
            else:
                made = here if step.kind == "add" else branch(step)
                reader = steps.reader(name, *(("norm",) if step.kind == "add" else ()), "linear")
                module, side = (here, "out") if reader is None else (layers(reader)[0], "in")
            points.append(Point(prefix + name, module, side, made, reads(name), what, part, parts))
    return points


def layers_by_signal(model: GPT) -> dict[str, list[str]]:
    """The layers whose gradients become known just after a point's error signal in the backward pass, by the point."""
    n = model.config.table.names
    found: dict[str, list[str]] = {"": [n["head"]], "a_11": [n["final_norm"]]}
    for i, block in enumerate(model.blocks):
        steps = BlockSteps(block)
        paths = {id(module): f"{n['blocks']}.{i}.{name}" for name, module in block.named_modules()}
        for step in steps.steps:
            if step.layers:
                (output, *_) = steps.readers(step.outputs[0])[0].outputs if step.kind == "experts" else step.outputs
                point = f"blocks.{i}.{steps.joined(output)}"
                own = [paths.get(id(layer), paths[id(block.mixing)]) for layer in step.layers.values()]
                found.setdefault(point, []).extend(own)
        if i == 0:
            found[f"blocks.0.{steps.input}"] = [n[x] for x in ("embed", "positions") if x in n]
    return found


def expert_layers(model: GPT) -> dict[str, tuple[int, int]]:
    """The layers of experts by their paths, each with the numbers of its block and of its expert."""
    blocks = model.config.table.names["blocks"]
    paths = {id(module): name for name, module in model.named_modules() if name.startswith(blocks)}
    return {
        paths[id(layer)]: (i, e)
        for i, block in enumerate(model.blocks)
        if isinstance(block.mlp, Experts)
        for e, expert in enumerate(block.mlp.experts)
        for layer in (*expert.projections(), expert.contract)
    }


def same_signals(model: GPT) -> set[str]:
    """Points whose error signal is that of another point."""
    numbered = [(i, BlockSteps(block)) for i, block in enumerate(model.blocks)]
    return {f"blocks.{i}.{name}" for i, steps in numbered for name in steps.makers if steps.joined(name) != name}

"""The gradients of one layer, computed again from a trace: from what enters the layer and the Δ that arrives at its end.

All gradients together are as large as the model; a trace without them is small.
"""

import torch
from torch import Tensor

from ...ops import attention
from ..gpt import GPT
from ..passes.arguments import Pass
from ..passes.readout import row_groups
from .trace import Trace, gradients, own_gradients


def layer_of(name: str) -> str:
    """The layer whose gradients are computed together: a block ("blocks.3"), "norm" or "tables", which has the head."""
    block, _, last = name.rpartition(".")
    return block or ("norm" if last.endswith("_10") else "tables")


@torch.no_grad()
def layer_gradients(model: GPT, trace: Trace, targets: Tensor, layer: str) -> dict[str, Tensor]:
    """The gradients of a layer by their names in a trace without edits, bit for bit those of the pass that was recorded. The
    weights must be the same as then. Parameters keep the `.grad` they had."""
    with own_gradients(model.parameters()):
        if layer == "norm":
            _run_norm(model, trace)
        elif layer == "tables":
            _run_tables(model, trace, targets)
        else:
            _run_block(model, trace, int(layer.rpartition(".")[2]))
        return gradients(model)


def _positions(trace: Trace) -> Tensor:
    return torch.cat([torch.arange(n, device=trace["a_0"].device) for n in trace.lengths])


def _run_block(model: GPT, trace: Trace, i: int) -> None:
    block, here = model.blocks[i], f"blocks.{i}."
    run = Pass(attention.spans_of(trace.lengths), rotations=model.rotations(_positions(trace), trace.lengths))
    with model.weights(block) as weights:
        run = run._replace(weights=weights)
        saved = block.forward(trace[here + "a_1"], run)[1]
        block.backward(trace[here + "delta_10"], saved, run)


def _run_norm(model: GPT, trace: Trace) -> None:
    norm = model.final_norm
    saved = norm.forward(trace[f"blocks.{len(model.blocks) - 1}.a_10"])[1]
    norm.backward(trace["delta_11"], norm.rebuild_output(saved)[0], saved)


def _run_tables(model: GPT, trace: Trace, targets: Tensor) -> None:
    """The head, then the embeddings: the order in which the two parts of a tied weight are added."""
    chosen = trace.objective.select(targets, model.config.n_vocab).reshape(-1)
    rows = (chosen >= 0).nonzero()[:, 0]
    delta_12, delta_1 = trace["delta_12"][rows], trace["blocks.0.delta_1"]
    with model.weights(model.head) as weights:
        run = Pass(weights=weights)
        for group in row_groups(len(rows), model.head):  # sums in the order of the pass
            delta = delta_12[group]
            model.head.accumulate(delta, trace["a_11"][rows[group]], run, model.head.upstream(delta, run))
    model.embed.backward(delta_1, trace["a_0"])
    if model.has("positions"):
        model.positions.backward(delta_1, _positions(trace))

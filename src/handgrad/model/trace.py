"""One forward and backward pass with everything recorded: each a_i, Δ_i, ρ and gradient under the name it has in the paper.

    trace["a_0"], trace["blocks.0.a_5"], trace["blocks.0.rho"], trace["blocks.0.delta_raw"], trace["delta_11"],
    trace["grad_w_tok"], trace["blocks.0.grad_w_q"] …

Rows are tokens, all sequences end to end; maps between tokens are (heads, n, n), zero between sequences.
"""

import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

import torch
from torch import Tensor

from ..errors import HandgradError
from .edited import EditedPass, Edits
from .gpt import GPT
from .layers import Affine
from .norms import Norm
from .objective import MEAN_LOSS, Objective
from .passes import Record, no_record
from .trace_html import trace_html


class Trace(Mapping[str, Tensor]):
    """The tensors of one pass by name. `loss` is what was differentiated: the mean over the targets, or the value of
    another `objective`."""

    def __init__(
        self,
        values: dict[str, Tensor],
        loss: float,
        lengths: tuple[int, ...],
        objective: Objective = MEAN_LOSS,
    ):
        self._values = values
        self.loss = loss
        self.lengths = lengths
        self.objective = objective

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            near = get_close_matches(name, self._values, 3) or list(self._values)[:3]
            raise KeyError(f"the trace has no {name!r}; it has {', '.join(near)} …")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        rows = [f"  {name:<24} {tuple(x.shape)!s:<20} ‖·‖ {x.double().norm():.3e}" for name, x in self.items()]
        return "\n".join([f"Trace: loss {self.loss:.6f}, {len(self)} tensors", *rows])

    def _repr_html_(self) -> str:
        return trace_html(self._values, self.loss)


def trace(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    lengths: list[int] | None = None,
    *,
    objective: Objective = MEAN_LOSS,
    edit: Edits | None = None,
    record: Record = no_record,
) -> Trace:
    """Run the model forward and backward once and record everything. Parameters keep the `.grad` they had.

    objective   What to differentiate: hg.PositionLoss(t), hg.LogitDifference(t, token, against); default: the mean loss.
    edit        Functions by name that replace tensors on their way, {"blocks.3.a_3": lambda a: 0 * a}. An edited
                activation changes everything after it, and Δ passes it unchanged; an edited Δ ("blocks.3.delta_3")
                changes everything below it. With an edit, an empty one included, skip connections and the signals
                inside attention are recorded as well.
    record      Called with every name and tensor as soon as it is computed, for example to show progress.
    """
    if not isinstance(objective, Objective):
        raise HandgradError("objective must be hg.PositionLoss(t) or hg.LogitDifference(t, token, against)")
    values: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        values[name] = value
        record(name, value)

    before = {p: p.grad for p in model.parameters()}
    try:
        for p in before:
            p.grad = None
        if edit is None:
            loss = model.loss_and_grads(tokens, targets, lengths, record=keep, all_signals=True, objective=objective)
        else:
            loss = _edited(edited_pass(model, tokens, targets, lengths, objective, edit, keep), objective)
        values |= gradients(model)
    finally:
        for p, grad in before.items():
            p.grad = grad
    return Trace(values, loss, model.pack(tokens, lengths).lengths, objective)


def edited_pass(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    lengths: list[int] | None,
    objective: Objective,
    edit: Edits,
    record: Record = no_record,
) -> EditedPass:
    """Prepare a pass with edits."""
    pieces = model.pieces(tokens, objective.select(targets, model.config.n_vocab), lengths, math.inf)
    if not pieces:
        raise HandgradError("every target is ignored (−100): there is nothing to trace in this batch")
    return EditedPass(model, pieces[0], edit, record)


@torch.no_grad()
def _edited(run: EditedPass, objective: Objective) -> float:
    value, delta_12 = run.forward(objective)
    run.backward(delta_12)
    run.check_names()
    return value


def gradients(model: GPT) -> dict[str, Tensor]:
    """Every parameter's `.grad` under the paper's name; w_q, w_k and w_v hold all heads side by side."""
    named: dict[str, Tensor] = {}

    def keep(prefix: str, number: str, layer: Affine | Norm) -> None:
        for letter, p in layer.named_symbols().items():
            if p is None or p.grad is None:
                continue
            plain = layer.plain() if isinstance(layer, Affine) else None
            if plain is not None and plain.parts and letter in "wb":
                for part, grad in plain.parts_of(letter, p.grad).items():
                    named[f"{prefix}grad_{letter}_{part}"] = grad
            else:
                turned = plain is not None and letter == "w" and not plain.in_out
                named[f"{prefix}grad_{letter}_{number}"] = p.grad.t() if turned else p.grad

    for name, table in model.tables().items():
        if table.weight is not None and table.weight.grad is not None:
            named[f"grad_{name}"] = table.weight.grad
    for i, block in enumerate(model.blocks):
        for number, layer in block.numbered().items():
            keep(f"blocks.{i}.", number, layer)
    keep("", "10", model.final_norm)
    keep("", "11", model.head)
    if model.config.tied:
        named.pop("grad_w_11", None)  # it is grad_w_tok
    return named

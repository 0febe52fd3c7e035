"""One forward and backward pass with everything recorded: each a_i, Δ_i, ρ and gradient under the name it has in the paper.

    trace["a_0"], trace["blocks.0.a_5"], trace["blocks.0.rho"], trace["blocks.0.delta_raw"], trace["delta_11"],
    trace["grad_w_tok"], trace["blocks.0.grad_w_q"] …

Rows are tokens, all sequences end to end; maps between tokens are (heads, n, n), zero between sequences.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial

import torch
from torch import Tensor, nn

from ..gpt import GPT
from ..layers.linear import Affine
from ..layers.taps import Taps
from ..passes.arguments import Pass, Record
from ..passes.objective import MEAN_LOSS, Objective
from ..passes.options import Finished, PassOptions, no_hook
from ..passes.readout import forward_at_once
from ..passes.router_losses import RouterLosses
from ..steps import Layer
from .edits import Editor, Edits
from .patch import Patch
from .tensor_view import shown_as
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
        text_of: Callable[[int], str] = str,
    ):
        self._values = values
        self._text_of = text_of  # of a token
        self.loss = loss
        self.lengths = lengths
        self.objective = objective

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            near = get_close_matches(name, self._values, 3) or list(self._values)[:3]
            raise KeyError(f"the trace has no {name!r}; it has {', '.join(near)} …")
        return shown_as(self._values[name], name, self)

    @property
    def words(self) -> list[str]:
        """The text of every token, by the model's tokenizer; its id, if the model has none."""
        return [self._text_of(id) for id in self._values["a_0"].tolist()]

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
    record: Record | None = None,
) -> Trace:
    """Run the model forward and backward once and record everything. Parameters keep the `.grad` they had.

    objective   What to differentiate: hg.PositionLoss(t), hg.LogitDifference(t, token, against); default: the mean loss.
    edit        Functions by name that replace tensors during the pass, {"blocks.3.a_3": lambda a: 0 * a}. An edited
                activation changes everything after it, and Δ passes it unchanged; an edited Δ ("blocks.3.delta_3")
                changes everything below it. With an edit, an empty one included, skip connections and the signals
                inside attention are recorded as well.
    record      Called with every name and tensor as soon as it is computed, for example to show progress.
    """
    values: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        values[name] = value
        if record is not None:
            record(name, value)

    with own_gradients(model.parameters()):
        loss = record_pass(model, tokens, targets, lengths, objective=objective, edit=edit, record=keep)
        values |= gradients(model)
    return Trace(values, loss, model.pack(tokens, lengths).lengths, objective, partial(_text, model))


def _text(model: GPT, id: int) -> str:
    return str(id) if model.tokenizer is None else str(model.tokenizer.decode([id]))


@contextmanager
def without_gradients(model: GPT) -> Iterator[None]:
    """Within the context no parameter gets a gradient; afterwards each trains or not as before."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trained:
            p.requires_grad_(False)
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


@contextmanager
def own_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Within the context no parameter has a `.grad` at first; afterwards each has the one it had before."""
    before = {p: p.grad for p in parameters}
    try:
        for p in before:
            p.grad = None
        yield
    finally:
        for p, grad in before.items():
            p.grad = grad


@torch.no_grad()
def record_pass(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    lengths: list[int] | None = None,
    *,
    record: Record,
    finished: Finished = no_hook,
    objective: Objective = MEAN_LOSS,
    edit: Edits | None = None,
    n_targets: int | None = None,
    routers: RouterLosses | None = None,
) -> float:
    """Record every activation and error signal of one pass; return the value of the objective. The gradients are added into
    `.grad`; `finished` is called with the parameters of each layer as soon as theirs are final, and may free them."""
    editor = None if edit is None else _editor(model, edit, record)
    options = PassOptions(finished=finished, record=record if editor is None else editor, routers=routers)
    work = model.prepare(model.pack(tokens, lengths), targets, objective, n_targets, options, complete=True)
    value = model.differentiate(work, options)
    if editor is not None:
        editor.check_names()
    return value


@torch.no_grad()
def edited_forward(
    model: GPT, tokens: Tensor, targets: Tensor, edit: Edits, objective: Objective = MEAN_LOSS
) -> tuple[float, dict[str, Tensor]]:
    """The value of the objective with these edits, and the tensors of the forward pass, without a backward pass."""
    values: dict[str, Tensor] = {}
    editor = _editor(model, edit, values.__setitem__)
    work = model.prepare(model.pack(tokens), targets, objective, complete=True)
    state = model.forward_pass(work, PassOptions(record=editor), lowest=len(model.blocks))
    with model.weights(model.head) as weights:
        run = Pass(observer=editor, weights=weights)
        value, *_ = forward_at_once(
            model.ending(), state.a_10[0], work.pieces[0], work.objective, 1 / work.n_targets, run
        )
    editor.check_names()
    return value / work.n_targets, values


def _editor(model: GPT, edit: Edits, record: Record) -> Editor:
    if isinstance(edit, Patch):
        edit.check_vocabulary(model.config.n_vocab)
    return Editor(edit, record)


def gradients(model: GPT, of: Collection[nn.Parameter] | None = None) -> dict[str, Tensor]:
    """The `.grad` of every parameter, or of these, under the paper's name; w_q, w_k and w_v hold all heads side by side."""
    named: dict[str, Tensor] = {}
    chosen = None if of is None else set(of)

    def gradient(p: nn.Parameter | None) -> Tensor | None:
        return None if p is None or (chosen is not None and p not in chosen) else p.grad

    def keep(prefix: str, number: str, layer: Layer) -> None:
        for letter, p in layer.named_symbols().items():
            grad = gradient(p)
            if grad is None:
                continue
            plain = layer.plain() if isinstance(layer, Affine) else None
            if plain is not None and plain.parts and letter in "wb":
                for part, its_grad in plain.parts_of(letter, grad).items():
                    named[f"{prefix}grad_{letter}_{part}"] = its_grad
            elif isinstance(layer, Taps) and letter == "w":
                named[f"{prefix}grad_w_{number}"] = layer.in_order(grad)
            else:
                turned = plain is not None and letter == "w" and not plain.in_out
                named[f"{prefix}grad_{letter}_{number}"] = grad.t() if turned else grad

    for name, table in model.tables().items():
        if (grad := gradient(table.weight)) is not None:
            named[f"grad_{name}"] = grad
    for i, block in enumerate(model.blocks):
        for number, layer in block.numbered().items():
            keep(f"blocks.{i}.", number, layer)
    keep("", "10", model.final_norm)
    keep("", "11", model.head)
    if model.config.tied:
        named.pop("grad_w_11", None)  # it is grad_w_tok
    return named

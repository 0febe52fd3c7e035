"""One optimizer step on the sentence: the loss that the gradient predicts, and the loss that is then measured.

Each layer is stepped as soon as its gradients are final, a large parameter part by part, because an entry of SGD's or Adam's
step depends on no other. The new weights are written to the new version's file. So neither all gradients nor all new weights
are in memory.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import HandgradError, NonFiniteError
from ...files.scratch import TensorFile, TensorsInMemory
from ...formatting import size
from ...machine import trim_heap
from ...model.inspect.trace import own_gradients
from ...model.passes.objective import LogitDifference
from ...optim import maker, step
from ..json_types.questions import Move, Stepped
from ..presentation.chances import chance, losses_of
from ..presentation.notation import typeset
from ..session.session import Session, TracedSentence, Version

ENTRIES_AT_ONCE = 1 << 22  # of a parameter
OPTIMIZERS = {"SGD": "gradient descent", "Adam": "Adam"}
Make = Callable[[list[nn.Parameter]], Optimizer]


def take_step(
    session: Session, sentence: TracedSentence, lr: float, optimizer: str = "SGD", *, undo: bool = False
) -> Stepped:
    """Step from the sentence's version of the weights to a new one, which is added to the session; return the predicted
    loss L + ⟨∂, step⟩, the measured one, and how the probability of each target moved. With `undo` only these numbers
    are left: no version, nothing on disk, and no trace of the new weights."""
    if optimizer not in OPTIMIZERS:
        raise HandgradError(f"unknown optimizer {optimizer!r}: choose {' or '.join(OPTIMIZERS)}")
    if not 0 < lr <= 100:
        raise HandgradError(f"the learning rate must be above 0 and at most 100, not {lr}")
    with session.lock:
        session.free_gradients()
        stored = TensorsInMemory if undo else TensorFile
        expected, made = _stepped(session, sentence, lr, optimizer, stored)
        with session.model_at(sentence.version) as model:  # by the same path as after the step
            loss = model.loss(sentence.tokens, sentence.targets, objective=sentence.objective)
        version = session.add_version(made)
        try:
            measured = _measured(session, sentence, version, lr, loss)
        except Exception:
            session.drop_version(version)
            raise
        if undo:
            with session.model_at(version) as model:
                logits = model.logits(sentence.tokens)[0].as_subclass(Tensor)
            id = ""
            session.drop_version(version)
        else:
            new = session.sentence(sentence.text, version, sentence.objective)
            id, logits = new.id, session.logits(new)
    return {
        "id": id, "version": version, "steps": made.steps,
        "loss": loss, "predicted": loss + expected, "measured": measured, "moves": _moves(session, sentence, logits),
        "rounding": _rounding(session, sentence),
    }  # fmt: skip


def _stepped(
    session: Session, sentence: TracedSentence, lr: float, optimizer: str, stored: type[TensorFile | TensorsInMemory]
) -> tuple[float, Version]:
    """The change of the loss to first order, ⟨∂, step⟩, and the version after the step."""
    old = session.version(sentence.version)
    state = old.optimizer_state if old.optimizer == optimizer else {}
    make = maker(optimizer, lr, 0.0, (0.9, 0.99))
    weights, new_state = stored(), stored()
    expected = 0.0
    with session.model_at(sentence.version) as model, own_gradients(model.parameters()):
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}

        def step_layer(parameters: list[nn.Parameter]) -> None:
            nonlocal expected
            for p in parameters:
                if p.grad is None:  # frozen
                    continue
                parts = (torch.split(x.reshape(-1), ENTRIES_AT_ONCE) for x in (p.data, p.grad))
                for i, (part, grad) in enumerate(zip(*parts, strict=True)):
                    here = f"{names[p]} {i} "
                    before = {key.removeprefix(here): state[key] for key in state if key.startswith(here)}
                    stepped, after = _step(part, grad, make, before)
                    wide = torch.promote_types(
                        part.dtype, torch.float32
                    )  # neighboring numbers: their difference is exact
                    moved = grad.to(wide) * (stepped.to(wide) - part.to(wide))
                    expected += torch.sum(moved, dtype=torch.float64).item()
                    weights.append(names[p], p.shape, stepped)
                    for key, x in after.items():
                        new_state.append(here + key, x.shape, x)
                p.grad = None

        try:
            model.loss_and_grads(sentence.tokens, sentence.targets, objective=sentence.objective, finished=step_layer)
        except OSError as reason:
            needed = size(sum(p.numel() * p.element_size() for p in names) * (3 if optimizer == "Adam" else 1))
            raise HandgradError(
                f"the weights after a step of {OPTIMIZERS[optimizer]} need {needed} in the cache folder"
                f" ({reason.strerror}): free some space, or set HANDGRAD_CACHE to a folder on another disk"
            ) from None
    assert len(weights) == len(names)
    trim_heap()
    return expected, Version(weights, new_state, optimizer, old.steps + 1)


def _step(part: Tensor, grad: Tensor, make: Make, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A part of a parameter after the step, and the optimizer's state of it."""
    made = nn.Parameter(part.clone())
    made.grad = grad
    stepper = make([made])
    if state:
        stepper.state[made] = state
    step(stepper, 1.0)
    return made.data, {key: x for key, x in stepper.state[made].items() if isinstance(x, Tensor)}


def _measured(session: Session, sentence: TracedSentence, version: int, lr: float, before: float) -> float:
    """The loss after the step; an error if it rose beyond what can be shown."""
    with session.model_at(version) as model:
        try:
            measured = model.loss(sentence.tokens, sentence.targets, objective=sentence.objective)
        except NonFiniteError:
            raise HandgradError(
                f"a step with learning rate {typeset(lr)} made the weights overflow: choose a smaller one"
            ) from None
        if measured > max(before, 100 * math.log(model.config.n_vocab)):  # beyond this, only rounding is visible
            what = "the difference" if isinstance(sentence.objective, LogitDifference) else "the loss"
            raise HandgradError(
                f"a step with learning rate {typeset(lr)} raised {what} to {typeset(measured)}: choose a smaller one"
            )
        return measured


def _moves(session: Session, old: TracedSentence, logits: Tensor) -> list[Move]:
    """Return the probability of each target before and after the step."""
    before, after = (losses_of(x[:-1], old.targets[0, :-1]) for x in (session.logits(old), logits))
    return [
        {
            "token": session.token_text(one),
            "target": session.token_text(target),
            "before": chance(-p),
            "after": chance(-q),
        }
        for one, target, p, q in zip(old.ids, old.ids[1:], before, after, strict=False)
    ]


def _rounding(session: Session, sentence: TracedSentence) -> float:
    """A change of the objective below this may be rounding: logits are rounded to their last digit."""
    logits = session.logits(sentence)
    return torch.finfo(logits.dtype).eps * logits.abs().max().item()

"""One optimizer step on the sentence: the loss that the gradient predicts, and the loss that is then measured."""

import math
from typing import Any

import torch

from ..errors import HandgradError, NonFiniteError
from ..optim import maker
from .marks import typeset
from .session import Session, TracedSentence, Version

ENTRIES_AT_ONCE = 1 << 22  # of a parameter, in float64
OPTIMIZERS = {"SGD": "gradient descent", "Adam": "Adam"}


def take_step(session: Session, sentence: TracedSentence, lr: float, optimizer: str) -> dict[str, Any]:
    """Step from the sentence's version of the weights to a new one, which is added to the session; return the predicted
    loss L + ⟨∂, step⟩, the measured one, and how the probability of each target moved."""
    if optimizer not in OPTIMIZERS:
        raise HandgradError(f"unknown optimizer {optimizer!r}: choose {' or '.join(OPTIMIZERS)}")
    if not 0 < lr <= 100:
        raise HandgradError(f"the learning rate must be above 0 and at most 100, not {lr}")
    with session.model_at(sentence.version) as model:
        old = session.version(sentence.version)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        before = {name: p.data for name, p in trained.items()}
        try:
            for p in trained.values():
                p.data = p.data.clone()
            loss = model.loss_and_grads(sentence.tokens, sentence.targets, objective=sentence.objective)
            stepper = maker(optimizer, lr, 0.0, (0.9, 0.99))(list(trained.values()))
            if old.optimizer_state is not None and old.optimizer == optimizer:
                stepper.load_state_dict(old.optimizer_state)
                for group in stepper.param_groups:
                    group["lr"] = lr
            stepper.step()
            expected = 0.0
            for name, p in trained.items():
                assert p.grad is not None
                parts = (torch.split(x.flatten(), ENTRIES_AT_ONCE) for x in (p.grad, p.data, before[name]))
                for grad, new, was in zip(*parts, strict=True):
                    expected += torch.sum(grad.double() * (new.double() - was.double())).item()
            after = {name: p.data for name, p in trained.items()}
            try:
                measured = model.loss(sentence.tokens, sentence.targets, objective=sentence.objective)
            except NonFiniteError:
                raise HandgradError(
                    f"a step with learning rate {typeset(lr)} made the weights overflow: choose a smaller one"
                ) from None
            if measured > 100 * math.log(model.config.n_vocab):  # beyond this, only rounding is visible
                raise HandgradError(
                    f"a step with learning rate {typeset(lr)} raised the loss to {typeset(measured)}: choose a smaller one"
                )
        finally:
            for name, p in trained.items():
                p.data, p.grad = before[name], None
        version = session.add_version(Version(after, stepper.state_dict(), optimizer, old.steps + 1))
    new = session.sentence(sentence.text, version, sentence.objective)
    return {
        "id": new.id, "version": version, "steps": old.steps + 1,
        "loss": loss, "predicted": loss + expected, "measured": measured, "moves": _moves(session, sentence, new),
    }  # fmt: skip


def _moves(session: Session, old: TracedSentence, new: TracedSentence) -> list[dict[str, Any]]:
    """Return the probability of each target before and after the step."""
    rows = []
    for t, target in enumerate(old.targets[0, :-1].tolist()):
        p, q = (x.trace["y_pred"][t, target].item() for x in (old, new))
        rows.append(
            {"token": session.token_text(old.ids[t]), "target": session.token_text(target), "before": p, "after": q}
        )
    return rows

"""A step of the optimizer on the sentence itself: what the gradient says the loss will be, and what it then is."""

import math
from typing import Any

import torch

from ..errors import HandgradError, NonFiniteError
from ..optim import maker
from .session import Look, Session, Version

OPTIMIZERS = {"SGD": "gradient descent", "Adam": "Adam"}


def take_step(session: Session, look: Look, lr: float, optimizer: str) -> dict[str, Any]:
    """One step from the look's version of the weights to a new one. To first order the loss changes by ⟨∂, step⟩."""
    if optimizer not in OPTIMIZERS:
        raise HandgradError(f"there is no optimizer {optimizer!r} here: choose {' or '.join(OPTIMIZERS)}")
    if not 0 < lr <= 100:
        raise HandgradError(f"the learning rate must be above 0 and at most 100, not {lr}")
    with session.at(look.version) as model:
        old = session.version(look.version)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        before = {name: p.data for name, p in trained.items()}
        try:
            for p in trained.values():
                p.data = p.data.clone()
            loss = model.loss_and_grads(look.tokens, look.targets)
            stepper = maker(optimizer, lr, 0.0, (0.9, 0.99))(list(trained.values()))
            if old.memory is not None and old.optimizer == optimizer:
                stepper.load_state_dict(old.memory)
                for group in stepper.param_groups:
                    group["lr"] = lr
            stepper.step()
            expected = 0.0
            for name, p in trained.items():
                assert p.grad is not None
                expected += torch.sum(p.grad.double() * (p.data.double() - before[name].double())).item()
            after = {name: p.data for name, p in trained.items()}
            try:
                measured = model.loss(look.tokens, look.targets)
            except NonFiniteError:
                raise HandgradError(
                    f"a step of {lr:g} threw the weights out of the range of numbers: choose a smaller one"
                ) from None
            if measured > 100 * math.log(model.config.n_vocab):  # so far out rounding is all there is to see
                raise HandgradError(f"a step of {lr:g} threw the loss up to {measured:.3g}: choose a smaller one")
        finally:
            for name, p in trained.items():
                p.data, p.grad = before[name], None
        number = session.add_version(Version(after, stepper.state_dict(), optimizer, old.steps + 1))
    new = session.look(look.text, number)
    return {
        "id": new.id, "steps": old.steps + 1, "loss": loss, "predicted": loss + expected, "measured": measured,
        "moves": _moves(session, look, new),
    }  # fmt: skip


def _moves(session: Session, old: Look, new: Look) -> list[dict[str, Any]]:
    """How the probability of each target has moved."""
    rows = []
    for t, target in enumerate(old.targets[0, :-1].tolist()):
        p, q = (look.trace["y_pred"][t, target].item() for look in (old, new))
        rows.append({"token": session.word(old.ids[t]), "target": session.word(target), "before": p, "after": q})
    return rows

"""What is right: the hand-derived pass in float64, and by `rounding.py` how much a narrower dtype may change it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...model.inspect.trace import record_pass
from ...proof.reference_model import ReferenceModel
from ...proof.rounding import MARGIN, SAMPLES, perturbed, rounder, rounding_size
from .balance import Balance, balance_of, edits
from .batch import AuditBatch
from .observe import of_experts
from .points import points_of
from .subject import Subject


class Expected(NamedTuple):
    """What the audited model should compute: (n, d) rows without padding."""

    loss: float
    values: dict[str, Tensor]  # by the point's name
    signals: dict[str, Tensor]
    grads: dict[str, Tensor]  # by our parameter's name
    chosen: dict[str, Tensor]  # (n, k) numbers of experts, by the name blocks.0.chosen
    balance: Balance | None = None


class Bounds(NamedTuple):
    """The largest norm of an error that rounding explains."""

    loss: float
    values: dict[str, float]
    signals: dict[str, float]
    grads: dict[str, float]
    dtype: torch.dtype


def expect(
    subject: Subject, batch: AuditBatch, divisors: Sequence[int] | None = None, balance: Balance | None = None
) -> Expected:
    """The hand-derived pass. `divisors` are the numbers by which the summed loss of each sequence is divided (default: the
    number of targets of the batch), for what a wrong average would have given; `balance` is that of the whole batch, if
    this is a part of it."""
    model = subject.ours
    if balance is None:
        balance = balance_of(model, batch, subject.balance)
    wanted = {p.name for p in points_of(model)}
    wanted_signals = {p.signal: p.name for p in points_of(model)}
    values: dict[str, list[Tensor]] = {}
    signals: dict[str, list[Tensor]] = {}
    chosen: dict[str, list[Tensor]] = {}
    latest: dict[str, Tensor] = {}
    edit = {} if balance is None else edits(model, balance, latest)
    here = batch.rows.view(batch.shape)
    given = {name: torch.split(x[here], batch.lengths) for name, x in batch.experts.items()}

    def record(name: str, x: Tensor) -> None:
        if name.endswith(".a_scores"):
            latest[name] = x
        if name.endswith(".chosen"):
            chosen.setdefault(name, []).append(x.clone())
        elif name in wanted:
            values.setdefault(name, []).append(x.clone())
        elif name in wanted_signals:
            signals.setdefault(wanted_signals[name], []).append(x.clone())

    model.zero_grad()
    loss = 0.0
    for i, (tokens, targets) in enumerate(batch.sequences()):
        own = edit | {name: lambda _, x=x[i]: x for name, x in given.items()}
        divisor = batch.n_targets if divisors is None else divisors[i]
        # one sequence at a time: the maps of attention are then no larger than a sequence
        loss += record_pass(model, tokens, targets, n_targets=divisor, record=record, edit=own or None)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    whole, whole_signals, experts = (
        {name: torch.cat(parts) for name, parts in found.items()} for found in (values, signals, chosen)
    )
    for found in (whole, whole_signals):
        found |= {name: _dense(subject, experts, name, x) for name, x in found.items()}
    grads = without_padding_row(subject, batch, grads, whole_signals["blocks.0.a_1"])
    return Expected(loss + (0.0 if balance is None else balance.value), whole, whole_signals, grads, experts, balance)


def _dense(subject: Subject, chosen: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Gates and their error signals as (n, E); any other tensor as it is."""
    block, _, last = name.rpartition(".")
    return of_experts(chosen[f"{block}.chosen"], subject.config.n_experts or 0, x) if last == "a_gates" else x


def without_padding_row(
    subject: Subject, batch: AuditBatch, grads: dict[str, Tensor], delta_1: Tensor
) -> dict[str, Tensor]:
    """The gradients as nn.Embedding has them: the row of its padding_idx receives nothing from the tokens of that id, also
    where they are no padding. What a tied head adds to the row stays."""
    name = f"{subject.config.table.names['embed']}.weight"
    used = (batch.tokens == subject.padding_row).nonzero().flatten()
    if not len(used) or name not in grads:
        return grads
    changed = grads[name].clone()
    changed[subject.padding_row] -= subject.ours.embed.scale * delta_1[used].sum(0)
    return {**grads, name: changed}


def bounds(subject: Subject, batch: AuditBatch, dtype: torch.dtype, right: Expected, seed: int = 0) -> Bounds:
    """The errors that computing in this dtype allows."""
    size = rounding_size(subject.config, len(batch.tokens), dtype)
    generator = torch.Generator().manual_seed(seed)

    def same_experts(start: int, name: str, x: Tensor) -> Tensor:
        """Rounding must not send a token to other experts, and the balance loss is differentiated too."""
        if name in right.chosen:
            return right.chosen[name][start : start + len(x)]
        return x if right.balance is None or not name.endswith(".a_scores") else right.balance.added(x)

    reference = ReferenceModel(subject.ours, batch.tokens, batch.targets, batch.lengths, edit=same_experts)
    points, change = points_of(subject.ours), rounder(size, generator)
    errors: dict[tuple[str, str], float] = {("loss", ""): size * abs(right.loss)}

    def measure(kind: str, name: str, found: Tensor, exact: Tensor | None) -> None:
        if exact is not None:
            error = torch.linalg.vector_norm(found - exact).item()
            errors[kind, name] = max(errors.get((kind, name), 0.0), error)

    for _ in range(SAMPLES):
        sample = reference.differentiate(change)
        added = 0.0 if right.balance is None else right.balance.value
        errors["loss", ""] = max(errors["loss", ""], abs(sample.loss + added - right.loss))
        for p in points:
            value, delta = (
                _dense(subject, right.chosen, p.name, x) for x in (sample.values[p.name], sample.deltas[p.signal])
            )
            measure("values", p.name, value, right.values.get(p.name))
            measure("signals", p.name, delta, right.signals.get(p.name))
        for name, grad in without_padding_row(subject, batch, sample.grads, sample.deltas["blocks.0.delta_1"]).items():
            measure("grads", name, perturbed(grad, size, generator), right.grads.get(name))
    found = {kind: _with_floor(kind, errors, getattr(right, kind)) for kind in ("values", "signals", "grads")}
    return Bounds(MARGIN * errors["loss", ""], found["values"], found["signals"], found["grads"], dtype)


def _with_floor(kind: str, errors: dict[tuple[str, str], float], right: dict[str, Tensor]) -> dict[str, float]:
    """The allowed errors. A tensor of few entries may happen to be hit by small errors only: it is allowed at least the
    relative error that is usual among its kind."""
    sizes = {name: torch.linalg.vector_norm(x).item() for name, x in right.items()}
    relative = sorted(errors[kind, name] / size for name, size in sizes.items() if size)
    usual = relative[len(relative) // 2] if relative else 0.0
    return {name: MARGIN * max(errors[kind, name], usual * size) for name, size in sizes.items()}

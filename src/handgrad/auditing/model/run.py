"""`audit`: compare a model's own gradients with the hand-derived ones, and find the first layer that is wrong."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import HandgradError
from ...formatting import number, plural
from ...model.config import ModelConfig
from ...model.dtype import STORED_DTYPES, as_dtype
from ...proof import new_adapters
from ..diagnosis import Diagnosis, diagnose
from ..findings import Audit, Compared
from .batch import AuditBatch, check_ids, make_batch
from .causes import Causes, Suspects
from .expect import Bounds, Expected, bounds, expect
from .observe import Loss, Norm, Observed, observe, plain_loss
from .points import Point, expert_layers, layers_by_signal, points_of, same_signals
from .setup import check_setup
from .subject import Names, Subject, Tracked, make_subject
from .ties import with_their_choice
from .training import Loop

NO_GATES = "the gates' error signal ⟨Δ_9, y⟩ is missing, so the router learns nothing from the loss"


def audit(
    model: Any,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    grad_norm: Norm | None = None,
    setup: bool = True,
    dtype: torch.dtype | str | None = None,
    config: ModelConfig | dict[str, Any] | None = None,
    names: Names | None = None,
    transposed: tuple[str, ...] = (),
    seed: int = 0,
) -> Audit:
    """Run a PyTorch model's own backward pass on a batch, and compare every activation, every error signal between its
    layers and every parameter's gradient with the hand-derived ones in float64. The model is left as it was.

    model       a causal language model of transformers, of a family that handgrad reads; an adapter of PEFT on it; or any
                module with the same parameters
    batch       token ids (B, T), or a dictionary with input_ids and, optionally, labels, attention_mask, position_ids
    loss        function(model, batch) that returns the loss, or that calls backward() itself (default: model(**batch).loss)
    optimizer   your optimizer, which must have every parameter that trains
    grad_norm   function(model) that returns the norm of all gradients, as your loop clips them
    setup       also check the set-up: accumulation, padding, masked targets, merging, saving, resuming
    dtype       the dtype in which the model computes, for the error that it allows (default: the narrowest that is seen)
    config      its configuration, if it has none of transformers: a ModelConfig, or the fields of a config.json
    names       function from its parameters' names to Hugging Face's
    transposed  ends of its names whose weights are stored transposed
    seed        seed of the rounding errors that calibrate what the dtype allows
    """
    if not setup and (optimizer is not None or grad_norm is not None):
        raise HandgradError("optimizer= and grad_norm= are checks of the set-up: leave out setup=False")
    checked = make_batch(batch)
    with new_adapters.filled(model, seed) as new:
        subject = make_subject(model, config, names, transposed)
        check_ids(checked, subject.config)
        seen = observe(subject, checked, loss or plain_loss)
        right = expect(subject, checked)
        given = None if dtype is None else as_dtype(dtype, STORED_DTYPES)
        narrow = given or _honest_dtype(subject, seen)
        allowed = bounds(subject, checked, narrow, right, seed)
        own = checked
        checked, right = with_their_choice(subject, checked, seen, right, allowed)
        if checked is not own:
            allowed = bounds(subject, checked, narrow, right, seed)
        report = Audit(_title(subject, checked, narrow), str(narrow).removeprefix("torch."))
        report.compared = compare(subject, checked, seen, right, allowed)
        if setup:
            report.setup = check_setup(subject, checked, seen, right, allowed, Loop(loss, optimizer, grad_norm))
        if subject.adapter in new:
            report.notes.append("the adapter is new, its up factors are 0: they were filled at random for the audit")
        if padded := int((checked.tokens == subject.padding_row).sum()):
            report.notes.append(
                f"token {subject.padding_row} is the padding_idx of the embedding, so torch gives its row no gradient from"
                f" the {plural(padded, 'place')} where the batch has it as a token: it learns nothing as an input"
            )
        if checked.from_padding:
            report.notes.append(
                f"{plural(checked.from_padding, 'label')} would be predicted from padding, and were masked: set the label"
                " of the first token after padding to −100"
            )
        beside = [t.name for t in subject.tracked if t.trains and not t.adapter]
        if subject.adapter and beside:
            report.notes.append(
                f"training also changes {plural(len(beside), 'weight')} of the base model, which the adapter does not save:"
                f" {beside[0]}; set requires_grad=False"
            )
        missing = len(points_of(subject.ours)) - len(seen.values)
        if missing:
            report.notes.append(f"{plural(missing, 'activation')} could not be seen: the modules are not called")
    return report


def _honest_dtype(subject: Subject, seen: Observed) -> torch.dtype:
    """transformers computes norms, rotations and the loss in float32, whatever the model's dtype. What `hg.nn.replace` has
    put into mixed precision rounds inside, where no activation shows it."""
    if any(vars(module).get("_handgrad_precision") for module in subject.model.modules()):
        return torch.bfloat16
    of_transformers = hasattr(subject.base, "save_pretrained")
    return torch.float32 if seen.dtype == torch.float64 and of_transformers else seen.dtype


def _title(subject: Subject, batch: AuditBatch, dtype: torch.dtype) -> str:
    c = subject.config
    adapter = f" with the adapter {subject.adapter!r}" if subject.adapter else ""
    shape = (
        f"{plural(c.n_blocks, 'block')}, {plural(len(batch.lengths), 'sequence')}, {plural(len(batch.tokens), 'token')}"
    )
    return f"{subject.title}{adapter}: {shape}, {str(dtype).removeprefix('torch.')}"


# ── comparison ──────────────────────────────────────────────────────────────────────────────────────────────────────


def compare(subject: Subject, batch: AuditBatch, seen: Observed, right: Expected, allowed: Bounds) -> list[Compared]:
    """Every tensor, in the order in which a fault spreads: forward, the loss, backward. The first wrong one is diagnosed
    with all known causes."""
    suspects = Suspects(subject, batch, seen, right)
    found: list[Compared] = []

    def add(kind: str, name: str, layer: str, computed: Tensor | None, expected: Tensor | None, bound: float,
            causes: Any, absent: Callable[[], str] = str) -> None:  # fmt: skip
        diagnosis = diagnose(computed, expected, bound, scales=suspects.scales())
        if not diagnosis.right and all(x.right for x in found):
            diagnosis = diagnose(computed, expected, bound, **vars(causes()))
        if diagnosis.kind in ("not trained", "zero") and (reason := absent()):
            sentence = "was never computed" if diagnosis.kind == "not trained" else diagnosis.sentence
            diagnosis = replace(diagnosis, sentence=f"{sentence}: {reason}")
        diagnosis = _overflow(diagnosis, expected, allowed)
        found.append(Compared(name, kind, subject.modules.get(layer, layer), diagnosis))

    points = points_of(subject.ours)
    for p in points:
        if p.name in seen.values:
            value, bound = seen.values[p.name][batch.rows], allowed.values[p.name]
            add("activation", _point_name(p, subject), p.made_by, value, right.values[p.name], bound,
                lambda p=p: suspects.of_value(p.name))  # fmt: skip
    if seen.loss is not None:
        computed, total = (torch.tensor(x, dtype=torch.float64) for x in (seen.loss, right.loss))
        add("loss", "the loss", "the loss", computed, total, allowed.loss, suspects.of_loss)
    same = same_signals(subject.ours)
    by_signal = layers_by_signal(subject.ours)
    _add_gradients(subject, by_signal[""], seen, right, allowed, suspects, add)
    for p in reversed(points):
        if p.name in seen.signals and p.name not in same:
            signal, bound = seen.signals[p.name][batch.rows], allowed.signals[p.name]
            add("error signal", _point_name(p, subject), p.signal_by, signal, right.signals[p.name], bound,
                lambda p=p: suspects.of_signal(p.name), partial(str, NO_GATES if p.side == "gates" else ""))  # fmt: skip
        _add_gradients(subject, by_signal.get(p.name, []), seen, right, allowed, suspects, add)
    return found


def _point_name(p: Point, subject: Subject) -> str:
    return f"{p.what} ({subject.modules.get(p.module, p.module)})"


def _add_gradients(
    subject: Subject, layers: list[str], seen: Observed, right: Expected, allowed: Bounds, suspects: Suspects, add: Any
) -> None:
    """The gradients of some layers' parameters; a frozen one is listed only if it has one."""
    for t in subject.tracked:
        owner = t.ours.rpartition(".")[0].removesuffix(".base")
        if owner not in layers:
            continue
        computed = seen.grads[t.name]
        if not t.trains:
            stale = seen.stale.get(t.name) if computed is None else computed
            if stale is not None:
                add("gradient", t.name, t.module, stale, None, 0.0, Causes)
            continue
        expected = t.expected(right.grads)
        add("gradient", t.name, t.module, computed, expected, allowed.grads.get(t.ours, 0.0),
            lambda t=t: suspects.of_gradient(t), partial(_reason, subject, t, owner, seen, right))  # fmt: skip


def _reason(subject: Subject, tracked: Tracked, owner: str, seen: Observed, right: Expected) -> str:
    """Why a parameter may have no gradient; empty if nothing is known."""
    if not tracked.parameter.requires_grad:
        return "requires_grad is False, so it is not trained"
    if owner in (experts := expert_layers(subject.ours)):
        i, e = experts[owner]
        tokens = plural(int((right.chosen[f"blocks.{i}.chosen"] == e).sum()), "token")
        return f"{tokens} of the batch went to expert {e}, and it learns nothing from them"
    points = points_of(subject.ours)
    if any(p.side == "gates" and p.made_by == owner and p.name not in seen.signals for p in points):
        return NO_GATES
    outputs = [p.name for p in points if (p.module, p.side) == (owner, "out")]
    if outputs and outputs[0] in seen.values and outputs[0] not in seen.signals:
        return f"no error signal comes back to {owner}: its branch is detached"
    return ""


def _overflow(diagnosis: Diagnosis, expected: Tensor | None, allowed: Bounds) -> Diagnosis:
    """Say so if a value is too large for the dtype, or too small."""
    if expected is None or diagnosis.right:
        return diagnosis
    limits, largest = torch.finfo(allowed.dtype), expected.abs().max().item()
    kind = str(allowed.dtype).removeprefix("torch.")
    if diagnosis.kind == "not finite":
        text = f"{diagnosis.sentence}: something overflowed {kind}, whose largest number is {number(limits.max)}"
        if largest > limits.max:
            text = f"{diagnosis.sentence}: it overflows {kind}, {number(largest)} > {number(limits.max)}"
        return replace(diagnosis, sentence=text, detail="overflow")
    if diagnosis.kind in ("zero", "other") and largest < 4 * limits.tiny:
        text = f"{diagnosis.sentence}: it underflows {kind}, whose smallest number is {number(limits.tiny)}; scale the loss"
        return replace(diagnosis, sentence=text, detail="underflow")
    return diagnosis

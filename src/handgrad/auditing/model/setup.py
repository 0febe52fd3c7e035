"""The checks of a fine-tuning set-up: what trains and what does not, and what must change nothing.

Checks that change weights work on a copy of the model.
"""

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...formatting import number, plural
from ...model.inspect.trace import own_gradients
from ...ops.loss import NO_TARGET
from ...tolerances import merge_tolerance
from ..diagnosis import diagnose
from ..findings import SetUp
from . import training
from .batch import AuditBatch
from .causes import Suspects
from .expect import Bounds, Expected, bounds, expect
from .observe import Observed, logits_of, observe, plain_loss, shared_loss, take_step
from .subject import Subject
from .training import Loop

Grads = dict[str, Tensor | None]
PADDING = 3  # tokens of padding added to a batch that has none


def check_setup(
    subject: Subject, batch: AuditBatch, seen: Observed, right: Expected, allowed: Bounds, loop: Loop
) -> list[SetUp]:
    """All checks of the set-up, in the order of the documentation."""
    context = _Context(subject, batch, seen, right, allowed, loop)
    return [_guarded(name, check) for name, check in context.checks()]


def _guarded(name: str, check: Callable[[], tuple[bool | None, str]]) -> SetUp:
    """Run a check; an exception of the audited model is a failure with the exception as its note."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn about names and versions; the check judges the result
            passed, note = check()
    except Exception as reason:
        passed, note = False, f"{type(reason).__name__}: {reason}".splitlines()[0]
    return SetUp(name, passed, note)


class _Context:
    """What the checks share."""

    def __init__(
        self, subject: Subject, batch: AuditBatch, seen: Observed, right: Expected, allowed: Bounds, loop: Loop
    ):
        self.subject, self.batch, self.seen, self.right, self.allowed = subject, batch, seen, right, allowed
        self.loop, self.own_loss, self.loss = loop, loop.loss is not None, loop.loss or plain_loss

    def checks(self) -> Iterator[tuple[str, Callable[[], tuple[bool | None, str]]]]:
        if self.subject.adapter is not None:
            yield "every adapter receives a gradient", self.adapters_train
        if self.subject.config.n_experts is not None:
            yield "experts train alike", lambda: training.experts_alike(self.subject)
        yield "frozen weights receive none", self.frozen_stay
        if (optimizer := self.loop.optimizer) is not None:
            yield "the optimizer has every trained tensor", lambda: training.optimizer_complete(self.subject, optimizer)
        if self.loop.norm is not None:
            yield "the gradient norm counts every tensor", self.norm
        yield "accumulation equals the big batch", self.accumulation
        yield "padding changes nothing", self.padding
        yield "masked targets contribute nothing", self.masked_targets
        if self.subject.adapter is not None:
            yield "merged equals unmerged", self.merging
        yield "saving and loading changes nothing", self.saving
        yield "resume is exact", self.resuming

    def norm(self) -> tuple[bool | None, str]:
        found = observe(self.subject, self.batch, self.loss, points=False, norm=self.loop.norm)
        assert found.norm is not None
        return training.norm_complete(self.subject, found, found.norm)

    # ── what trains ─────────────────────────────────────────────────────────────────────────────────────────────────

    def adapters_train(self) -> tuple[bool | None, str]:
        expected = [t for t in self.subject.tracked if t.adapter and t.trains]
        without = []
        for t in expected:
            grad, wanted = self.seen.grads[t.name], t.expected(self.right.grads)
            if (grad is None or not grad.any()) and wanted is not None and wanted.any():
                without.append(t.name)
        note = (
            f"{len(without)} of {len(expected)} receive none: {without[0]}"
            if without
            else f"all {len(expected)} tensors"
        )
        return not without, note

    def frozen_stay(self) -> tuple[bool | None, str]:
        frozen = [t for t in self.subject.tracked if not t.trains]
        extra = [
            t.name for t in self.subject.tracked if t.trains and not t.adapter and self.subject.adapter is not None
        ]
        if extra:
            return False, (
                f"{extra[0]} trains ({len(extra)} in all), which the adapter does not contain, so saving it loses what was"
                " learned: set requires_grad=False, or name its module in modules_to_save"
            )
        if not frozen:
            return None, "nothing is frozen"
        stale = [t.name for t in frozen if t.name in self.seen.stale]
        given = [t.name for t in frozen if self.seen.grads[t.name] is not None]
        if given:
            return False, f"{given[0]} received one ({len(given)} in all)"
        if stale:
            return False, f"{stale[0]} still has an old one ({len(stale)} in all): set p.grad = None"
        return True, plural(len(frozen), "tensor")

    # ── what must change nothing ────────────────────────────────────────────────────────────────────────────────────

    def accumulation(self) -> tuple[bool | None, str]:
        if self.own_loss:
            return None, "the loss is yours: audit the function that accumulates"
        if self.subject.balance:
            return None, "the balance loss of parts is not a part of the balance loss"
        n = self.batch.shape[0]
        if n < 2:
            return None, "the batch has one sequence"
        total: Grads = {}
        try:
            for i in range(n):
                if bool((self.batch.inputs["labels"][i, 1:] == NO_TARGET).all()):
                    continue
                part = observe(self.subject, self.batch.only([i]), shared_loss(self.batch.n_targets), points=False)
                for name, grad in part.grads.items():
                    before = total.get(name)
                    total[name] = grad if before is None or grad is None else before + grad
        except TypeError as reason:
            if "num_items_in_batch" in str(reason):
                return None, "the model takes no num_items_in_batch: audit the function that accumulates as loss="
            raise
        return self._equal(total, self.right, self.allowed, "one sequence at a time")

    def padding(self) -> tuple[bool | None, str]:
        batch, inputs = self.batch, self.batch.inputs
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        other = (ids + 1) % self.subject.config.n_vocab
        if batch.padded:
            changed = batch.changed(input_ids=torch.where(mask == 0, other, ids))
            how = "other tokens in the padding"
        else:
            n = min(PADDING, self.subject.config.n_context - batch.shape[1])
            if n < 1:
                return None, "the batch fills the context"
            wider = {
                name: torch.cat([x, torch.full_like(x[:, :1], fill).expand(-1, n)], 1)
                for name, x, fill in (("input_ids", ids, 0), ("attention_mask", mask, 0),
                                      ("labels", inputs["labels"], NO_TARGET))
            }  # fmt: skip
            if "position_ids" in inputs:
                wider["position_ids"] = torch.cat(
                    [inputs["position_ids"], inputs["position_ids"][:, -1:].expand(-1, n)], 1
                )
            changed = batch.changed(**wider)
            how = f"{plural(n, 'token')} of padding on the right"
        found = observe(self.subject, changed, self.loss, points=False)
        return self._equal(found.grads, self.right, self.allowed, how)

    def masked_targets(self) -> tuple[bool | None, str]:
        labels = self.batch.inputs["labels"].clone()
        labels[:, 1::2] = NO_TARGET
        if bool((labels[:, 1:] == NO_TARGET).all()):
            return None, "the sequences are too short"
        masked = self.batch.changed(labels=labels)
        if self.subject.balance and not masked.complete:
            return None, "a sequence would have no target left"
        right = expect(self.subject, masked)
        allowed = bounds(self.subject, masked, self.allowed.dtype, right)
        found = observe(self.subject, masked, self.loss, points=False)
        return self._equal(found.grads, right, allowed, "every other target masked")

    def _equal(self, found: Grads, right: Expected, allowed: Bounds, how: str) -> tuple[bool | None, str]:
        """Whether gradients are the hand-derived ones; a diagnosis of the first that is not. One that is wrong in the big
        batch already is compared with what it was there, or not at all if the targets are others."""
        judged = 0
        for t in self.subject.tracked:
            expected = t.expected(right.grads) if t.trains else None
            if expected is None:
                continue
            bound = allowed.grads[t.ours]
            before = self.seen.grads[t.name]
            if not diagnose(before, t.expected(self.right.grads), self.allowed.grads[t.ours]).right:
                if before is None or right is not self.right or not torch.isfinite(before).all():
                    continue
                expected = before
            judged += 1
            if diagnose(found.get(t.name), expected, bound).right:
                continue
            suspects = Suspects(self.subject, self.batch, self.seen, right)
            mistakes = suspects.averaged(t) if right is self.right else {}
            result = diagnose(found.get(t.name), expected, bound, mistakes=mistakes, scales=suspects.scales())
            return False, f"{how}: the gradient of {t.name} {result.sentence}"
        return (True, how) if judged else (None, "the gradients are wrong already")

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def merging(self) -> tuple[bool | None, str]:
        model: Any = self.subject.model
        if not hasattr(model, "merge_and_unload"):
            return None, "the model has no merge_and_unload"
        merged = copy.deepcopy(model).merge_and_unload()
        before, after = logits_of(model, self.batch), logits_of(merged, self.batch)
        error = ((after - before).norm() / before.norm()).item()
        limit = merge_tolerance(self.allowed.dtype)
        return error <= limit, f"the logits change by {number(error)}; rounding allows {number(limit)}"

    def saving(self) -> tuple[bool | None, str]:
        if reason := self._not_saved():
            return None, reason
        return self._same(self.subject.model, self._reloaded(self.subject.model))

    def resuming(self) -> tuple[bool | None, str]:
        """Two steps of AdamW in a row, and the same with the model and the optimizer's state saved and loaded in between."""
        if reason := self._not_saved():
            return None, reason
        device = next(self.subject.base.parameters()).device
        inputs = {name: x.to(device) for name, x in self.batch.inputs.items()}
        straight = copy.deepcopy(self.subject.model)
        with own_gradients(
            t.parameter for t in self.subject.tracked
        ):  # a kernel patched into the copy may still use the model's own weights
            return self._resumed(straight, inputs)

    def _not_saved(self) -> str:
        """Why the model cannot be saved and loaded by itself; "" if it can."""
        if not hasattr(self.subject.model, "save_pretrained"):
            return "the model has no save_pretrained"
        if not hasattr(type(self.subject.model), "from_pretrained"):
            return "the model has no from_pretrained"
        if len(getattr(self.subject.model, "peft_config", ())) > 1:
            return "the model has several adapters"
        alone = self.subject.adapter is not None and not hasattr(self.subject.model, "get_base_model")
        return "the adapter was added by add_adapter: give get_peft_model(model, config)" if alone else ""

    def _resumed(self, straight: nn.Module, inputs: dict[str, Tensor]) -> tuple[bool | None, str]:
        optimizer = _optimizer(straight)
        take_step(straight, inputs, optimizer, self.loss)
        if broken := _broken(straight):
            return None, f"one step of AdamW makes {broken}"
        state = copy.deepcopy(optimizer.state_dict())
        resumed = copy.deepcopy(straight)  # with the same kernels; a loaded model has its library's own
        _load(resumed, self._reloaded(straight))
        loaded = self._same(straight, resumed, "saved after a step and loaded")
        if not loaded[0]:
            return loaded
        again = _optimizer(resumed)
        again.load_state_dict(state)
        take_step(straight, inputs, optimizer, self.loss)
        if broken := _broken(straight):  # NaN would be compared with NaN
            return None, f"two steps of AdamW make {broken}"
        take_step(resumed, inputs, again, self.loss)
        return self._same(straight, resumed, "the second step of AdamW")

    def _reloaded(self, model: Any) -> Any:
        """The model, saved and loaded by its own library."""
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            if self.subject.adapter is None:
                loaded = type(model).from_pretrained(folder, dtype=model.dtype)
            else:
                path = Path(folder) / (self.subject.adapter if self.subject.adapter != "default" else "")
                base: Any = copy.deepcopy(self.subject.model)  # as it was before training: an adapter does not save it
                base = base.unload()
                loaded = type(model).from_pretrained(
                    base, str(path), adapter_name=self.subject.adapter, is_trainable=True
                )
        return loaded.to(next(model.parameters()).device)

    @staticmethod
    def _same(first: nn.Module, second: nn.Module, what: str = "") -> tuple[bool, str]:
        """Whether all parameters are equal, bit for bit."""
        ours, theirs = dict(first.named_parameters()), dict(second.named_parameters())
        missing = sorted(set(ours) ^ set(theirs))
        if missing:
            return False, f"{missing[0]} is in one of the two only"
        changed = [
            name for name, p in ours.items() if p.dtype != theirs[name].dtype or not torch.equal(p, theirs[name])
        ]
        if changed:
            return False, f"{what + ': ' if what else ''}{changed[0]} changes ({len(changed)} of {len(ours)} tensors)"
        return True, f"{len(ours)} tensors are equal, bit for bit"


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    # ε is 0 in float16, which would divide 0 by 0 where a gradient is 0
    return torch.optim.AdamW(trained, lr=1e-3, eps=max(1e-8, *(torch.finfo(p.dtype).tiny for p in trained)))


def _broken(model: nn.Module) -> str:
    """What is not finite in the weights; "" if nothing is."""
    names = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    return f"{names[0]} NaN or infinite ({len(names)} such), so there is nothing to resume" if names else ""


@torch.no_grad()
def _load(model: nn.Module, saved: nn.Module) -> None:
    """Copy the parameters of a saved model."""
    values = dict(saved.named_parameters())
    for name, p in model.named_parameters():
        if name in values:
            p.copy_(values[name])

"""What an audit found: what the audited model computed at each point, and what ours would have given instead."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...formatting import number as formatted
from ...model.block import Block
from ...model.layers.experts import Experts
from . import heads, mixtures
from .balance import balance_mistakes, balance_of
from .batch import AuditBatch
from .expect import Expected, expect
from .observe import Observed
from .points import BlockSteps
from .subject import Subject, Tracked

Read = Callable[..., Tensor]  # reads a tensor of a block by the activation's name


class Place(NamedTuple):
    """A point in a block."""

    i: int
    block: Block
    steps: BlockSteps
    name: str  # of the activation


class Evidence:
    """The tensors of one audit, and what known mistakes of attention and of averages would have made of them."""

    def __init__(self, subject: Subject, batch: AuditBatch, seen: Observed, right: Expected):
        self.subject, self.batch, self.seen, self.right = subject, batch, seen, right
        self.steps = [BlockSteps(block) for block in subject.ours.blocks]
        self._averages: dict[str, Expected] | None = None

    def _heads(
        self, i: int, of: Callable[[heads.Result], Tensor], delta_3: Tensor | None, seen: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What every known mistake of attention would have given, and the scale that explains best what was seen."""
        block, c = self.subject.ours.blocks[i], self.subject.config
        step = next(step for step in self.steps[i].steps if step.kind == "attention")
        a_2 = self._values(f"blocks.{i}.")(step.inputs[0], padded=True)

        def made(choices: heads.Heads) -> Tensor:
            return of(heads.compute(block, c, self.batch, a_2, choices, delta_3))

        known = heads.known_mistakes(c, i, block, self.batch.padded)
        found = {name: made(x) for name, x in known.items()}
        right = heads.right_choices(c, i)
        if seen is None or not torch.isfinite(seen).all():
            return found, {}
        scale = heads.fitted_scale(lambda x: made(replace(right, scale=x)) - seen, right.scale)
        if scale is None:
            return found, {}
        own = "1/√d_head = " if c.attention_scale is None else ""
        text = f"the scores were multiplied by {formatted(scale)}, not by {own}{formatted(right.scale)}"
        return found, {text: made(replace(right, scale=scale))}

    def _mixture(self, i: int, *, backward: bool) -> dict[str, mixtures.Made]:
        """What every known mistake of a block's mixture of experts would have given."""
        block, (a_6, delta_9) = self.subject.ours.blocks[i], self._around_mixture(i)
        assert isinstance(block.mlp, Experts)
        return {
            name: mixtures.compute(block, a_6, x, delta_9 if backward else None, self.right.balance)
            for name, x in mixtures.known_mistakes(block.mlp, backward).items()
        }

    def _mixture_terms(self, i: int) -> dict[str, dict[str, Tensor]]:
        """The terms of the error signals and gradients of a block's mixture of experts."""
        return mixtures.signal_parts(self.subject.ours.blocks[i], *self._around_mixture(i), self.right.balance)

    def _around_mixture(self, i: int) -> tuple[Tensor, Tensor]:
        """a_6 and Δ_9 of a block"""
        steps, block = self.steps[i], f"blocks.{i}."
        read = next(step.inputs[0] for step in steps.steps if step.kind == "experts")
        return self._values(block)(read), self._signals(block)(steps.joined("a_9"))

    def _balanced(self) -> dict[str, Tensor]:
        """The loss with a wrong balance loss, or with one that the model's configuration does not have."""
        subject, right = self.subject, self.right
        plain = right.loss - (0.0 if right.balance is None else right.balance.value)
        if right.balance is not None:
            scores = [(right.values[name.replace("chosen", "a_scores")], x) for name, x in right.chosen.items()]
            seen = [
                (self.seen.values.get(name.replace("a_gates", "a_scores")), x) for name, x in self.seen.chosen.items()
            ]
            found = balance_mistakes(right.balance, scores, seen)
        elif (
            added := getattr(getattr(subject.base, "config", None), "router_aux_loss_coef", 0)
        ) and self.batch.complete:
            balance = balance_of(subject.ours, self.batch, added)
            name = (
                "the balance loss were added, which output_router_logits=False in the model's configuration leaves out"
            )
            found = {} if balance is None or not subject.config.n_experts else {name: balance.value}
        else:
            found = {}
        return {name: torch.tensor(plain + x, dtype=torch.float64) for name, x in found.items()}

    def _place(self, point: str) -> Place | None:
        """Where a point is; None outside the blocks."""
        if not point.startswith("blocks."):
            return None
        _, number, name = point.split(".")
        return Place(int(number), self.subject.ours.blocks[int(number)], self.steps[int(number)], name)

    def _last_output(self) -> Tensor:
        """The input of the final norm."""
        i = self.subject.config.n_blocks - 1
        return self._values(f"blocks.{i}.")(self.steps[i].output)

    def _values(self, point: str) -> Read:
        return self._reader(point, self.seen.values, self.right.values)

    def _signals(self, point: str) -> Read:
        return self._reader(point, self.seen.signals, self.right.signals)

    def _reader(self, point: str, seen: dict[str, Tensor], right: dict[str, Tensor]) -> Read:
        """Tensors of the same block: as the audited model computed them, or ours where it showed none."""
        prefix = point[: point.rfind(".") + 1]

        def read(name: str, *, padded: bool = False) -> Tensor:
            name = prefix + name
            if name in seen:
                return seen[name] if padded else self._rows(seen[name])
            if not padded:
                return right[name]
            whole = right[name].new_zeros(len(self.batch.rows), right[name].shape[1])
            whole[self.batch.rows] = right[name]
            return whole

        return read

    def _rows(self, x: Tensor | None) -> Tensor:
        assert x is not None
        return x[self.batch.rows]

    def scales(self) -> dict[str, float]:
        """Numbers that are easily a factor too many or too few."""
        c, batch = self.subject.config, self.batch
        rows, width = batch.shape
        found = {
            "√d_head": c.query_width**0.5, "d_head": c.query_width, "the number of sequences": rows,
            "the number of targets": batch.n_targets, "the number of tokens": rows * width,
            "tokens per target": (rows * width) / batch.n_targets,
            "predictions per target": rows * (width - 1) / batch.n_targets, "the number of heads": c.n_heads,
            "√d_model": c.d_model**0.5, "queries per key": c.n_heads / c.kv_heads,
        }  # fmt: skip
        return {name: float(x) for name, x in found.items() if x != 1}

    def averaged(self, tracked: Tracked) -> dict[str, Tensor]:
        """A gradient with wrong averages over the sequences."""
        return self._averaged(lambda x: tracked.turned(x.grads[tracked.ours]))

    def _averaged(self, of: Callable[[Expected], Tensor]) -> dict[str, Tensor]:
        """What wrong averages over the sequences would have given."""
        each = self.batch.targets_of_each
        if len(each) < 2:
            return {}
        if self._averages is None:
            self._averages = {
                "every sequence were averaged by itself, and then all sequences, instead of summed over all targets": expect(
                    self.subject, self.batch, [n * len(each) for n in each], self.right.balance
                ),
                "the averages of the sequences were added, instead of all targets averaged": expect(
                    self.subject, self.batch, each, self.right.balance
                ),
            }
        return {name: of(found) for name, found in self._averages.items()}

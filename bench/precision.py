"""How far the gradients of all parameters are from float32's: in mixed precision, under autocast, and all in bfloat16.

Every contender differentiates the same examples, one by one; the reference is autograd in float32. Squared errors are added
over the examples, tensor by tensor: in a single one chance decides which of two roundings comes nearer in a small tensor."""

import copy
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import handgrad as hg
from handgrad.model.precision import why_not_mixed

from .attempts import Attempts, MissingError, WrongError
from .bases import Base, base_of
from .compete import LIMITS
from .in_transformers import network_of
from .row import AUTOCAST, MIXED, Row
from .sizes import Size

OURS, THEIRS, NARROW = f"handgrad, {MIXED}", f"transformers{AUTOCAST}", "transformers, bfloat16"
Gradients = dict[str, Tensor]  # by name
Example = tuple[Tensor, Tensor]  # tokens and targets
Differentiate = Callable[[Example], Gradients]


def cases(size: Size) -> dict[str, Callable[[Attempts], list[Row]]]:
    return {case_name(size): partial(measure, size)}


def case_name(size: Size) -> str:
    count, tokens = size.precision
    return f"{count} texts of about {tokens} tokens"


def measure(size: Size, attempts: Attempts) -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        base = base_of(size, Path(scratch))
        model = hg.load(base.path)
        network = network_of(model)
        narrow = copy.deepcopy(network).bfloat16()
        contenders: dict[str, Differentiate] = {
            OURS: partial(by_hand, model),
            THEIRS: partial(by_autograd, network, True),
            NARROW: partial(by_autograd, narrow, False),
        }
        found = {name: Errors() for name in contenders}
        examples = examples_of(base, *size.precision)
        attempts(OURS, partial(mix, model))
        for i in attempts.rounds(len(examples)):
            expected = {name: grad.clone() for name, grad in by_autograd(network, False, examples[i]).items()}
            for name, differentiate in contenders.items():
                attempts(name, partial(found[name].add, differentiate, examples[i], expected))
    attempts(OURS, found[OURS].check)
    rows = []
    for name, errors in found.items():
        row = Row("precision", case_name(size), name, sum(len(tokens) for tokens, _ in examples))
        row.problem = attempts.problems.get(name, "")
        if not row.problem:
            row.gradient_error, row.cosine, row.worst = errors.error, errors.cosine, max(errors.of_tensors().values())
        rows.append(row)
    if not (rows[0].problem or rows[1].problem):
        rows[0].note = beside(found[OURS], found[THEIRS])
    return rows


def examples_of(base: Base, count: int, tokens: int) -> list[Example]:
    """The records whose lengths are nearest to so many tokens, each once."""
    lengths, different = base.lengths, {json.dumps(record): i for i, record in enumerate(base.records)}
    nearest = sorted(different.values(), key=lambda i: abs(lengths[i] - tokens))[:count]
    data = base.read(base.folder / "all.jsonl")
    return [data.select([i])[:2] for i in nearest]


# ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────────


def mix(model: hg.GPT) -> None:
    if reason := why_not_mixed():
        raise MissingError(reason)
    model.precision = MIXED


def by_hand(model: hg.GPT, example: Example) -> Gradients:
    model.zero_grad()
    model.loss_and_grads(*(x[None] for x in example))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_autograd(network: nn.Module, autocast: bool, example: Example) -> Gradients:
    network.zero_grad()
    tokens, targets = example
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = network(input_ids=tokens[None]).logits
    F.cross_entropy(logits[0].float(), targets).backward()  # in float32, as by transformers' loss
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Errors:
    """Squares of a gradient's distances from the reference, by tensor, one for every example; and of both, summed."""

    apart: dict[str, list[float]] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)  # of the reference
    own: float = 0.0
    dot: float = 0.0

    def add(self, differentiate: Differentiate, example: Example, reference: Gradients) -> None:
        found = differentiate(example)
        for name, grad in reference.items():
            x, y = found[name].double().flatten(), grad.double().flatten()
            self.apart.setdefault(name, []).append(float(torch.dot(x - y, x - y)))
            self.expected[name] = self.expected.get(name, 0.0) + float(torch.dot(y, y))
            self.own, self.dot = self.own + float(torch.dot(x, x)), self.dot + float(torch.dot(x, y))

    @property
    def error(self) -> float:
        """Relative, of all tensors together."""
        return math.sqrt(sum(map(sum, self.apart.values())) / sum(self.expected.values()))

    @property
    def cosine(self) -> float:
        return self.dot / math.sqrt(self.own * sum(self.expected.values()))

    def of_tensors(self) -> dict[str, float]:
        """Relative, of each tensor."""
        return {name: math.sqrt(sum(apart) / self.expected[name]) for name, apart in self.apart.items()}

    def check(self) -> None:
        """Raise if rounding does not explain the error."""
        most, least = LIMITS[False]
        if not (self.error <= most and self.cosine >= least):
            raise WrongError(
                f"relative error {self.error:.1e} of all gradients, cosine {self.cosine:.5f}: not rounding"
            )


def beside(ours: Errors, theirs: Errors) -> str:
    """In how many tensors ours are nearer to float32 than theirs, together and in single examples; and the others."""
    nearer = [sum(a[i] < theirs.apart[name][i] for name, a in ours.apart.items()) for i in range(_count(ours))]
    a, b = ours.of_tensors(), theirs.of_tensors()
    others = sorted((name for name in a if a[name] >= b[name]), key=lambda name: b[name] / a[name])
    text = f"nearer than autocast in {len(a) - len(others)} of {len(a)} tensors, in single texts in {min(nearer)} to"
    text += f" {max(nearer)}"
    return text + (f"; not in {', '.join(f'{x} ({a[x] / b[x]:.2f}×)' for x in others)}" if others else "")


def _count(errors: Errors) -> int:
    return len(next(iter(errors.apart.values())))

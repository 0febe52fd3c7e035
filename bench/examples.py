"""A step with the norm of every example's gradient, beside the plain step: LoRA, DoRA and all weights, on prompt-masked
examples of different lengths."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import handgrad as hg
from handgrad.model.passes.example_gradients import ExampleNorms

from .attempts import Attempts
from .cases import uneven_examples
from .compete import compare
from .in_transformers import RANK
from .measure import take_turns, timed_rows
from .peers import Hand, step
from .row import Row
from .sizes import Size

NORMS, PLAIN = "handgrad, norms of examples", "handgrad"
KINDS = {"LoRA": {"rank": RANK}, "DoRA": {"rank": RANK, "dora": True}, "all weights": {}}


class WithNorms(Hand):
    """The same step, which also measures every example."""

    norms = torch.zeros(0)

    def gradients(self) -> float:
        self.optimizer.zero_grad()
        examples = ExampleNorms(grads=True)
        loss = self.model.loss_and_grads(*self.batch, examples=examples)
        self.norms = examples.result()
        return loss


def cases(size: Size) -> dict[str, Callable[[Attempts], list[Row]]]:
    return {case_name(kind, size): partial(measure, kind, size) for kind in KINDS}


def case_name(kind: str, size: Size) -> str:
    return f"{kind}, {_count(size)} examples"


def _count(size: Size) -> int:
    return max(2, size.examples // 3)  # a batch of fine-tuning


def measure(kind: str, size: Size, attempts: Attempts) -> list[Row]:
    batch = uneven_examples(size.model.n_vocab, _count(size), size.longest)
    contenders = {
        name: attempts(name, partial(_make, maker, kind, size, batch))
        for name, maker in ((NORMS, WithNorms), (PLAIN, Hand))
    }
    ours, plain = contenders[NORMS], contenders[PLAIN]
    error = attempts(NORMS, lambda: _error(ours, plain, batch))
    runs = {name: partial(step, contenders[name]) for name in attempts.competing(contenders)}
    timings = take_turns(runs, min(size.rounds, 2 * size.process_rounds), attempts)
    errors = {NORMS: error, PLAIN: 0.0}
    rows = timed_rows("examples", case_name(kind, size), len(batch[0]), errors, timings, PLAIN, attempts, errors)
    if NORMS in timings:
        rows[0].note = f"{size.label}; {1 / rows[0].ratio:.2f} times the time of a plain step"
    return rows


def _make(maker: type[Hand], kind: str, size: Size, batch: tuple[Tensor, Tensor, list[int]]) -> Hand:
    model = hg.GPT(size.model, seed=0)
    if KINDS[kind]:
        hg.lora.inject(model, **KINDS[kind])
        generator = torch.Generator().manual_seed(0)
        for adapter in hg.lora.adapters_of(model).values():  # of a new adapter the gradient of d is 0
            adapter.up.data.normal_(0, 0.02, generator=generator)
    return maker(model, *batch)


def _error(ours: WithNorms, plain: Hand, batch: tuple[Tensor, Tensor, list[int]]) -> float:
    """Compare the gradients with the plain step's, and the norms with those of a few examples alone."""
    ours.gradients()
    plain.gradients()
    found = ours.named_gradients()
    worst = max(compare(found[name], grad, name) for name, grad in plain.named_gradients().items())
    tokens, targets, lengths = batch
    alone = []
    for ids, wanted in list(zip(tokens.split(lengths), targets.split(lengths), strict=True))[:3]:
        plain.optimizer.zero_grad()
        plain.model.loss_and_grads(ids, wanted, [len(ids)])
        alone.append(torch.stack([g.double().norm() for g in plain.named_gradients().values()]).norm())
    return max(worst, compare(ours.norms[:3], torch.stack(alone), "norms of examples"))

"""`hg.example_norms` and `hg.example_products`: gradients per example, without forming them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from .. import lora
from ..checks import check_integer
from ..errors import HandgradError
from ..model.gpt import GPT
from ..model.inspect.trace import own_gradients
from ..model.passes.batch import TOKENS_AT_ONCE
from ..model.passes.example_gradients import ExampleGradients, ExampleNorms, ExamplePairs, ExamplesAgainst, Several
from ..model.passes.objective import TEXT_LOSS
from ..text.examples import Examples
from ..text.tokenizer import Tokenizer
from .inputs import Given, as_examples, groups

TOKENS = 4096  # of a call; the model processes them in pieces
PAIRED_TOKENS = 8192  # of examples whose pairs are computed in one call: factors of all of them exist together
HELD = 1 << 28  # entries of gradients that exist together

G = TypeVar("G", bound=ExampleGradients)


def example_norms(
    model: GPT, examples: Given, *, tokenizer: Tokenizer | None = None, format: str | None = None
) -> Tensor:
    """The norm of each example's gradient, (N) in float64: that of the example's mean loss, over all parameters that
    train. An example of wrong or broken text stands out.

    examples    records as in fine-tuning ({"prompt": …, "completion": …}), paths of files, or a text.Examples; they are read
                as fine-tuning reads them: a text longer than the context is several examples, and a record with nothing
                to learn is none
    tokenizer   default: the model's
    format      "chat" or "raw" (default: as fine-tuning chooses it)

    hg.example_norms(model, "examples.jsonl").topk(10)
    """
    found = as_examples(model, examples, tokenizer, format)
    norms = ExampleNorms()
    return torch.cat([_measured(model, found, part, norms).result() for part in groups(found, TOKENS)])


def example_products(
    model: GPT, examples: Given, others: Given | None = None, *, rank: int = 0, seed: int = 0,
    tokenizer: Tokenizer | None = None, format: str | None = None,
) -> Tensor:  # fmt: skip
    """The inner product of the gradients of every pair of examples, (N, N), or of every example with each of `others`,
    (N, M), in float64.

    rank    0: the gradients of all parameters that train; above 0: their projections onto random adapters of this rank
            (see `hg.influence`), which are estimates, and faster
    others  their gradients are formed, one at a time
    format  "chat" or "raw" (default: as fine-tuning chooses it)

    hg.example_products(model, examples)[3, 5]
    """
    check_rank(model, rank)
    found = as_examples(model, examples, tokenizer, format)
    with projected(model, rank, seed):
        if others is not None:
            return products_with(model, found, as_examples(model, others, tokenizer, format))[0]
        parts = [list(part) for part in groups(found, PAIRED_TOKENS // 2)]
        out = torch.zeros(found.per_epoch, found.per_epoch, dtype=torch.float64)
        for k, part in enumerate(parts):  # the pairs of two parts at a time
            for other in parts[k + 1 :] or ([[]] if len(parts) == 1 else []):
                both = part + other
                places = torch.tensor(both)
                out[places[:, None], places] = _measured(model, found, both, ExamplePairs()).result()
        return out


def products_with(model: GPT, found: Examples, others: Examples) -> tuple[Tensor, Tensor, Tensor]:
    """⟨∂_i, ∂_k⟩ of examples and others, (N, M), ‖∂_i‖, (N), from the same passes, and ‖∂_k‖, (M)."""
    at_once = max(1, HELD // sum(p.numel() for p in _trained(model)))
    columns, norms, of_others = [], torch.zeros(0), []
    for first in range(0, others.per_epoch, at_once):
        chosen = range(first, min(first + at_once, others.per_epoch))
        gradients = _gradients(model, others, chosen)
        of_others.append(torch.stack([q.double().flatten(1).square().sum(1) for q in gradients.values()]).sum(0).sqrt())
        both = Several(ExamplesAgainst(gradients), ExampleNorms())
        measured = [_measured(model, found, part, both).results() for part in groups(found, TOKENS)]
        columns.append(torch.cat([inner for inner, _ in measured]))
        norms = torch.cat([norm for _, norm in measured])
    return torch.cat(columns, 1), norms, torch.cat(of_others).cpu()


def _gradients(model: GPT, found: Examples, chosen: Sequence[int]) -> dict[nn.Parameter, Tensor]:
    """The gradients of these examples, (K, *shape) of every parameter that trains."""
    trained = _trained(model)
    rows: list[list[Tensor]] = []
    for i in chosen:
        with own_gradients(trained), _without_dropout(model):
            model.loss_and_grads(*found.select([i]), objective=TEXT_LOSS)
            rows.append([torch.zeros_like(p) if p.grad is None else p.grad for p in trained])
    return {p: torch.stack([row[k] for row in rows]) for k, p in enumerate(trained)}


def _measured(model: GPT, found: Examples, chosen: Sequence[int], gradients: G) -> G:
    """Measure these examples; `.grad` does not change."""
    _trained(model)
    tokens, targets, lengths = found.select(chosen)
    recompute = "blocks" if gradients.together and len(tokens) > TOKENS_AT_ONCE else "none"
    with _without_dropout(model):
        model.loss_and_grads(tokens, targets, lengths, objective=TEXT_LOSS, recompute=recompute, examples=gradients)
    return gradients


def _trained(model: GPT) -> list[nn.Parameter]:
    """The parameters that train; raises if there are none."""
    if found := [p for p in model.parameters() if p.requires_grad]:
        return found
    raise HandgradError(
        "every parameter is frozen, so there are no gradients: model.requires_grad_(True), or hg.lora.inject(model)"
    )


@contextmanager
def _without_dropout(model: GPT) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


# ── projection ──────────────────────────────────────────────────────────────────────────────────────────────────────


def check_rank(model: GPT, rank: int) -> None:
    """Raise if gradients cannot be projected with this rank."""
    if rank != 0:
        check_integer("rank", rank)
    if rank and lora.adapters_of(model):
        raise HandgradError("the model has an adapter, whose gradients are used as they are: leave rank out")


@contextmanager
def projected(model: GPT, rank: int, seed: int) -> Iterator[None]:
    """Within the context only adapters train, whose up factors are 0: the model computes the same, and the gradient of u is
    dᵗ ∂w, a random projection of the layer's (f_in, f_out) gradient to (rank, f_out). d has variance 1/rank, so inner
    products are those of the blocks' matrices on average. Rank 0: the model itself."""
    if not rank:
        yield
        return
    state = {p: (p.requires_grad, p.grad) for p in model.parameters()}
    try:
        lora.inject(model, rank, freeze_down=True, seed=seed)
        generator = torch.Generator(model.device).manual_seed(seed)
        for layer in lora.adapters_of(model).values():
            layer.down.data.normal_(0, rank**-0.5, generator=generator)
        yield
    finally:
        lora.remove(model)
        for p, (trains, grad) in state.items():
            p.requires_grad_(trains)
            p.grad = grad

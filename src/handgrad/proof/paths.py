"""The code paths that users take besides the recorded pass, each with what it must equal: training in pieces, recomputed or
with the optimizer inside, a trace with edits, generation through the cache and in one call per token, low bits, adapters."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..inference.engine import Engine, Options
from ..lora.injection import adapters_of, inject, layers_of, remove
from ..lora.layer import LoRA
from ..lora.merging import merge
from ..lora.named import name_adapters
from ..model.gpt import GPT
from ..model.inspect.trace import trace
from ..model.layers.linear import Affine, Linear
from ..model.passes.arguments import Pass
from ..model.passes.example_gradients import ExampleNorms, ExamplePairs, ExamplesAgainst
from ..model.passes.objective import TEXT_LOSS, MeanLoss, Objective
from ..model.passes.options import PassOptions
from ..model.passes.prefixes import FEWEST_TOKENS
from ..model.storage.quantize import BITS, NUMBERS, quantize
from ..ops import packed
from ..ops.loss import NO_TARGET
from ..optim import OptimizerInBackward
from ..tolerances import ENTRY_FLOOR, LOSS_FLOOR, NORM_FLOOR, SUM_TOLERANCE, TOLERANCE
from .reference import reference_logits
from .reference_model import ReferenceModel
from .rounding import MARGIN
from .tensor_errors import TensorErrors
from .wide_layers import float64_copy

SMALL_MODEL = 5_000_000  # parameters of a model of which everything is checked separately
MOST_PROBABLE = 1000  # tokens whose log-probabilities are compared, of a larger vocabulary
ADAPTERS: dict[str, dict[str, Any]] = {"LoRA": {}, "rsLoRA": {"rslora": True}, "DoRA": {"dora": True}}
PASSES = {"prompts at once": 1024, "prompts in parts": 3, "one token at a time": 1}  # tokens of one pass

Gradients = tuple[float, Mapping[str, Tensor]]  # the loss, and the gradients by parameter name
Outcome = tuple[float, str]  # the largest error, and where it is


class Batch(NamedTuple):
    """What `verify` was called with besides the model."""

    tokens: Tensor
    targets: Tensor
    lengths: list[int] | None
    objective: Objective


class Path(NamedTuple):
    """A check of one path."""

    section: str
    id: str
    statement: str
    oracle: str
    limit: float
    measure: Callable[[], Outcome]


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────────────


def gradients_of(model: GPT, batch: Batch, **options: Any) -> Gradients:
    """Loss and hand-derived gradient of every trainable parameter; NaN where none was computed, so that its check fails."""
    model.zero_grad()
    loss = model.loss_and_grads(batch.tokens, batch.targets, batch.lengths, objective=batch.objective, **options)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = {name: torch.full_like(p, math.nan) if p.grad is None else p.grad for name, p in trained.items()}
    model.zero_grad()  # the caller owns them now
    return loss, grads


def training_paths(model: GPT, batch: Batch, expected: Gradients, oracle: str) -> Iterator[Path]:
    """The code paths of training. Unlike a recorded pass they skip rows without a target in the last block, split the batch
    into pieces, recompute blocks, or update a layer as soon as its gradients are final. A recorder must not change what
    they compute."""
    runs: dict[str, dict[str, Any]] = {
        "one pass": {},
        "with a recorder": {"record": _discard},
        "recomputed blocks": {"recompute": "blocks"},
    }
    with_routers = model.config.router_losses and batch.objective.routers
    if type(batch.objective) is MeanLoss and not with_routers:
        runs["with norms of examples"] = {"examples": ExampleNorms(grads=True)}
    if len(model.pack(batch.tokens, batch.lengths).lengths) > 1:
        runs["in pieces"] = {"tokens_at_once": 1}
        runs["in pieces, recomputed blocks"] = {"tokens_at_once": 1, "recompute": "blocks"}
    found: dict[str, Callable[[], Gradients]] = {
        name: (lambda options=options: gradients_of(model, batch, **options))  # type: ignore[misc]
        for name, options in runs.items()
    }
    if type(batch.objective) is MeanLoss and with_routers == model.config.router_losses:
        found["optimizer in backward"] = lambda: _gradients_for_optimizer(model, batch)
    if with_routers:
        found["routers counted first"] = lambda: gradients_of(
            model, batch, routers=model.count_routers(batch.tokens, batch.lengths)
        )
    about, limit = f"{len(expected[1])} gradients", TOLERANCE[model.dtype]
    for name, run in found.items():
        measure = lambda run=run: worst_error(run(), expected, norm=model.dtype != torch.float64)  # noqa: E731
        yield Path("Code paths of training", f"gradients, {name}", about, oracle, limit, measure)


def prefix_paths(model: GPT, batch: Batch, expected: Gradients, oracle: str) -> Iterator[Path]:
    """Prefixes that sequences have in common, computed once."""
    for name, given in batches_with_prefixes(model, batch).items():
        own = given is batch

        def measure(given: Batch = given, own: bool = own) -> Outcome:
            right = expected if own else gradients_of(model, given)
            known = {name: x for name, x in right[1].items() if not x.isnan().any()}  # an expert may have no tokens
            found = gradients_of(model, given, share=True)
            return worst_error(found, (right[0], known), norm=model.dtype != torch.float64)

        id, about = f"gradients, {name} prefixes computed once", f"{given.tokens.numel()} tokens"
        judge = oracle if own else "one pass"
        yield Path("Code paths of training", id, about, judge, TOLERANCE[model.dtype], measure)


def batches_with_prefixes(model: GPT, batch: Batch) -> dict[str, Batch]:
    """The batch, if its sequences have common prefixes, and one with prefixes within prefixes that is made of its tokens; if
    the model computes any of them once."""
    found = {"common": batch, "nested": _with_nested_prefixes(model, batch)}
    options = PassOptions(share=True)

    def shares(x: Batch) -> bool:
        work = model.prepare(model.pack(x.tokens, x.lengths), x.targets, x.objective, options=options)
        return any(piece.parents for piece in work.pieces)

    return {name: x for name, x in found.items() if x is not None and shares(x)}


def _with_nested_prefixes(model: GPT, batch: Batch) -> Batch | None:
    """Three sequences of the batch's tokens: two differ at their end, and the third one agrees with half of them."""
    n, c = min(24, model.config.n_context), model.config
    ids = batch.tokens.reshape(-1)
    ids = ids.repeat(n // len(ids) + 1)[:n]
    trunk, end = ids[: n - 3], ids[n - 3 :]
    if len(trunk) <= FEWEST_TOKENS:
        return None
    other = (end + 1) % c.n_vocab
    sequences = [torch.cat(x) for x in ((trunk, end), (trunk, other), (trunk[: max(n // 2, FEWEST_TOKENS)], other))]
    targets = [x.roll(-1) for x in sequences]
    targets[1][: n // 3] = NO_TARGET
    return Batch(torch.cat(sequences), torch.cat(targets), [len(x) for x in sequences], TEXT_LOSS)


def example_paths(model: GPT, batch: Batch) -> Iterator[Path]:
    """Norms and products of the examples' gradients, against the gradients of one example after the other."""
    packed = model.pack(batch.tokens, batch.lengths)
    tokens, targets = (torch.split(x, [*packed.lengths]) for x in (packed.ids, batch.targets.reshape(-1)))
    counts = torch.tensor([float((x != NO_TARGET).sum()) for x in targets], dtype=torch.float64)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    text = TEXT_LOSS if type(batch.objective) is MeanLoss else batch.objective

    def measure() -> Outcome:
        one = [Batch(x, y, None, text) for x, y in zip(tokens, targets, strict=True)]
        # as parts of the batch, so that the same numbers are rounded
        grads = [gradients_of(model, x, n_targets=int(counts.sum()))[1] for x in one]
        rows = {p: torch.stack([x[name] for x in grads]).nan_to_num() for name, p in trained.items()}  # NaN: no target
        scale = torch.where(counts > 0, counts.sum() / counts, 0.0)
        inner = torch.stack([x.double().flatten(1) @ x.double().flatten(1).T for x in rows.values()]).sum(0)
        norms, pairs, against = ExampleNorms(), ExamplePairs(), ExamplesAgainst(rows)
        for examples in (norms, pairs, against):
            gradients_of(model, batch._replace(objective=text), examples=examples)
        expected = inner * scale[:, None] * scale
        lengths = expected.diag().sqrt()
        floor = ENTRY_FLOOR * lengths.max()
        sizes = lengths.clamp(min=floor)[:, None] * lengths.clamp(min=floor)
        return _largest({
            "norms": ((norms.result() - lengths).abs() / lengths.clamp(min=floor)).max().item(),
            "pairs": ((pairs.result() - expected).abs() / sizes).max().item(),
            "against given gradients": ((against.result() * scale - expected).abs() / sizes).max().item(),
        })  # fmt: skip

    about, limit = f"{len(counts)} examples", TOLERANCE[model.dtype]
    yield Path("Code paths of training", "norms and products of examples", about, "one by one", limit, measure)


def worst_error(found: Gradients, expected: Gradients, norm: bool = False, other: float = 0.0) -> Outcome:
    """The largest error of the loss and of all gradients; in a narrow dtype, of their norms. `other` is the largest entry of
    other gradients, of which these may be what is left after cancellation."""
    errors = TensorErrors()
    for name, grad in expected[1].items():
        errors.add(name, found[1][name] if name in found[1] else torch.full_like(grad, math.nan), grad, norm)
    relative = errors.relative(NORM_FLOOR if norm else ENTRY_FLOOR, other)
    relative["loss"] = abs(found[0] - expected[0]) / max(abs(expected[0]), LOSS_FLOOR)
    return _largest(relative)


def _largest(errors: Mapping[str, float]) -> Outcome:
    """The largest error and its name; NaN is larger than every number, which a comparison does not know."""
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[worst], worst


def _discard(name: str, value: Tensor) -> None:
    """A recorder that stores nothing."""


def _gradients_for_optimizer(model: GPT, batch: Batch) -> Gradients:
    """The gradients that the optimizer in the backward pass receives."""
    names = {p: name for name, p in model.named_parameters()}
    received: dict[str, Tensor] = {}

    def collect(layer: list[nn.Parameter]) -> None:
        for p in layer:
            if p.grad is not None:
                received[names[p]], p.grad = p.grad, None  # so that nothing is updated

    optimizer = OptimizerInBackward(model, lambda p: torch.optim.SGD(p, lr=0.0), clip=math.inf, combine=collect)
    return optimizer.step(batch.tokens, batch.targets, batch.lengths), received


# ── traces ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def trace_paths(model: GPT, batch: Batch) -> Iterator[Path]:
    """An edit that changes nothing changes no tensor of a trace."""

    def traced(**options: Any) -> Any:
        return trace(model, batch.tokens, batch.targets, batch.lengths, objective=batch.objective, **options)

    def measure() -> Outcome:
        plain, edited = traced(), traced(edit={})
        kinds = {"a_": TensorErrors(), "delta_": TensorErrors(), "grad_": TensorErrors()}
        for name, value in plain.items():
            kind = next((x for x in kinds if name.rpartition(".")[2].startswith(x)), None)
            if kind is not None and name != "a_0":
                found = edited[name] if name in edited else torch.full_like(value, math.nan)
                kinds[kind].add(name, found, value)
        errors = {name: x for kind in kinds.values() for name, x in kind.relative(ENTRY_FLOOR).items()}
        return _largest(errors | {"loss": abs(plain.loss - edited.loss) / max(abs(plain.loss), LOSS_FLOOR)})

    yield Path("Traces", "trace, an empty edit", "every tensor", "plain trace", TOLERANCE[model.dtype], measure)


# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────────────


def generation_paths(
    model: GPT, batch: Batch, expected: Tensor, section: str, suffix: str = "", explained: float = 0.0
) -> Iterator[Path]:
    """The log-probabilities of all tokens as generation computes them: prompts at once and in parts through the cache, and
    one token at a time, for which there is a kernel of all blocks. An error that is `explained` is allowed."""
    limit = max(TOLERANCE[model.dtype], explained)
    for name, at_once in PASSES.items():
        measure = lambda at_once=at_once: _generation_error(model, batch, [(None, expected)], at_once)  # noqa: E731
        id = f"log-probabilities, {name}{suffix}"
        yield Path(section, id, f"{batch.tokens.numel()} tokens", "reference", limit, measure)


def _generation_error(model: GPT, batch: Batch, expected: Sequence[tuple[str | None, Tensor]], at_once: int) -> Outcome:
    """The largest error of the log-probabilities that an engine gives the sequences of the batch, all of them with each of
    these adapters, relative to the largest. `expected` are the logits (n, V)."""
    c, packed = model.config, model.pack(batch.tokens, batch.lengths)
    engine = Engine(model, tokens_at_once=at_once)
    n_top, running = min(c.n_vocab, MOST_PROBABLE), []
    for adapter, logits in expected:
        for ids, rows in zip(*(torch.split(x, list(packed.lengths)) for x in (packed.ids, logits)), strict=True):
            options = Options(int(len(ids) < c.n_context), logprobs=n_top, prompt_logprobs=True, adapter=adapter)
            running.append((engine.add(ids, options), torch.log_softmax(rows.double(), 1)))
    while engine.busy:
        engine.step()
    errors, size = {"": 0.0}, 0.0
    for i, (sequence, rows) in enumerate(running):
        if sequence.error is not None:
            raise sequence.error
        for t, given in enumerate([*sequence.prompt_logprobs, *sequence.logprobs]):
            ids, values = zip(*given.top, strict=True)
            right = rows[t, list(ids)]
            error = (torch.tensor(values, dtype=torch.float64, device=right.device) - right).abs().max().item()
            size = max(size, right.abs().max().item())
            errors[f"sequence {i + 1}, token {t + 1}"] = error
    worst, where = _largest(errors)
    return worst / (size or 1.0), where


def low_bit_paths(model: GPT, batch: Batch) -> Iterator[Path]:
    """The model in 8 and 4 bits, computed in float32, in three steps:

    1. Generation with activations in float32, against the reference of its rounded weights.
    2. Each product of rounded activations, against the formula: only float32 sums may differ.
    3. Generation with rounded activations, against the reference that rounds them too. A difference in the last bit of an
       activation can become a step of 1/127 there, and moves others. So the error may be a few times what rounding changes.
    """
    matrices = [x for x in model.modules() if isinstance(x, Linear)]
    if not any(x.w.shape[0] % NUMBERS == 0 for x in matrices):
        return
    for bits in sorted(BITS, reverse=True):
        low = quantize(copy.deepcopy(model).float().eval(), bits)
        exact, suffix, section = copy.deepcopy(low), f", {bits} bits", "Low bits"
        exact.rounds_activations = False
        reference = ReferenceModel(float64_copy(low), batch.tokens, batch.targets, batch.lengths)
        logits, rounded = reference.logits(), _logits_of_rounded(low, reference)
        yield from generation_paths(exact, batch, logits, section, suffix)
        measure = lambda low=low: _largest(dict(_rounded_products(low)))  # noqa: E731
        yield Path(section, f"products{suffix}", "activations of 8 bits", "formula", SUM_TOLERANCE, measure)
        right, plain = (torch.log_softmax(x, 1) for x in (rounded, logits))
        change = ((right - plain).abs().max() / right.abs().max()).item()
        yield from generation_paths(low, batch, rounded, section, f"{suffix}, activations of 8 bits", MARGIN * change)


def _rounds(*layers: object) -> bool:
    """Whether what these layers read is rounded. DoRA multiplies with unpacked weights."""
    linear = [x for x in layers if isinstance(x, Affine)]
    matrices = [None if x.low_rank() is None else x.plain().packed for x in linear]
    return bool(linear) and all(x is not None and x.kind in packed.ROUNDED for x in matrices)


@torch.no_grad()
def _logits_of_rounded(model: GPT, reference: ReferenceModel) -> Tensor:
    """The reference's logits if what the layers of a model read is rounded to 8 bits."""
    steps = [(i, step) for i, block in enumerate(model.blocks) for step in block.steps()]
    names = {f"blocks.{i}.{step.inputs[0]}" for i, step in steps if _rounds(*step.layers.values())}
    names |= {"a_11"} if _rounds(model.head) else set()
    seen: dict[str, Tensor] = {}

    def visit(start: int, name: str, x: Tensor) -> Tensor:
        seen[name] = packed.rounded(x) if name in names else x
        return seen[name]

    reference.loss(visit)
    return reference_logits(seen["a_12"], reference.choices)


@torch.no_grad()
def _rounded_products(model: GPT) -> Iterator[tuple[str, float]]:
    """The largest error of each layer's product of rounded activations, relative to the sum of absolute products."""
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear) or not _rounds(layer):
            continue
        w, b, errors = layer.w.double(), layer.added_bias(), []
        for n in (5, 21):  # rows: kernels differ
            a = torch.randn(n, len(w), generator=torch.Generator().manual_seed(n)).to(model.device)
            with model.weights(layer, generating=True) as weights:
                found = layer.forward(a, Pass(weights=weights)).double()
            right = packed.rounded(a).double()
            bias = torch.zeros_like(w[0]) if b is None else b.double()
            size = right.abs() @ w.abs() + bias.abs()
            errors.append(((found - (right @ w + bias)).abs() / size.clamp(min=NORM_FLOOR * size.max())).max().item())
        yield name, max(errors)


# ── adapters ────────────────────────────────────────────────────────────────────────────────────────────────────────


def adapter_paths(model: GPT, batch: Batch, largest: float, seed: int, small: bool) -> Iterator[Path]:
    """The model's adapter merged, and beside the base under a name. A small model without one gets adapters of every kind,
    whose gradients are checked as well. The model is a float64 copy, and is changed: measure each path before the next.
    `largest` is the largest entry of the model's own gradients."""
    named: dict[str, dict[str, LoRA]] = {}
    expected: list[tuple[str | None, Tensor]] = []
    kinds = {"the adapter": {}} if adapters_of(model) else ADAPTERS if small else {}
    for kind, options in kinds.items():
        if kind in ADAPTERS:
            rank = min(2, *(n for layer in layers_of(model).values() for n in layer.effective_weight().shape))
            inject(model, rank, 3.0, seed=seed, **options)
            _fill(model, seed)
            yield Path("Adapters", f"gradients, {kind}", "every factor", "autograd", TOLERANCE[torch.float64],
                       lambda: _adapter_error(model, batch, largest))  # fmt: skip
        logits = ReferenceModel(model, *batch).logits()
        if model.adapter is not None and not model.packed and model.config.causal:
            merged = copy.deepcopy(model)
            merge(merged)
            yield _adapted(merged, batch, [(None, logits)], f"log-probabilities, {kind} merged")
        named[kind] = adapters_of(model)
        expected.append((kind, logits))
        remove(model)
    if named and model.config.causal:
        expected.append((None, ReferenceModel(model, *batch).logits()))
        name_adapters(model, named)
        yield _adapted(model, batch, expected, "log-probabilities, adapters by name")


def _adapter_error(model: GPT, batch: Batch, largest: float) -> Outcome:
    right = ReferenceModel(model, *batch).differentiate()
    return worst_error(gradients_of(model, batch), (right.loss, right.grads), other=largest)


def _adapted(model: GPT, batch: Batch, expected: Sequence[tuple[str | None, Tensor]], id: str) -> Path:
    statement = f"{len(expected) * batch.tokens.numel()} tokens"
    limit = TOLERANCE[model.dtype]
    return Path("Adapters", id, statement, "reference", limit, lambda: _generation_error(model, batch, expected, 3))


@torch.no_grad()
def _fill(model: GPT, seed: int) -> None:
    """Random up factors and magnitudes: those of new adapters change nothing."""
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters_of(model).values():
        adapter.up.copy_(0.1 * torch.randn(adapter.up.shape, generator=generator))
        if adapter.magnitude is not None:
            adapter.magnitude.mul_(1 + 0.1 * torch.randn(adapter.magnitude.shape, generator=generator))

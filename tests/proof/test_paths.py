"""Every code path that `hg.verify` checks can fail: a mistake in one is found by its own check, and by no other."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import make_batch, make_model
from handgrad.inference import engine, kv_cache, token_block
from handgrad.inference.sequences import TokenLogprob
from handgrad.kernels import library
from handgrad.kernels import token_block as kernel_block
from handgrad.lora import merging
from handgrad.lora.layer import LoRA
from handgrad.model.block import Block
from handgrad.model.inspect.trace import Trace
from handgrad.model.passes.objective import MeanLoss, Objective, PositionLoss, TargetRows
from handgrad.model.steps import Step
from handgrad.model.storage.packed import Packed
from handgrad.ops import attention, lora, packed
from handgrad.proof import paths

LENGTHS = [9, 4]
needs_kernels = pytest.mark.skipif(library.load(torch.float32) is None, reason="no C compiler: there are no kernels")


def failures(model: hg.GPT, **options: Any) -> set[str]:
    return {c.id for c in hg.verify(model, *make_batch(model, LENGTHS), LENGTHS, **options).failed}


def wide_enough(dtype: torch.dtype = torch.float32, **shape: object) -> hg.GPT:
    """A model whose matrices can be rounded to 8 and 4 bits."""
    return make_model(d_model=32, n_heads=2, dtype=dtype, **shape)


def test_every_path_of_a_right_model_passes() -> None:
    model = wide_enough()
    report = hg.verify(model, *make_batch(model, LENGTHS), LENGTHS)
    assert report.passed, [(c.id, c.error, c.note) for c in report.failed]
    ids = {c.id for c in report}
    low = [f", {bits} bits{x}" for bits in (8, 4) for x in ("", ", activations of 8 bits")]
    for way in ("prompts at once", "prompts in parts", "one token at a time"):
        assert {f"log-probabilities, {way}{x}" for x in ("", ", float32", *low)} <= ids
    assert {"products, 8 bits", "products, 4 bits"} <= ids
    assert {f"gradients, {x}" for x in paths.ADAPTERS} <= ids
    assert {f"log-probabilities, {x} merged" for x in paths.ADAPTERS} <= ids
    assert {"trace, an empty edit", "log-probabilities, adapters by name"} <= ids


# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────────────


@needs_kernels
def test_a_token_block_that_ignores_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    right = token_block._norm

    def without_gain(norm: Any, width: int, tensors: list[Tensor]) -> Any:
        plain = copy.deepcopy(norm)
        plain.weight.data.fill_(1)
        return right(plain, width, tensors)

    monkeypatch.setattr(token_block, "_norm", without_gain)
    found = failures(wide_enough())
    assert found >= {f"log-probabilities, one token at a time{x}" for x in ("", ", float32", ", 8 bits", ", 4 bits")}
    assert not any("at once" in name or not name.startswith("log-probabilities") for name in found)


def test_a_cache_that_stores_keys_for_values(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kv_cache._store
    monkeypatch.setattr(kv_cache, "_store", lambda slot, i, start, k, v: right(slot, i, start, k, k))
    found = failures(make_model(d_model=12, n_heads=3))
    assert "log-probabilities, prompts in parts" in found and "log-probabilities, prompts at once" not in found
    assert all(name.startswith("log-probabilities") for name in found)


@needs_kernels
def test_products_with_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed.product
    monkeypatch.setattr(packed, "product", lambda *given: right(*given).mul_(1.01))
    found = failures(wide_enough())
    assert found and all(name.endswith((", 8 bits", ", 4 bits")) for name in found)


@needs_kernels
def test_products_with_rounded_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is smaller than what the rounding changes is found in the products."""
    right = packed.rounded_product
    monkeypatch.setattr(packed, "rounded_product", lambda *given: right(*given).mul_(1 + 1e-5))
    assert failures(wide_enough()) == {"products, 8 bits", "products, 4 bits"}


@needs_kernels
def test_a_token_block_that_takes_other_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel_block.packed
    flipped: list[Tensor] = []  # stay in memory

    def wrong(data: Tensor, kind: str, f_in: int, rounds: bool) -> dict[str, int] | None:
        if rounds:
            flipped.append(data := data.flip(0))
        return right(data, kind, f_in, rounds)

    monkeypatch.setattr(kernel_block, "packed", wrong)
    found = failures(wide_enough())
    assert len(found) == 4 and all(name.endswith("activations of 8 bits") for name in found)
    assert not any("at once" in name for name in found)


def test_weights_that_are_not_those_of_the_rounded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Packed.unpack

    def wrong(self: Packed, out: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        found = right(self, out, dtype)
        return found.mul_(1.01) if dtype is torch.float32 else found

    monkeypatch.setattr(Packed, "unpack", wrong)
    found = failures(wide_enough())
    assert found and all(name.endswith((", 8 bits", ", 4 bits")) for name in found)


def test_one_nan_among_right_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths._largest({"a": 0.5, "b": math.nan, "c": 1.0})[1] == "b"
    right = engine.logprobs_of

    def wrong(*given: Any) -> list[TokenLogprob]:
        first, *rest = right(*given)
        return [first._replace(top=[(0, math.nan)]), *rest]

    monkeypatch.setattr(engine, "logprobs_of", wrong)
    assert "log-probabilities, prompts at once" in failures(make_model())


# ── traces and objectives ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["blocks.0.a_5", "blocks.0.delta_4", "blocks.0.grad_w_3"])
def test_an_edited_pass_that_computes_something_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = paths.trace

    def wrong(*given: Any, edit: Any = None, **options: Any) -> Trace:
        found = right(*given, edit=edit, **options)
        if edit is not None:
            found._values[name] = found[name] * (1 + 1e-6)
        return found

    monkeypatch.setattr(paths, "trace", wrong)
    model = make_model()
    report = hg.verify(model, *make_batch(model, LENGTHS), LENGTHS)
    assert [(c.id, c.note) for c in report.failed] == [("trace, an empty edit", name)]


@pytest.mark.parametrize("objective", [hg.PositionLoss(2), hg.LogitDifference(8, 3, 7)])
def test_each_objective(objective: Objective) -> None:
    model = make_model(n_blocks=2)
    report = hg.verify(model, *make_batch(model, LENGTHS, ignored=0.0), LENGTHS, objective=objective)
    assert report.passed, [(c.id, c.error, c.note) for c in report.failed]
    assert "Not checked: norms of examples and the optimizer in backward" in str(report)


REFERENCE = -2 + torch.randn(2, 42, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
FOUR = torch.tensor([0.7, -1.1, 0.2, -0.4])
OF_COMPLETIONS: list[Objective] = [
    hg.DPO(reference=REFERENCE[0], smoothing=0.1, sft=0.3),
    hg.IPO(reference=REFERENCE[0]),
    hg.SimPO(),
    hg.ORPO(),
    hg.KTO(reference=REFERENCE[0], desirable=FOUR > 0, z=0.2),
    hg.GRPO(advantages=FOUR, sampled=REFERENCE[0], reference=REFERENCE[1], beta=0.1),
    hg.RowLoss(lambda log_p, sequence: ((log_p**2).sum(), -2 * log_p)),
]


def pairs(model: hg.GPT) -> tuple[Tensor, Tensor, list[int]]:
    """Two pairs of completions, each with the prompt of its pair."""
    prompts = torch.randint(model.config.n_vocab, (2, 8), generator=torch.Generator().manual_seed(2))
    lengths = [12, 9, 11, 10]
    tokens, targets = (list(torch.split(x, lengths)) for x in make_batch(model, lengths, ignored=0.0))
    for i, (ids, wanted) in enumerate(zip(tokens, targets, strict=True)):
        ids[:8], wanted[:6] = prompts[i // 2], -100
    return torch.cat(tokens), torch.cat(targets), lengths


@pytest.mark.parametrize("objective", OF_COMPLETIONS, ids=lambda x: type(x).__name__)
@pytest.mark.some_cases(3)
def test_each_objective_of_completions(objective: Objective) -> None:
    model = make_model()
    report = hg.verify(model, *pairs(model), objective=objective)
    assert report.passed, [(c.id, c.error, c.note) for c in report.failed]
    assert {c.id for c in report} >= PREFIXES


PREFIXES = {f"gradients, {kind} prefixes computed once" for kind in ("common", "nested")}


def test_a_prefix_with_the_signals_of_one_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_last(x: Tensor, into: Tensor, sources: list[slice]) -> None:
        start = 0
        for rows in sources:
            stop = start + rows.stop - rows.start
            into[rows] = x[start:stop]
            start = stop

    monkeypatch.setattr(attention, "sum_into_sources", of_the_last)
    model = make_model()
    report = hg.verify(model, *pairs(model), objective=hg.SimPO())
    assert {c.id for c in report.failed} == PREFIXES


def test_an_objective_that_reads_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PositionLoss.select
    monkeypatch.setattr(PositionLoss, "select", lambda self, *given: right(PositionLoss(self.position + 1), *given))
    model = make_model()
    report = hg.verify(model, *make_batch(model, LENGTHS, ignored=0.0), LENGTHS, objective=hg.PositionLoss(2))
    assert {"loss", "delta_12", "gradients, one pass"} <= {c.id for c in report.failed}


@dataclass(frozen=True)
class Doubled(MeanLoss):
    def forward(self, logits: Tensor, at: TargetRows) -> Tensor:
        return 2 * super().forward(logits, at)


class Sub(hg.LogitDifference):
    """Might compute anything."""


@pytest.mark.parametrize("objective", [Doubled(), Sub(2, 3, 7)])
def test_an_unknown_objective_is_refused(objective: Objective) -> None:
    model = make_model()
    with pytest.raises(hg.HandgradError, match=f"does not know the objective {type(objective).__name__}"):
        hg.verify(model, *make_batch(model, LENGTHS), LENGTHS, objective=objective)


# ── adapters ────────────────────────────────────────────────────────────────────────────────────────────────────────


def wrong_scale(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: LoRA, *given: Any, **options: Any) -> Any:
        before, self.scale = self.scale, 1.01 * self.scale
        try:
            return right(self, *given, **options)
        finally:
            self.scale = before

    return wrong


MERGED = {f"log-probabilities, {kind} merged" for kind in paths.ADAPTERS}
NAMED = "log-probabilities, adapters by name"


def test_a_merge_with_another_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "_sum", wrong_scale(merging._sum))
    assert failures(make_model()) == MERGED


def test_named_adapters_with_another_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoRA, "add_branch", wrong_scale(LoRA.add_branch))
    assert failures(make_model()) == {NAMED}


def test_a_magnitude_without_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lora.grad_m
    monkeypatch.setattr(lora, "grad_m", lambda *given: 1.001 * right(*given))
    assert failures(make_model()) == {"gradients, DoRA"}


@pytest.mark.parametrize("options", [{}, {"rslora": True, "rank_pattern": {"c_attn": 3}}, {"dora": True}])
@pytest.mark.some_cases(3)
def test_a_model_with_an_adapter(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(n_blocks=2)
    hg.lora.inject(model, 2, 5.0, **options)
    paths._fill(model, 1)
    ids = {c.id for c in hg.verify(model, *make_batch(model, LENGTHS), LENGTHS)}
    assert {"log-probabilities, the adapter merged", NAMED} <= ids and not ids & MERGED
    assert failures(model) == set()
    monkeypatch.setattr(merging, "_sum", wrong_scale(merging._sum))
    assert failures(model) == {"log-probabilities, the adapter merged"}


# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_that_the_model_does_not_compute_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Block.steps
    monkeypatch.setattr(
        Block, "steps", lambda self: [*right(self), Step("norm_3", "norm", ("a_10",), ("a_10b",), {"9": self.norm_2})]
    )
    model = make_model()
    batch = make_batch(model, LENGTHS)
    report = hg.verify(model, *batch, LENGTHS)
    assert not report.passed and "a_10b" in str(report)


def test_steps_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Block.steps
    monkeypatch.setattr(Block, "steps", lambda self: right(self)[::-1])
    with pytest.raises(hg.HandgradError, match="block 0 lists a step that reads a_5 before another one computes it"):
        hg.verify(make_model(), *make_batch(make_model(), LENGTHS), LENGTHS)

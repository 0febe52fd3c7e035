"""Objectives and edits of a trace: equal to autograd, to finite differences, and to the pass without edits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import make_batch, perturb
from handgrad.model.inspect.trace import gradients
from handgrad.model.passes.objective import MEAN_LOSS, Objective
from handgrad.model.steps import signal
from handgrad.proof.oracles import finite_difference, relative_error
from handgrad.proof.reference_model import ReferenceModel

LIMIT = 1e-10
LENGTHS = [6, 4]


def squares(log_p: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_t (1 + i) log² p_t of sequence i"""
    return ((1 + sequence) * log_p**2).sum(), -2 * (1 + sequence) * log_p


REFERENCE, SAMPLED = (-2 + torch.randn(2, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).unbind()
ADVANTAGES = torch.tensor([0.7, -1.1])
OBJECTIVES: list[Objective] = [
    MEAN_LOSS,
    hg.PositionLoss(2),
    hg.LogitDifference(8, 3, 7),
    hg.DPO(reference=REFERENCE, smoothing=0.1, sft=0.3),
    hg.IPO(reference=REFERENCE, beta=0.4),
    hg.SimPO(),
    hg.ORPO(),
    hg.KTO(reference=REFERENCE, desirable=torch.tensor([False, True]), z=0.2, weights=(1.0, 1.3)),
    hg.GRPO(advantages=ADVANTAGES, sampled=SAMPLED, reference=REFERENCE, beta=0.1),
    hg.GRPO(advantages=-ADVANTAGES, sampled=SAMPLED, reference=REFERENCE, beta=0.1, corrected=False, per="completion"),
    hg.GRPO(advantages=ADVANTAGES, sampled=SAMPLED, per="longest", longest=9),
    hg.RowLoss(squares),
]
PUBLIC = {x for x in map(partial(getattr, hg), hg.__all__) if isinstance(x, type) and issubclass(x, Objective)}
LLAMA: dict[str, Any] = {"preset": "nano-llama", "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "d_hidden": 20}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "qwen3": {**LLAMA, "family": "qwen3", "qk_norm": True, "window": 3, "windowed": (1,), "tied": False},
    "lfm2": {**LLAMA, "family": "lfm2", "qk_norm": True, "conv_blocks": (0,), "conv_bias": True, "conv_taps": 4},
    "scores": {**LLAMA, "attention_scale": 0.4, "score_cap": 2.0, "sinks": True},
}
Visit = Callable[[str, Tensor], Tensor]


def make(name: str) -> tuple[hg.GPT, Tensor, Tensor, list[int]]:
    shape = {"n_vocab": 11, "n_context": 16, "d_model": 12, "n_heads": 3, "n_blocks": 2, **MODELS[name]}
    model = hg.GPT(hg.preset(shape.pop("preset", "nano"), **shape), seed=0, dtype=torch.float64)
    perturb(model)
    tokens, targets = make_batch(model, LENGTHS)
    targets[2] = 5
    return model, tokens, targets, LENGTHS


def by_autograd(batch: Any, objective: Objective, visit: Visit = lambda name, x: x) -> tuple[float, dict[str, Tensor]]:
    """The objective, and by autograd every error signal and gradient under the trace's names."""
    model, tokens, targets, lengths = batch
    reference = ReferenceModel(model, tokens, targets, lengths, objective)
    seen: dict[str, list[Tensor]] = {}

    def watched(start: int, name: str, x: Tensor) -> Tensor:
        x = visit(name, x)
        seen.setdefault(signal(name), []).append(x)
        return x

    parameters = list(model.parameters())
    with torch.enable_grad():
        loss = reference.loss(watched)
        wanted = [*(x for parts in seen.values() for x in parts), *parameters]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    found = iter([torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)])
    named = {name: [next(found) for _ in parts] for name, parts in seen.items()}
    for p in parameters:
        p.grad = next(found)
    signals = {name: torch.cat(parts) for name, parts in named.items() if parts[0].ndim == 2}
    expected = {**signals, **gradients(model)}
    model.zero_grad()
    return loss.item(), expected


def errors(trace: hg.Trace, expected: dict[str, Tensor]) -> dict[str, float]:
    """The relative errors above the limit."""
    floor = 1e-4 * max(x.abs().max().item() for x in expected.values())
    found = {name: relative_error(trace[name], x, floor) for name, x in expected.items()}
    return {name: error for name, error in found.items() if error > LIMIT}


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("name", MODELS)
def test_objectives_equal_autograd_and_finite_differences(name: str, objective: Objective) -> None:
    batch = make(name)
    trace = hg.trace(*batch, objective=objective)
    value, expected = by_autograd(batch, objective)
    assert trace.loss == pytest.approx(value, rel=1e-12)
    assert batch[0].loss(*batch[1:], objective=objective) == pytest.approx(value, rel=1e-12)
    assert errors(trace, expected) == {}
    a, delta = trace["blocks.0.a_5"], trace["blocks.0.delta_5"]
    u = torch.randn(a.shape, generator=torch.Generator().manual_seed(1), dtype=a.dtype)
    moved = lambda x: hg.trace(*batch, objective=objective, edit={"blocks.0.a_5": lambda _: x}).loss  # noqa: E731
    assert (delta * u).sum().item() == pytest.approx(finite_difference(moved, a, u), rel=1e-6)


def test_every_public_objective_has_a_case() -> None:
    missing = sorted(kind.__name__ for kind in PUBLIC - {type(x) for x in OBJECTIVES})
    assert PUBLIC and not missing, f"OBJECTIVES of {Path(__file__).name} has no {', '.join(missing)}"


def test_a_position_and_a_difference_are_what_they_say() -> None:
    model, tokens, targets, lengths = make("gpt2")
    logits = model.logits(tokens, lengths)
    assert model.loss(tokens, targets, lengths, objective=hg.PositionLoss(2)) == pytest.approx(
        -logits.log_softmax(1)[2, 5].item()
    )
    trace = hg.trace(model, tokens, targets, lengths, objective=hg.LogitDifference(8, 3, 7))
    assert trace.loss == pytest.approx((logits[8, 3] - logits[8, 7]).item())
    expected = torch.zeros_like(logits)
    expected[8, 3], expected[8, 7] = 1, -1
    assert torch.equal(trace["delta_12"], expected)
    assert not trace["blocks.0.delta_1"][:6].any()  # the other sequence


@pytest.mark.parametrize(
    "objective, message",
    [
        (hg.PositionLoss(10), "row from 0 to 9"),
        (hg.LogitDifference(1, 3, 3), "choose two tokens"),
        (hg.LogitDifference(1, 3, 11), "against must be a token id from 0 to 10"),
        ("loss", r"must be hg\.PositionLoss.*not \"loss\""),
        (None, "not null"),
        (hg.PositionLoss, "not .*class"),
    ],
)
def test_bad_objectives(objective: Any, message: str) -> None:
    model, *batch = make("gpt2")
    for call in (partial(hg.trace, model), partial(hg.verify, model), model.loss, model.loss_and_grads):
        with pytest.raises(hg.HandgradError, match=message):
            call(*batch, objective=objective)


def test_nan_by_an_edit_in_the_widest_dtype() -> None:
    with pytest.raises(hg.HandgradError, match="even in float64: look for huge weights or an edit"):
        hg.trace(*make("gpt2"), edit={"blocks.0.a_5": lambda a: a * torch.nan})


def test_a_position_without_a_target_has_no_loss() -> None:
    model, tokens, targets, lengths = make("gpt2")
    targets[3] = -100
    with pytest.raises(hg.HandgradError, match="position 3 has no target"):
        hg.trace(model, tokens, targets, lengths, objective=hg.PositionLoss(3))


# ── edits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_an_empty_edit_changes_nothing(name: str, adapters: bool) -> None:
    batch = make(name)
    if adapters:
        hg.lora.inject(batch[0], 2, targets="all-linear", dora=True)
        perturb(batch[0])
    plain, edited = hg.trace(*batch), hg.trace(*batch, edit={})
    assert edited.loss == pytest.approx(plain.loss, rel=1e-13)
    assert set(plain) <= set(edited)
    assert all(relative_error(edited[name], plain[name], 1e-3) <= 1e-12 for name in plain)
    assert all(p.grad is None for p in batch[0].parameters())


@pytest.mark.parametrize("place", ["1", "2", "3", "4", "5", "6", "8", "9", "10"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_edited_activation_equals_autograd(name: str, place: str) -> None:
    """To the backward pass the edit is an added constant."""
    batch = make(name)
    fn = lambda a: torch.where(torch.arange(a.shape[1]) % 2 == 0, 0.0, a * a)  # noqa: E731

    def visit(name: str, x: Tensor) -> Tensor:
        return x + (fn(x) - x).detach() if name == f"blocks.0.a_{place}" else x

    value, expected = by_autograd(batch, OBJECTIVES[2], visit)
    trace = hg.trace(*batch, objective=OBJECTIVES[2], edit={f"blocks.0.a_{place}": fn})
    assert trace.loss == pytest.approx(value, rel=1e-12)
    assert trace.loss != pytest.approx(hg.trace(*batch, objective=OBJECTIVES[2]).loss, rel=1e-3)
    assert errors(trace, expected) == {}


@pytest.mark.parametrize("place", ["2", "3", "4", "6", "8", "9", "10"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_edited_error_signal_equals_autograd(name: str, place: str) -> None:
    batch = make(name)
    fn = lambda delta: delta * (torch.arange(delta.shape[1]) % 3 > 0)  # noqa: E731

    def visit(name: str, x: Tensor) -> Tensor:
        if name == f"blocks.1.a_{place}":
            x.register_hook(fn)
        return x

    plain = hg.trace(*batch)
    trace = hg.trace(*batch, edit={f"blocks.1.delta_{place}": fn})
    value, expected = by_autograd(batch, MEAN_LOSS, visit)
    expected = {name: x for name, x in expected.items() if name != f"blocks.1.delta_{place}"}
    assert trace.loss == pytest.approx(value, rel=1e-12) == plain.loss
    assert errors(trace, expected) == {}
    assert relative_error(trace["blocks.0.delta_1"], plain["blocks.0.delta_1"]) > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "lfm2"])
@pytest.mark.parametrize("place", ["rho", "q", "k", "v", "skip_5", "skip_10"])
@pytest.mark.some_cases(3)
def test_signals_that_only_an_edited_trace_has(name: str, place: str) -> None:
    """Against finite differences of the loss; with keys of their own norm and rotation these are the edited ones."""
    batch = make(name)
    trace = hg.trace(*batch, edit={})
    a, delta = trace[f"blocks.1.{place}"], trace[f"blocks.1.delta_{place}"]
    u = torch.randn(a.shape, generator=torch.Generator().manual_seed(1), dtype=a.dtype)
    moved = lambda x: hg.trace(*batch, edit={f"blocks.1.{place}": lambda _: x}).loss  # noqa: E731
    assert (delta * u).sum().item() == pytest.approx(finite_difference(moved, a, u), rel=1e-6)


def test_cutting_a_skip_connection_cuts_its_part_of_the_error() -> None:
    batch = make("llama")
    plain = hg.trace(*batch)
    cut = hg.trace(*batch, edit={"blocks.0.delta_skip_5": torch.zeros_like})
    expected = plain["blocks.0.delta_1"] - plain["blocks.0.delta_5"]
    assert relative_error(cut["blocks.0.delta_1"], expected) <= LIMIT
    assert torch.equal(cut["blocks.0.delta_5"], hg.trace(*batch, edit={})["blocks.0.delta_5"])


@pytest.mark.parametrize(
    "edit, message",
    [
        ({"blocks.0.a_33": torch.zeros_like}, r"blocks\.0\.a_3"),
        ({"blocks.0.a_3": lambda a: a[:2]}, r"must return a tensor of shape \(10, 12\)"),
        ({"blocks.0.a_3": lambda a: None}, "must return a tensor"),
        ({"blocks.0.a_3": 0}, "dict of functions"),
    ],
)
def test_bad_edits(edit: Any, message: str) -> None:
    batch = make("gpt2")
    with pytest.raises(hg.HandgradError, match=message):
        hg.trace(*batch, edit=edit)
    assert all(p.grad is None for p in batch[0].parameters())

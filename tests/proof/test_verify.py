"""hg.verify detects mistakes in the product, and its report is readable."""

import io
import json
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import handgrad as hg
from conftest import make_batch, make_model, perturb
from handgrad.model.gpt import Work
from handgrad.model.layers.attention import Attention
from handgrad.model.layers.linear import Linear
from handgrad.model.passes.arguments import Pass
from handgrad.ops import activation, attention, layernorm, linear, lora
from handgrad.proof import by_hand
from handgrad.proof.check_report import Report, run_check
from handgrad.proof.checker import activation_names, signal_names
from handgrad.proof.oracles import count_multiply_adds, directional_error, finite_difference, relative_error

MODULE = import_module("handgrad.proof.verify")  # hg.verify itself is the function


def failed_checks(model: hg.GPT, lengths: list[int]) -> set[str]:
    tokens, targets = make_batch(model, lengths)
    return {c.id for c in hg.verify(model, tokens, targets, lengths).failed}


PATHS = (
    "gradients, one pass",
    "gradients, with a recorder",
    "gradients, recomputed blocks",
    "gradients, with norms of examples",
    "gradients, optimizer in backward",
)
ADAPTERS = ("gradients, LoRA", "gradients, rsLoRA", "gradients, DoRA")
# in the order of the backward pass
SIGNALS = ["delta_12", "delta_11", *(f"blocks.0.delta_{i}" for i in (10, 9, 8, 7, 6, 5, 4, 3, "causal", "raw", 2, 1))]


@pytest.mark.parametrize(
    ("module", "name", "broken", "first"),
    [
        (layernorm, "backward", lambda delta, a_bar, inv_sigma, w: delta * w, "blocks.0.delta_10"),
        (
            activation,
            "backward",
            lambda delta, x, name: (delta * (x > 0), activation.forward(x, name)),
            "blocks.0.delta_7",
        ),
        (linear, "backward", lambda delta, w, *_: -(delta @ w.t()), "delta_11"),
        (attention, "causal_signal_tile", lambda d, v, c, rho: (d @ v.mT) * rho, "blocks.0.delta_causal"),
    ],
)
def test_a_broken_formula_fails_first_at_its_own_signal(
    module: object, name: str, broken: object, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, broken)
    failed = failed_checks(make_model(), [9, 4])
    assert next(name for name in SIGNALS if name in failed) == first
    assert any(x.endswith("along u") for x in failed), "finite differences must detect it too"


def test_a_missing_gradient_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "grad_b", lambda delta, *_: torch.zeros_like(delta[0]))
    failed = failed_checks(make_model(logits_bias=True), [9])
    assert {"lm_head.bias", "transformer.h.0.mlp.c_fc.bias"} <= failed
    assert "transformer.h.0.mlp.c_fc.weight" not in failed


def test_a_missing_tied_contribution_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Linear.accumulate

    def accumulate(self: Linear, delta: Tensor, a: Tensor, run: Pass, shared: None = None) -> None:
        if self.w.shape[1] != model.config.n_vocab:
            others(self, delta, a, run)

    model = make_model()
    monkeypatch.setattr(Linear, "accumulate", accumulate)
    wte = "transformer.wte.weight"
    failed = failed_checks(model, [9])
    assert {name for name in failed if not name.startswith("gradients")} == {wte, f"{wte} along u"}
    assert {name for name in failed if name.startswith("gradients")} == set(PATHS)


# ── everything is checked ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("adapter_targets", ["all-linear", "h.1.mlp.c_fc", "lm_head"])
def test_adapters_leave_no_signal_unchecked(adapter_targets: str) -> None:
    model = make_model(n_blocks=2)
    hg.lora.inject(model, 2, targets=adapter_targets)
    report = hg.verify(model, *make_batch(model, [9, 4]), [9, 4])
    assert report.passed, report.summary()
    assert "blocks.0.delta_1" in signal_names(model) and len(signal_names(model)) == 2 * 12 + 2
    ids = {c.id for c in report}
    assert ids >= set(signal_names(model)) | set(activation_names(model))
    assert ids >= {f"{name} along u" for name in signal_names(model)}


def test_a_signal_that_was_not_computed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = by_hand.record_pass

    def without_delta_2(*given: object, record: Callable[[str, Tensor], None], **options: object) -> float:
        keep = lambda name, x: None if name == "blocks.0.delta_2" else record(name, x)  # noqa: E731
        return right(*given, record=keep, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(by_hand, "record_pass", without_delta_2)
    report = hg.verify(make_model(), *make_batch(make_model(), [9]))
    assert not report.passed
    assert [c.id for c in report.failed] == ["blocks.0.delta_2"]
    assert report.missing == ["blocks.0.delta_2 along u"]


def test_a_check_that_did_not_run_fails() -> None:
    model = make_model()
    report = hg.verify(model, *make_batch(model, [9]), watch=lambda names: names[1:])
    assert not report.failed and len(report.missing) == 1 and not report.passed
    assert "1 of" in report.summary() and "did not run: blocks.0.delta_1 along u" in report.summary()
    assert json.loads(report.to_json())["missing"] == report.missing


# ── the code paths of training ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("recorded", [False, True])
def test_a_mistake_with_skipped_rows_is_detected(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a pass with all signals skips no rows; every signal it records is right. A recorder must change nothing."""
    right = Attention.backward

    def wrong(self: Attention, delta_4: Tensor, saved: object, a_2: object, run: Pass):
        out = right(self, delta_4, saved, a_2, run)
        here = run.query_rows is not None and (run.observer is not None or not recorded)
        return out * 1.001 if here and out is not None else out

    monkeypatch.setattr(Attention, "backward", wrong)
    others = {*PATHS, *ADAPTERS, "gradients, nested prefixes computed once"}
    expected = {"gradients, with a recorder"} if recorded else others
    assert failed_checks(make_model(n_blocks=2), [9]) == expected


def test_a_mistake_in_pieces_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = hg.GPT.prepare

    def without_last_targets(self: hg.GPT, *arguments: object, **options: object) -> Work:
        work = right(self, *arguments, **options)
        *pieces, last = work.pieces
        return work if not pieces else work._replace(pieces=[*pieces, last._replace(targets=last.targets * 0)])

    monkeypatch.setattr(hg.GPT, "prepare", without_last_targets)
    in_pieces = {"gradients, in pieces", "gradients, in pieces, recomputed blocks"}
    assert failed_checks(make_model(), [9, 4]) == in_pieces


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.some_cases(3)
def test_dropout_is_checked(dora: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(n_blocks=2, dtype=dtype)
    hg.lora.inject(model, 2, targets=["c_attn", "mlp.c_proj", "lm_head"], dropout=0.3, dora=dora)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.1 * torch.randn(p.shape)
    tokens, targets = make_batch(model, [9, 4])
    report = hg.verify(model.train(), tokens, targets, [9, 4])
    assert report.passed, report.summary()
    assert "transformer.h.0.attn.c_attn.down with dropout along u" in {c.id for c in report}
    right = lora.backward
    monkeypatch.setattr(lora, "backward", lambda g, d, into, mask=None: right(g, d, into))
    failed = {c.id for c in hg.verify(model, tokens, targets, [9, 4]).failed}
    assert failed and all("with dropout" in name for name in failed)


def test_a_gradient_in_bfloat16_may_have_the_error_that_rounding_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULE.TOLERANCE, torch.bfloat16, 1e-3)
    model = make_model(dtype=torch.bfloat16)
    ids = {f"{name} in bfloat16" for name, _ in model.named_parameters()}
    assert not ids & failed_checks(model, [9, 4])
    right = linear.grad_b
    monkeypatch.setattr(linear, "grad_b", lambda *given: 2 * right(*given))
    assert "transformer.h.0.mlp.c_fc.bias in bfloat16" in failed_checks(model, [9, 4])


def test_the_model_is_not_changed() -> None:
    model = make_model(dtype=torch.float32)
    tokens, targets = make_batch(model, [9])
    model.loss_and_grads(tokens, targets)
    before = [(p.clone(), p.grad.clone()) for p in model.parameters()]
    hg.verify(model, tokens, targets)
    hg.trace(model, tokens, targets)
    for p, (value, grad) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value) and torch.equal(p.grad, grad)


def test_finite_differences_of_a_large_model_take_a_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "SMALL_MODEL", 0)
    model = make_model(n_blocks=2)
    report = hg.verify(model, *make_batch(model, [9]))
    assert report.passed
    differences = [c.id for c in report if c.oracle == "finite diff."]
    assert "transformer.h.1 along u" in differences and len(differences) == 2 + 2 + 5
    assert "Not checked: new adapters" in str(report) and "Not checked: new adapters" in report._repr_html_()


@pytest.mark.parametrize(
    "shape",
    [
        {"n_vocab": 1},
        {"d_model": 2, "n_heads": 1},
        {"d_model": 6, "n_heads": 2, "n_blocks": 2},
        {"d_model": 13, "n_heads": 1},
    ],
)
@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.some_cases(3)
def test_correct_models_pass_at_every_scale(shape: dict[str, object], spread: float) -> None:
    model = hg.GPT(make_model(**shape).config, dtype=torch.float64, seed=5)
    with torch.no_grad():
        for p in model.parameters():
            p += spread * torch.randn(p.shape, dtype=torch.float64)
    report = hg.verify(model, *make_batch(model, [9, 3]), [9, 3], seed=5)
    assert report.passed, [(c.id, c.error) for c in report.failed]


def test_models_that_cannot_be_verified() -> None:
    model = make_model()
    model.requires_grad_(False)
    with pytest.raises(hg.HandgradError, match=r"every parameter is frozen.*set requires_grad=True"):
        hg.verify(model, *make_batch(model, [9]))


def test_wrong_arguments_are_named() -> None:
    model, batch = make_model(), make_batch(make_model(), [9])
    for given, options, message in (
        ((model, [[1, 2]], batch[1]), {}, "tokens must be a tensor of ids, not a list"),
        ((model, batch[0], [[1, 2]]), {}, "targets must be a tensor of ids, not a list"),
        (("nano", *batch), {}, 'verify takes a model of handgrad .* not "nano"'),
        ((model, *batch), {"watch": 3}, "watch must be a function .* not 3"),
    ):
        with pytest.raises(hg.HandgradError, match=message):
            hg.verify(*given, **options)  # type: ignore[arg-type]


def test_a_model_too_large_for_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "available_memory", lambda: (1000, ""))
    model = make_model()
    with pytest.raises(hg.HandgradError, match="GB are free"):
        hg.verify(model, *make_batch(model, [9]))


@pytest.mark.parametrize("shape", [{}, {"tied": False, "logits_bias": True, "dtype": torch.bfloat16}, {"lora": 2}])
@pytest.mark.some_cases(5)
def test_a_model_that_fits_a_block_at_a_time(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors are checked in float64, and the code paths in the model's own dtype."""
    rank = shape.pop("lora", 0)
    model = make_model(**{"n_blocks": 3, "dtype": torch.float32, **shape})
    if rank:
        hg.lora.inject(model, rank, targets=["c_attn", "lm_head"])
        perturb(model)
    tokens, targets = make_batch(model, [9, 4])
    whole = {c.id for c in hg.verify(model, tokens, targets, [9, 4])}
    monkeypatch.setattr(MODULE, "fits_whole", lambda model: False)
    report = hg.verify(model, tokens, targets, [9, 4])
    assert report.passed, [(c.id, c.error, c.note) for c in report.failed]
    ids = {c.id for c in report}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert ids <= whole and ids >= {*activation_names(model), *signal_names(model), *trained, *PATHS}
    assert ids >= {"blocks.0.delta_1 along u", "trace, an empty edit"}
    assert "Not checked: generation in float64, low bits and adapters: the model does not fit" in str(report)
    monkeypatch.setattr(attention, "causal_signal_tile", lambda d, v, c, rho: (d @ v.mT) * rho)
    failed = {c.id for c in hg.verify(model, tokens, targets, [9, 4]).failed}
    assert "blocks.2.delta_causal" in failed and not {"delta_11", "blocks.2.delta_3"} & failed


def test_oracles() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5).double()
    assert finite_difference(lambda t: t.sin().sum().item(), x, torch.ones(5).double()) == pytest.approx(
        x.cos().sum().item()
    )
    assert directional_error(lambda t: t.sin().sum().item(), x, x.cos(), generator) < 1e-9
    assert directional_error(lambda t: t.sin().sum().item(), x, 1.001 * x.cos(), generator) > 1e-4
    assert count_multiply_adds(lambda: torch.randn(3, 5) @ torch.randn(5, 7)) == 105


def test_relative_error_of_wrong_shapes_and_nan_is_infinite() -> None:
    one = torch.ones(3)
    assert relative_error(one, torch.ones(4)) == math.inf
    assert relative_error(torch.tensor([math.nan, 1.0]), torch.ones(2)) == math.inf
    assert relative_error(one, 2 * one) == 0.5
    assert relative_error(one, torch.zeros(3)) == 1.0


def test_a_report_that_fails() -> None:
    def fail() -> float:
        raise ValueError("boom")

    report = Report("two")
    report.checks.append(run_check("good", "S", "1", "a statement", "exact", 0.0, lambda: 0.0))
    report.checks.append(run_check("bad", "S", "2", "another", "exact", 0.0, fail))
    report.checks.append(run_check("nan", "S", "", "a third", "exact", 1.0, lambda: math.nan))
    assert [c.id for c in report.failed] == ["bad", "nan"] and not report.passed
    assert "boom" in report["bad"].note
    assert "2 of 3 checks FAILED" in str(report) and "✘" in str(report)
    row = json.loads(report.to_json())["checks"][1]
    assert row["passed"] is False and row["error"] is None
    assert "<details open>" in report._repr_html_()
    assert not Report("nothing").passed


def test_a_report_that_passes() -> None:
    model = make_model()
    report = hg.verify(model, *make_batch(model, [9]))
    text = str(report)
    assert "Error signals" in text and "blocks.0.delta_raw" in text and "all " in text
    html = report._repr_html_()
    assert html.count("<tr>") == len(report) + 1
    keys = {"id", "section", "equation", "statement", "oracle", "error", "tolerance", "passed"}
    data = json.loads(report.to_json())
    assert all(keys <= set(c) for c in data["checks"])
    assert data["passed"] == len(report) and data["failed"] == 0
    assert len({c["id"] for c in data["checks"]}) == len(report)


def test_a_terminal_sees_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(
        "handgrad.proof.check_report.Console", lambda **options: Console(file=written, force_terminal=True, width=80)
    )
    model = make_model()
    hg.verify(model, *make_batch(model, [5]))
    assert "by hand and by autograd" in written.getvalue()
    assert "code paths of training" in written.getvalue() and "finite differences" in written.getvalue()

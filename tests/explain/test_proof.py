"""The checks of every station: all pass for correct formulas; a broken formula fails at its own station."""

from collections.abc import Iterable

import pytest
import torch
from tiny_session import LFM2, LLAMA, QWEN3, SCALED, SCORES, SMOLLM3, TEXT, make_session, make_traced, session_of

import handgrad as hg
from conftest import OTHER_ACTIVATIONS, perturb
from handgrad.explain_page.proofs import prover as module
from handgrad.explain_page.proofs.prover import CheckResults, Prover
from handgrad.explain_page.session.session import Session
from handgrad.model.layers.linear import QueryKeyValue
from handgrad.model.passes.arguments import Pass
from handgrad.ops import activation, attention, embedding, gated, layernorm, linear, lora, loss, rmsnorm, rotary


def check_all(session: Session, differences: bool = True, text: str = TEXT, only: Iterable[str] = ()) -> CheckResults:
    """Check every station, or those that are named."""
    prover, results = Prover(session), CheckResults()
    for station in (session.by_id[id] for id in only) if only else session.stations:
        prover.check_now(session.sentence(text), results, station, differences)
    return results


def failed_stations(results: CheckResults, kind: str | None = None) -> set[str]:
    return {
        id
        for id, checks in results.checks.items()
        if any(not c["passed"] and (kind is None or c["kind"] == kind) for c in checks)
    }


@pytest.mark.parametrize(
    "shape",
    [{}, {"tied": False, "logits_bias": True, "n_blocks": 1}, {"lora": 2}, {"key_bias": False, "causal": False},
     *({"activation": name, "n_blocks": 1} for name in OTHER_ACTIVATIONS),
     LLAMA, QWEN3, SMOLLM3, LFM2, SCALED, SCORES, {**LLAMA, "lora": 2},
     {**LFM2, "lora": 2}, {**QWEN3, "lora": 2, "n_blocks": 1}],
)  # fmt: skip
@pytest.mark.some_cases(2)
def test_every_station_passes(shape: dict[str, object]) -> None:
    results = check_all(make_session(**shape))  # type: ignore[arg-type]
    assert failed_stations(results) == set()
    kinds = {c["kind"] for checks in results.checks.values() for c in checks}
    assert kinds == {"twin", "autograd", "differences", "identity", "rounding"}
    assert all(len(checks) >= 2 for id, checks in results.checks.items() if id != "a_0")
    quantities = " ".join(c["what"] for checks in results.checks.values() for c in checks)
    rows = () if shape.get("sinks") else ("each row of Δ_causal sums to 0", "each row of ρ sums to 1")
    for identity in ("each row of Δ₁₂ sums to 0", *rows):
        assert identity in quantities
    if not shape:
        assert "∂b_k is 0" in quantities and "sum of the gradients of both uses" in quantities


@pytest.mark.parametrize("shape", [{}, {"tied": False, "logits_bias": True}, QWEN3])
@pytest.mark.some_cases(5)
def test_every_station_of_a_large_model_passes(shape: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer; the tables are small enough here for finite differences, which are not taken of them."""
    monkeypatch.setattr("handgrad.explain_page.session.session.LARGE", 0)
    session = make_session(**shape)  # type: ignore[arg-type]
    session.last_response_at = -1e9  # idle
    results = check_all(session)
    assert failed_stations(results) == set() and set(results.complete) == {s.id for s in session.stations}
    kinds = {id: {c["kind"] for c in checks} for id, checks in results.checks.items()}
    assert kinds["blocks.0.a_7"] == {"twin", "autograd", "differences", "identity", "rounding"}


def without_second_mean(
    delta: torch.Tensor, a_bar: torch.Tensor, inv_sigma: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    g = delta * w
    return (g - g.mean(1, keepdim=True)) * inv_sigma


def unrotated(
    delta: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, into: torch.Tensor, neighbors: bool = False
) -> torch.Tensor:
    return delta


def gate_without_slope(
    delta: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return delta * up, delta * torch.sigmoid(gate) * gate, gated.forward(gate, up, name)


BREAKAGES = {
    "a norm's gradient of b": (layernorm, "grad_b", lambda delta, into: -delta.sum(0), {"blocks.1.a_2", "a_11"}),
    "a norm without its second mean": (
        layernorm, "backward", without_second_mean, {"a_11", "blocks.0.a_2"},
    ),
    "the gate of the activation": (
        activation, "backward", lambda delta, x, name: (delta, activation.forward(x, name)), {"blocks.1.a_8"}),
    "the correction of the softmax": (
        attention, "causal_signal_tile", lambda delta, v, shift, rho: (delta @ v.transpose(1, 2)) * rho, {"blocks.1.a_3"}),
    "rows that overwrite each other": (
        embedding, "grad_w", lambda delta, ids, w, into: torch.zeros_like(w).index_copy_(0, ids, delta), {"a_1"}),
    "the loss without the target": (
        loss, "forward_and_delta",
        lambda logits, targets, weight: (loss.forward(logits, targets), torch.softmax(logits, 1) * weight), {"loss"},
    ),
    "an RMSNorm that keeps the part along its output": (
        rmsnorm, "backward", lambda delta, a_bar, inv_rms, w: delta * w * inv_rms, {"a_11", "blocks.1.a_6", "blocks.0.a_2"},
    ),
    "a gain of the queries' norm": (
        rmsnorm, "grad_w", lambda delta, a_bar, into: (a_bar * delta).flatten(0, -2).mean(0), {"blocks.1.a_3", "a_11"},
    ),
    "a rotation that is not undone": (rotary, "backward", unrotated, {"blocks.1.a_3"}),
    "a gate without its slope": (gated, "backward", gate_without_slope, {"blocks.1.a_8"}),
    "a linear layer's gradient of b": (linear, "grad_b", lambda delta, *_: 2 * delta.sum(0), {"blocks.0.a_7"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKAGES)
@pytest.mark.some_cases(3)
def test_a_broken_formula_fails_at_its_station(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module_, function, wrong, expected = BREAKAGES[name]
    monkeypatch.setattr(module_, function, wrong)
    today = module_ in (rmsnorm, rotary, gated)
    only = () if "gradient of b" in name else expected
    results = check_all(make_session(**QWEN3) if today else make_session(), only=only)
    assert expected <= failed_stations(results)
    for id in expected:
        failed = {c["kind"] for c in results.checks[id] if not c["passed"]}
        assert {"autograd", "differences"} & failed
    if "gradient of b" in name:  # all error signals stay correct
        assert all(
            not c["what"].endswith(("incoming", "outgoing"))
            for cs in results.checks.values()
            for c in cs
            if not c["passed"]
        )


def test_identities_alone_detect_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_rounding(self: QueryKeyValue, delta: torch.Tensor, a: torch.Tensor, run: Pass, shared: None) -> None:
        self.weight.grad = a.t() @ delta
        self.bias.grad = delta.sum(0) + 1e-3  # type: ignore[union-attr]

    monkeypatch.setattr(QueryKeyValue, "accumulate", with_rounding)
    assert "blocks.0.a_3" in failed_stations(check_all(make_session(), differences=False), "identity")


def test_an_adapter_that_blocks_the_frozen_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "grad_d", lambda g, a, *_: 2 * torch.mm(a.t(), g))
    session = make_session(lora=2)
    with torch.no_grad():
        session.model.blocks[0].mlp.expand.up += 0.1  # type: ignore[attr-defined]
    assert "blocks.0.a_7" in failed_stations(check_all(session, differences=False))


def test_results_come_from_the_background_thread() -> None:
    session, sentence = make_traced(n_blocks=1)
    prover = Prover(session)
    try:
        answer = prover.request(sentence, session.by_id["blocks.0.a_3"], 60.0)
        assert answer["state"] == "done" and answer["passed"] is True
        everything = prover.request_all(sentence, 60.0)
        assert all(x == {"passed": True, "state": "done"} for x in everything.values())
    finally:
        prover.stop()


def test_a_failed_check_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise hg.HandgradError("verifying this model takes too much memory")

    monkeypatch.setattr(module, "Checker", refuse)
    session = make_session(n_blocks=1)
    prover = Prover(session)
    try:
        answer = prover.request(session.sentence(TEXT), session.by_id["a_11"], 60.0)
        assert answer["passed"] is None and "too much memory" in answer["problem"] and answer["state"] == "failed"
    finally:
        prover.stop()


def test_checks_leave_the_model_unchanged() -> None:
    session, sentence = make_traced()
    before = {name: p.clone() for name, p in session.model.named_parameters()}
    check_all(session)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in session.model.named_parameters())
    assert session.sentence(TEXT) is sentence


def test_every_kind_of_adapter_passes() -> None:
    model = make_session().model
    hg.lora.inject(model, 2, targets=("all-linear", "lm_head"), dora=True, dropout=0.3)
    perturb(model, scale=0.1)
    session = session_of(model)
    assert not failed_stations(check_all(session))
    shown = {parameter.symbol for station in session.stations for parameter in station.parameters}
    assert {"d_2", "u_6", "m_8", "m_11", "d_11"} <= shown


@pytest.mark.parametrize("text", ["Hi", "\n\n", "aaa"])
def test_short_sentences_pass(text: str) -> None:
    assert not failed_stations(check_all(make_session(), text=text))

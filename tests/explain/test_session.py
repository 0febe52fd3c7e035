"""The session: traced sentences, versions of the weights, steps, and the input it rejects."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_session import LLAMA, QWEN3, TEXT, make_session, make_traced

import handgrad as hg
from handgrad.explain_page.session import session as module
from handgrad.explain_page.session.session import ExpiredError
from handgrad.explain_page.views import attention as attention_view
from handgrad.explain_page.views import overview as overview_view
from handgrad.explain_page.views import step as steps
from handgrad.explain_page.views.step import take_step
from handgrad.kernels import library


@pytest.mark.parametrize(
    "shape", [{}, LLAMA, QWEN3, {"lora": 2}, {"tied": False, "logits_bias": True}, {"dtype": torch.bfloat16}]
)
def test_a_sentence_holds_its_trace(shape: dict[str, Any]) -> None:
    session, sentence = make_traced(**shape)
    tokens = torch.tensor([list(TEXT.encode())])
    targets = torch.cat([tokens[:, 1:], torch.tensor([[-100]])], 1)
    trace = hg.trace(session.model, tokens, targets)
    assert sentence.trace.loss == trace.loss and set(sentence.trace) == set(trace)
    assert all(torch.equal(sentence.trace[name], x) for name, x in trace.items())
    grads = {name: x for name, x in trace.items() if "grad_" in name}
    assert sentence.trace.norms == {name: x.norm().item() for name, x in grads.items()}
    assert session.sentence(TEXT) is sentence and session.find(sentence.id) is sentence
    assert sentence.trace.bytes == stored_bytes(trace)
    assert all(p.grad is None for p in session.model.parameters())


def stored_bytes(trace: hg.Trace) -> int:
    """What a traced sentence keeps: everything but the gradients."""
    storages = [x.untyped_storage() for name, x in trace.items() if "grad_" not in name]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def test_progress_follows_the_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    session, seen = make_session(), []
    record = session.progress.record

    def watch(name: str, value: torch.Tensor) -> None:
        record(name, value)
        seen.append(session.progress.report(None))

    monkeypatch.setattr(session.progress, "record", watch)
    session.sentence(TEXT)
    shares = [found["share"] for found in seen]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] > 0.6 and all(found["busy"] for found in seen)
    places = dict.fromkeys((found["backward"], found["block"]) for found in seen)
    assert list(places) == [(False, 0), (False, 1), (True, 1), (True, 0)]
    assert not session.progress.report(None)["busy"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least two tokens"),
        ("x", "at least two tokens"),
        ("x" * 49, "at most 48"),
        ("x" * 100_000, "at most 4,000"),
        ("half \ud800 a character", "lone surrogate"),
    ],
)
def test_invalid_sentences(text: str, message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        make_session().sentence(text)


def test_control_characters_are_ordinary_tokens() -> None:
    session = make_session()
    sentence = session.sentence("\0\x1b[31m\r\n\t\x7f")
    assert len(sentence.ids) == 10
    assert overview_view.overview(session, sentence)["tokens"][0]["label"] == "\0"


def test_a_dropped_trace_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRACE_CACHE_BYTES", 1)
    session = make_session()
    first = session.sentence("first of all")
    session.sentence("and then another")
    assert len(session._sentences) == 1
    again = session.find(first.id)
    assert again is not first and torch.equal(again.trace["delta_11"], first.trace["delta_11"])
    with pytest.raises(ExpiredError, match="not known"):
        session.find("nonsense")


@pytest.mark.parametrize("shape", [{}, LLAMA, {**LLAMA, "lora": 2}], ids=["gpt2", "llama", "llama with adapters"])
def test_a_step_lowers_the_loss_as_predicted_and_leaves_other_versions_unchanged(shape: dict[str, Any]) -> None:
    session, sentence = make_traced(**shape)
    before = {name: p.clone() for name, p in session.model.named_parameters()}
    for lr in (1e-4, 1e-3):
        taken = take_step(session, sentence, lr, "SGD")
        expected, got = taken["predicted"] - taken["loss"], taken["measured"] - taken["loss"]
        assert expected < 0 and got == pytest.approx(expected, rel=0.2)
    squares = sum(x.double().square().sum().item() for name, x in sentence.trace.items() if ".grad_" in f".{name}")
    assert expected == pytest.approx(-1e-3 * squares, rel=1e-3)
    with session.model_at(0) as model:
        assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    new = session.find(taken["id"])
    assert new.trace.loss == pytest.approx(taken["measured"], rel=1e-5)
    assert session.sentence(TEXT).trace.loss == sentence.trace.loss
    assert taken["moves"][0]["before"] == pytest.approx(sentence.trace["y_pred"][0, sentence.ids[1]].item(), rel=1e-6)
    assert taken["moves"][0]["after"] == pytest.approx(new.trace["y_pred"][0, sentence.ids[1]].item(), rel=1e-6)


def test_adam_continues_with_its_state_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "ENTRIES_AT_ONCE", 50)
    session, sentence = make_traced(dtype=torch.float64)
    taken = take_step(session, sentence, 1e-3, "Adam")
    taken = take_step(session, session.find(taken["id"]), 1e-3, "Adam")
    model = make_session(dtype=torch.float64).model
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.9, 0.99))
    for _ in range(2):
        optimizer.zero_grad()
        model.loss_and_grads(sentence.tokens, sentence.targets)
        optimizer.step()
    assert taken["measured"] == pytest.approx(model.loss(sentence.tokens, sentence.targets), rel=1e-9)
    assert taken["steps"] == 2


def test_steps_from_one_version_are_independent() -> None:
    """The optimizer's state belongs to a version: a step does not change it for the next step from there."""
    session = make_session()
    for p in session.model.parameters():
        p.grad = torch.ones_like(p)  # the user's own
    first = take_step(session, session.sentence(TEXT), 1e-3, "Adam")
    middle = session.find(first["id"])
    one, other = (take_step(session, middle, 1e-3, "Adam") for _ in range(2))
    assert one["measured"] == other["measured"] and one["predicted"] == other["predicted"]
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in session.model.parameters() if p.grad is not None)
    assert session.find(one["id"]).trace.loss == session.find(other["id"]).trace.loss < middle.trace.loss


def test_one_version_is_in_memory() -> None:
    session, sentence = make_traced()
    for _ in range(3):
        sentence = session.find(take_step(session, sentence, 1e-3, "SGD")["id"])
    assert session._loaded[0] == 3 and session._active_version == 3
    with session.model_at(1) as model:
        kept = {p.data_ptr() for p in model.parameters()}
        assert kept == {x.data_ptr() for x in session._loaded[1].values()} and session._loaded[0] == 1
    assert session.version(2).bytes == sum(p.numel() * p.element_size() for p in session.model.parameters())


def test_only_adapters_are_trained() -> None:
    session, sentence = make_traced(lora=2)
    assert "blocks.0.delta_1" in sentence.trace  # computed although nothing below it is trained
    taken = take_step(session, sentence, 1e-2, "SGD")
    assert taken["measured"] < taken["loss"]
    number = session.find(taken["id"]).version
    assert {name.rpartition(".")[2] for name in session.version(number).weights} == {"down", "up"}
    assert not session.model.positions.weight.requires_grad


@pytest.mark.parametrize(
    ("lr", "optimizer", "message"),
    [(0.0, "SGD", "above 0"), (1e9, "SGD", "at most 100"), (0.1, "Magic", "unknown optimizer")],
)
def test_invalid_steps(lr: float, optimizer: str, message: str) -> None:
    session = make_session()
    with pytest.raises(hg.HandgradError, match=message):
        take_step(session, session.sentence(TEXT), lr, optimizer)


def test_a_step_that_overflows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session, sentence = make_traced()
    values = iter([sentence.trace.loss])  # before the step; after it, nothing

    def overflow(*_: object, **__: object) -> float:
        for value in values:
            return value
        raise hg.NonFiniteError("the activations overflowed")

    before = {name: p.clone() for name, p in session.model.named_parameters()}
    monkeypatch.setattr(session.model, "loss", overflow)
    with pytest.raises(hg.HandgradError, match="choose a smaller one"):
        take_step(session, sentence, 100.0, "SGD")
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in session.model.named_parameters())
    assert not session._versions


def test_a_dropped_version_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERSION_CACHE_BYTES", 1)
    monkeypatch.setattr(module, "TRACE_CACHE_BYTES", 1)
    session, sentence = make_traced()
    first = take_step(session, sentence, 1e-3, "SGD")
    take_step(session, sentence, 1e-3, "SGD")
    with pytest.raises(ExpiredError, match="reset"):
        session.find(first["id"])


def test_concurrent_clients_are_independent() -> None:
    session = make_session()
    texts = [f"sentence number {i}" for i in range(8)]
    alone = [make_session().sentence(text).trace.loss for text in texts]

    def client(text: str) -> float:
        for _ in range(3):
            sentence = session.sentence(text)
            overview_view.overview(session, sentence)
            attention_view.at_head(session, sentence, 1, 1)
            take_step(session, sentence, 0.01, "SGD")
        return sentence.trace.loss

    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(client, texts)) == alone


def test_a_step_that_explodes_the_loss_is_rejected() -> None:
    session, sentence = make_traced()
    with pytest.raises(hg.HandgradError, match="choose a smaller one"):
        for _ in range(4):
            sentence = session.find(take_step(session, sentence, 100.0, "SGD")["id"])


def test_kernels_are_compiled_before_the_first_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    session, seen = make_session(n_blocks=1), []
    monkeypatch.setattr(library, "prepared", lambda dtype: False)
    monkeypatch.setattr(library, "load", lambda dtype: seen.append((dtype, session.progress.report([])["compiling"])))
    session._compile()
    session._compile()
    assert seen == [(torch.float32, True)] and not session.progress.report([])["compiling"]

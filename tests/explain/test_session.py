"""Sentences, versions of the weights, steps: what a session keeps, and what it refuses."""

import threading

import pytest
import torch
from looking import TEXT, make_session

import handgrad as hg
from handgrad.explain import session as module
from handgrad.explain import views
from handgrad.explain.session import Forgotten
from handgrad.explain.steps import take_step


def test_a_look_is_the_trace() -> None:
    session = make_session()
    look = session.look(TEXT)
    tokens = torch.tensor([list(TEXT.encode())])
    targets = torch.cat([tokens[:, 1:], torch.tensor([[-100]])], 1)
    trace = hg.trace(session.model, tokens, targets)
    assert look.trace.loss == trace.loss and set(look.trace) == set(trace)
    assert all(torch.equal(look.trace[name], x) for name, x in trace.items())
    assert session.look(TEXT) is look and session.find(look.id) is look


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
def test_sentences_that_cannot_be_shown(text: str, message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        make_session().look(text)


def test_control_characters_are_tokens_like_others() -> None:
    session = make_session()
    look = session.look("\0\x1b[31m\r\n\t\x7f")
    assert len(look.ids) == 10
    assert views.overview(session, look)["tokens"][0]["label"] == "\0"


def test_half_a_character_is_shown_by_its_number() -> None:
    session = make_session()
    assert [session.word(id) for id in session.look("é!").ids] == ["‹195›", "‹169›", "!"]


def test_what_was_let_go_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_TRACES", 1)
    session = make_session()
    first = session.look("first of all")
    session.look("and then another")
    assert len(session._looks) == 1
    again = session.find(first.id)
    assert again is not first and torch.equal(again.trace["delta_11"], first.trace["delta_11"])
    with pytest.raises(Forgotten, match="not known"):
        session.find("nonsense")


def test_a_step_lowers_the_loss_as_the_gradient_says_and_changes_nobody_elses_weights() -> None:
    session = make_session()
    look = session.look(TEXT)
    before = {name: p.clone() for name, p in session.model.named_parameters()}
    for lr in (1e-4, 1e-3):
        taken = take_step(session, look, lr, "SGD")
        expected, got = taken["predicted"] - taken["loss"], taken["measured"] - taken["loss"]
        assert expected < 0 and got == pytest.approx(expected, rel=0.2)
    squares = sum(x.double().square().sum().item() for name, x in look.trace.items() if ".grad_" in f".{name}")
    assert expected == pytest.approx(-1e-3 * squares, rel=1e-3)
    with session.at(0) as model:
        assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    new = session.find(taken["id"])
    assert new.trace.loss == pytest.approx(taken["measured"], rel=1e-5)
    assert session.look(TEXT).trace.loss == look.trace.loss
    assert taken["moves"][0]["before"] == look.trace["y_pred"][0, look.ids[1]].item()
    assert taken["moves"][0]["after"] == new.trace["y_pred"][0, look.ids[1]].item()


def test_adam_goes_on_with_what_it_remembers() -> None:
    session = make_session(dtype=torch.float64)
    look = session.look(TEXT)
    taken = take_step(session, look, 1e-3, "Adam")
    taken = take_step(session, session.find(taken["id"]), 1e-3, "Adam")
    model = make_session(dtype=torch.float64).model
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.9, 0.99))
    for _ in range(2):
        optimizer.zero_grad()
        model.loss_and_grads(look.tokens, look.targets)
        optimizer.step()
    assert taken["measured"] == pytest.approx(model.loss(look.tokens, look.targets), rel=1e-9)
    assert taken["steps"] == 2


def test_with_adapters_only_they_move() -> None:
    session = make_session(lora=2)
    look = session.look(TEXT)
    assert "blocks.0.delta_1" in look.trace  # nothing below trains, and still it is shown
    taken = take_step(session, look, 1e-2, "SGD")
    assert taken["measured"] < taken["loss"]
    number = session.find(taken["id"]).version
    assert {name.rpartition(".")[2] for name in session.version(number).weights} == {"down", "up"}
    assert not session.model.transformer.wpe.weight.requires_grad


@pytest.mark.parametrize(
    ("lr", "optimizer", "message"),
    [(0.0, "SGD", "above 0"), (1e9, "SGD", "at most 100"), (0.1, "Magic", "no optimizer")],
)
def test_steps_that_cannot_be_taken(lr: float, optimizer: str, message: str) -> None:
    session = make_session()
    with pytest.raises(hg.HandgradError, match=message):
        take_step(session, session.look(TEXT), lr, optimizer)


def test_a_step_out_of_the_range_of_numbers_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(*_: object) -> float:
        raise hg.NonFiniteError("the activations overflowed")

    session = make_session()
    look = session.look(TEXT)
    before = {name: p.clone() for name, p in session.model.named_parameters()}
    monkeypatch.setattr(session.model, "loss", overflow)
    with pytest.raises(hg.HandgradError, match="choose a smaller one"):
        take_step(session, look, 100.0, "SGD")
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in session.model.named_parameters())
    assert not session._versions


def test_versions_are_let_go_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_VERSIONS", 1)
    monkeypatch.setattr(module, "KEPT_TRACES", 1)
    session = make_session()
    look = session.look(TEXT)
    first = take_step(session, look, 1e-3, "SGD")
    take_step(session, look, 1e-3, "SGD")
    with pytest.raises(Forgotten, match="reset"):
        session.find(first["id"])


def test_many_at_once_each_get_their_own() -> None:
    session = make_session()
    texts = [f"sentence number {i}" for i in range(8)]
    alone = {text: make_session().look(text).trace.loss for text in texts}
    found: dict[str, float] = {}

    def client(text: str) -> None:
        for _ in range(3):
            look = session.look(text)
            views.overview(session, look)
            views.at_head(session, look, 1, 1)
            found[text] = look.trace.loss
            take_step(session, look, 0.01, "SGD")

    threads = [threading.Thread(target=client, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_a_step_that_throws_the_loss_away_is_refused() -> None:
    session = make_session()
    look = session.look(TEXT)
    with pytest.raises(hg.HandgradError, match="choose a smaller one"):
        for _ in range(4):
            look = session.find(take_step(session, look, 100.0, "SGD")["id"])

"""A conversation: answers equal those to the complete text; a turn computes its own tokens; the context; why; adapters."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import handgrad as hg
from conftest import save_adapter
from handgrad.formats.models import chat_template_of
from handgrad.inference.conversation import Chat
from handgrad.inference.sampling import Sampling
from tiny_chat import write_chat_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "m"
    write_chat_model(path)
    return path


@pytest.fixture
def chat(folder: Path) -> Chat:
    return chat_with(folder)


def chat_with(folder: Path, max_new_tokens: int = 24, **options: object) -> Chat:
    template = chat_template_of(folder)
    assert template is not None
    return Chat(hg.load(folder), template, max_new_tokens=max_new_tokens, **options)  # type: ignore[arg-type]


def ask(chat: Chat, text: str) -> str:
    return "".join(chat.ask(text))


def test_answers_are_those_of_the_complete_text(chat: Chat) -> None:
    for question in ("hello", "and now?", "hello"):
        rendered = chat.template.render(
            [*chat.messages, {"role": "user", "content": question}], add_generation_prompt=True
        )
        expected = hg.generate(chat.model, rendered, 24, cache=False, format="raw")
        assert ask(chat, question) == expected
        assert chat.last is not None and chat.last.finish == "stop"
    roles = [message["role"] for message in chat.messages]
    assert roles == ["user", "assistant"] * 3
    assert "🙂" in chat.messages[1]["content"]


def test_a_piece_is_never_half_a_character(chat: Chat) -> None:
    pieces = list(chat.ask("hello"))
    assert "🙂" in pieces and "" in pieces and "\ufffd" not in "".join(pieces)


def test_a_turn_computes_its_own_tokens_only(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    real = chat.model.embeddings

    def embeddings(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        counted.append(len(ids))
        return real(ids, positions)

    monkeypatch.setattr(chat.model, "embeddings", embeddings)
    ask(chat, "hello")
    counted.clear()
    ask(chat, "and now?")
    assert chat.last is not None
    new_text = "\n[user]and now?\n[assistant]"
    assert sum(counted) <= len(new_text) + len(chat.last.ids)
    assert len(chat.last.prompt) > 2 * len(new_text)


def test_system_prompt_and_reset(chat: Chat) -> None:
    chat.system = "be brief"
    ask(chat, "hello")
    assert chat.last is not None
    assert chat.text.tokenizer.decode(chat.last.prompt).startswith("[system]be brief\n[user]hello\n")
    chat.reset()
    assert chat.messages == [] and chat.last is None and len(chat.conversation) == 1


def test_an_answer_that_is_stopped_stays_in_the_history(chat: Chat) -> None:
    pieces = chat.ask("hello")
    said = next(pieces) + next(pieces) + next(pieces)
    pieces.close()
    assert said and chat.messages[-1] == {"role": "assistant", "content": said}
    assert chat.last is not None and chat.last.finish == "cancelled"
    before = list(chat.messages)
    pieces = chat.ask("and now?")
    pieces.close()  # before the first token: nothing was answered
    assert chat.messages == before
    assert not chat._engine.busy
    assert ask(chat, "and now?")


def test_the_same_seed_gives_the_same_conversation(folder: Path) -> None:
    sampling = Sampling(1.5, seed=3)
    talks = []
    for how in (sampling, sampling, replace(sampling, seed=8)):
        chat = chat_with(folder, sampling=how)
        talks.append([ask(chat, question) for question in ("hello", "hello", "hello")])
    assert talks[0] == talks[1] != talks[2]


def test_old_turns_are_dropped_when_the_context_is_full(chat: Chat) -> None:
    chat.system = "be brief"
    dropped = 0
    for _ in range(6):
        ask(chat, "hello")
        dropped += chat.dropped
        assert chat.last is not None and len(chat.last.prompt) + 24 <= 128
        assert chat.text.tokenizer.decode(chat.last.prompt).startswith("[system]be brief\n[user]hello\n[assistant]")
    assert dropped and len(chat.messages) == 2 * (6 - dropped)
    before = list(chat.messages)
    with pytest.raises(
        hg.HandgradError, match=r"the message with the system prompt has .* tokens, and the context 128"
    ):
        chat.ask("x" * 120)
    assert chat.messages == before
    assert chat.why().messages[0]["content"] == "be brief"


def test_why_adds_up_the_tokens_of_words(chat: Chat) -> None:
    with pytest.raises(hg.HandgradError, match="ask something first"):
        chat.why()
    ask(chat, "hello")
    answer = ask(chat, "and now?")
    chat.system = "changed after the answer"
    why = chat.why()
    assert chat.last is not None and [m["content"] for m in why.messages][-2:] == ["and now?", answer]
    words = [(x.word.text, x.message) for x in why.words]
    assert words[0] == ("hello", 0) and ("and", 2) in words and ("now", 2) in words and ("?", 2) in words

    n = len(chat.last.prompt)
    ids = chat.last.prompt + chat.last.ids[:-1]  # without the end of the turn
    direct = hg.attribute(chat.model, ids, range(n, len(ids)))
    text = bytes(ids).decode()
    at = text.encode().index(b"and now?")
    spans = {"and": slice(at, at + 3), "now": slice(at + 4, at + 7)}
    for x in why.words:
        if x.message == 2 and x.word.text in spans:
            span = spans[x.word.text]
            assert x.strength == pytest.approx(direct.norms[span].norm().item(), rel=1e-5)
            assert x.score == pytest.approx(direct.scores[span].sum().item(), rel=1e-4, abs=1e-6)
    assert why.logprob == pytest.approx(direct.logprob)
    total = sum(x.strength**2 for x in why.words) + why.rest**2
    assert total == pytest.approx(float((direct.norms**2).sum()), rel=1e-5)
    assert sum(why.shares()) == pytest.approx(1)
    ranked = why.ranked(own=False)
    assert {x.message for x in ranked} == {0, 1, 2} and not any(x.word.is_sign for x in ranked)
    assert [x.strength for x in ranked] == sorted((x.strength for x in ranked), reverse=True)


def test_why_of_one_word(chat: Chat) -> None:
    answer = ask(chat, "hello")
    last = answer.split()[-1]
    why = chat.why(last.upper())
    assert chat.last is not None
    new = chat.last.ids[:-1]
    ids = chat.last.prompt + new
    direct = hg.attribute(chat.model, ids, range(len(ids) - len(last.encode()), len(ids)))
    assert why.logprob == pytest.approx(direct.logprob)
    assert {x.message for x in why.ranked(own=True)} == {0, 1}
    with pytest.raises(hg.HandgradError, match="no word 'hello'"):
        chat.why("hello")


def test_adapters_are_switched_at_run_time(folder: Path, tmp_path: Path) -> None:
    chat = chat_with(folder)
    write_chat_model(tmp_path / "base", seed=1, steps=0)
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for seed, (base, adapter) in enumerate(((folder, one), (folder, two), (tmp_path / "base", other)), 1):
        save_adapter(hg.load(base), adapter, seed, 0.2, modules_to_save=["model.norm"])
    plain = ask(chat, "hello")
    answers = []
    for adapter in (one, two):
        chat.attach(adapter)
        chat.reset()
        with pytest.raises(hg.HandgradError, match="ask something first"):
            chat.why()
        answers.append(ask(chat, "hello"))
        alone = hg.load(adapter)
        rendered = chat.template.render([{"role": "user", "content": "hello"}], add_generation_prompt=True)
        alone.text_source = str(folder)
        assert hg.generate(alone, rendered, 24, format="raw") == answers[-1]
        assert chat.why().words
    assert len({plain, *answers}) == 3
    with pytest.raises(hg.HandgradError, match="is an adapter of"):
        chat.attach(other)
    chat.reset()
    assert ask(chat, "hello") == answers[-1]  # the one in use stays
    chat.detach()
    chat.reset()
    assert ask(chat, "hello") == plain
    fresh = hg.load(folder).state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in chat.model.state_dict().items())

"""The server: the official client, exact log-probabilities, adapters by name."""

import http.client
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from tiny_server import expected_logprobs, open_tiny, post, write_models

import handgrad as hg
from conftest import handgrad
from handgrad.inference.attribution import attribute
from handgrad.serve.routes import Server

PROMPT = "To be, or not to be"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    made = Server(open_tiny(folder), api_key="secret")
    with made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}v1", api_key="secret", max_retries=0) as made:
        yield made


def network(folder: Path, name: str = "base") -> hg.GPT:
    model = hg.load(folder / "base")
    if name != "base":
        hg.lora.load(model, folder / name)
    return model


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["base", "one", "two"]
    assert client.models.retrieve("one").id == "one"
    with pytest.raises(openai.NotFoundError, match="no model 'three'; available: base, one, two"):
        client.models.retrieve("three")


@pytest.mark.parametrize("name", ["base", "one", "two"])
def test_completion_is_that_of_the_model_alone(client: openai.OpenAI, folder: Path, name: str) -> None:
    model = network(folder, name)
    found = client.completions.create(model=name, prompt=PROMPT, max_tokens=12, temperature=0)
    alone = hg.generate(model, PROMPT, 12, format="raw", details=True)
    assert found.choices[0].text == alone.text and found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(PROMPT), 12)  # type: ignore[union-attr]
    sampled = client.completions.create(
        model=name, prompt=PROMPT, max_tokens=12, temperature=0.9, top_p=0.8, seed=3, n=2,
        extra_body={"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1},
    )  # fmt: skip
    for i, choice in enumerate(sampled.choices):
        options = {"temperature": 0.9, "top_p": 0.8, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1}
        assert choice.text == hg.generate(model, PROMPT, 12, format="raw", seed=3 + i, **options)
    assert sampled.choices[0].text != sampled.choices[1].text


def test_chat_and_its_stream_agree(client: openai.OpenAI, folder: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    asked = {
        "model": "one", "messages": messages, "max_completion_tokens": 9, "temperature": 0.7, "seed": 1,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert text == hg.generate(
        network(folder, "one"), "s:Be brief.\nu:Hi\na:", 9, temperature=0.7, seed=1, format="raw"
    )
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[1].choices[0].delta.role is None
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage and chunks[0].usage is None
    streamed = [t for c in chunks[:-1] for t in (c.choices[0].logprobs.content or [])]
    assert streamed == whole.choices[0].logprobs.content and len(streamed) == 9
    assert all(len(t.top_logprobs) == 2 for t in streamed)
    plain = list(client.chat.completions.create(**{**asked, "logprobs": False, "top_logprobs": None}, stream=True))
    assert all(c.usage is None and c.choices for c in plain)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echoed_logprobs_are_exact(client: openai.OpenAI, folder: Path, max_tokens: int) -> None:
    """Prompts as texts and as ids, the first token without a log-probability, characters of several bytes."""
    texts = ["Once upon", "naïve €5"]
    for prompt in (texts, [list(text.encode()) for text in texts]):
        found = client.completions.create(
            model="base", prompt=prompt, max_tokens=max_tokens, temperature=0, echo=True, logprobs=3
        )
        for text, choice in zip(texts, found.choices, strict=True):
            assert choice.text.startswith(text)
            scores, ids = choice.logprobs, list(text.encode())
            assert scores is not None and len(scores.tokens) == len(ids) + max_tokens
            assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
            expected = expected_logprobs(network(folder), ids)
            for t in range(1, len(ids)):
                assert scores.token_logprobs[t] == pytest.approx(expected[t - 1, ids[t]].item(), abs=1e-10)
                top = scores.top_logprobs[t]
                best = expected[t - 1].topk(3).values.tolist()
                assert sorted(top.values())[-3:] == pytest.approx(best[::-1], abs=1e-10)
                assert scores.tokens[t] in top
            first_bytes = [len(text.encode()[:t].decode(errors="ignore")) for t in range(len(ids))]
            assert scores.text_offset[: len(ids)] == first_bytes
    assert scores.tokens[2:4] == ["bytes:\\xc3", "bytes:\\xaf"]


def test_stop_strings_end_text_and_logprobs(client: openai.OpenAI, folder: Path) -> None:
    whole = hg.generate(network(folder), PROMPT, 40, temperature=1.0, seed=5, format="raw")
    stop = whole[10:12]
    expected = whole[: whole.index(stop)]
    asked = {"model": "base", "prompt": PROMPT, "max_tokens": 40, "seed": 5, "stop": [stop, "never"], "logprobs": 0}
    found = client.completions.create(**asked).choices[0]
    assert found.text == expected and found.finish_reason == "stop"
    assert b"".join(_raw(token) for token in found.logprobs.tokens).decode(errors="replace") == expected
    chunks = [c.choices[0] for c in client.completions.create(**asked, stream=True)]
    assert "".join(c.text for c in chunks) == expected and chunks[-1].finish_reason == "stop"
    assert [t for c in chunks for t in c.logprobs.tokens] == found.logprobs.tokens
    assert [t for c in chunks for t in c.logprobs.text_offset] == found.logprobs.text_offset


def _raw(token: str) -> bytes:
    return (
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if token.startswith("bytes:") else token.encode()
    )


def test_attribution(server: Server, folder: Path) -> None:
    key = {"Authorization": "Bearer secret"}
    for name in ("base", "one"):
        status, found = post(server, "/v1/attribution", {"model": name, "prompt": "ab", "completion": "cd"}, key)
        assert status == 200, found
        expected = attribute(network(folder, name), list(b"abcd"), [2, 3])
        assert found["targets"] == [2, 3] and found["logprob"] == pytest.approx(expected.logprob, abs=1e-10)
        torch.testing.assert_close(
            torch.tensor([t["score"] for t in found["tokens"]]).double(), expected.scores.float().double()
        )
        assert [t["token"] for t in found["tokens"]] == list("abcd")
    status, found = post(server, "/v1/attribution", {"model": "base", "prompt": "abc", "targets": [9]}, key)
    assert status == 400 and found["error"]["param"] == "targets"


def test_wrong_key(server: Server) -> None:
    for key in ("wrong", "secre", "secret2", "sécret"):
        status, found = post(server, "/v1/completions", {}, {"Authorization": f"Bearer {key}"})
        assert status == 401 and found["error"]["code"] == "invalid_api_key"
    assert post(server, "/v1/completions", {}, {"Authorization": "Basic secret"})[0] == 401
    assert post(server, "/v1/completions", {}, {"Authorization": "bearer secret"})[0] == 400  # a scheme has no case


def test_loading_what_does_not_belong_together(folder: Path, tmp_path: Path) -> None:
    from tiny_server import SHAPE

    from conftest import make_model
    from handgrad.serve.served_models import open_models
    from handgrad.text import tokenizer

    hg.save(make_model(seed=9, **SHAPE), tmp_path / "same-shape")
    tokenizer.make("bytes", []).write(tmp_path / "same-shape")
    with pytest.raises(hg.HandgradError, match=r"is an adapter of .*, not of"):
        open_models(tmp_path / "same-shape", "x", {"one": folder / "one"})
    with pytest.raises(hg.HandgradError, match="not the folder of an adapter"):
        open_models(folder / "base", "x", {"one": folder / "base"})
    with pytest.raises(hg.HandgradError, match="both called"):
        open_models(folder / "base", "one", {"one": folder / "one"})


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str] = []

    def ask(server: Server) -> None:
        with server:
            body = {"model": "mine", "prompt": "a", "max_tokens": 3, "temperature": 0}
            answers.append(post(server, "/v1/completions", body)[1]["choices"][0]["text"])

    monkeypatch.setattr(Server, "run", ask)
    options = ["--model", folder / "base", "--adapter", f"mine={folder / 'one'}", "--port", 0, "--name", "large"]
    done = handgrad("serve", *options)
    assert done.returncode == 0 and answers == [hg.generate(network(folder, "one"), "a", 3)]
    assert done.stdout.startswith("large, mine\nhttp://127.0.0.1:") and "warning" not in done.stderr
    done = handgrad("serve", *options, "--host", "0.0.0.0")
    assert "warning: other machines can reach 0.0.0.0, without a key" in done.stderr
    assert handgrad("serve", *options, "--bits", 8).returncode == 0
    low_bit = hg.load(folder / "one", bits=8)
    low_bit.text_source = str(folder / "base")
    assert answers[-1] == hg.generate(low_bit, "a", 3)
    for wrong, reason in (
        (["--adapter", "x"], "write NAME=DIR"),
        (["--adapter", f"mine={folder / 'two'}"], "there is an adapter mine already"),
        (["--api-key", ""], "--api-key must have"),
        (["--host", "256.0.0.1"], "cannot listen"),
        (["--bits", 3], "bits must be 8 or 4, not 3"),
    ):
        done = handgrad("serve", *options, *wrong)
        assert done.returncode == 1 and reason in done.stderr, done.stderr


def test_every_request_is_a_line_of_the_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the command, on the standard error: who asked for what, and what it took; nothing of what was written."""
    body = {"model": "base", "prompt": "secret text", "max_tokens": 3}
    chat = {"model": "base", "messages": [{"role": "user", "content": "secret text"}], "max_tokens": 3}

    def ask(server: Server) -> None:
        with server:
            key = {"Authorization": "Bearer hidden"}
            post(server, "/v1/completions", body, key)
            connection = http.client.HTTPConnection("127.0.0.1", int(server.url.split(":")[-1][:-1]))
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps({**chat, "stream": True}),
                key | {"Content-Type": "application/json"},
            )
            connection.getresponse().read()
            connection.close()
            post(server, "/v1/completions", {**body, "top_k": 0}, key)
            post(server, "/v1/completions", body)
            post(server, "/v1/a%0Ab%1B[31m", {}, key)
            post(server, "/v1/embeddings", {"model": "base", "input": ["ab", "c"]}, key)

    monkeypatch.setattr(Server, "run", ask)
    done = handgrad("serve", "--model", folder / "base", "--port", 0, "--api-key", "hidden")
    lines = [line.split(" ", 2)[2] for line in done.stderr.splitlines()]
    assert [re.sub(r" [0-9.]+ s$", "", line) for line in lines] == [
        "127.0.0.1 POST /v1/completions 200 base 11+3 tokens",
        "127.0.0.1 POST /v1/chat/completions 200 base 16+3 tokens",
        "127.0.0.1 POST /v1/completions 400",
        "127.0.0.1 POST /v1/completions 401",
        "127.0.0.1 POST /v1/a b\\x1b[31m 404",
        "127.0.0.1 POST /v1/embeddings 200 base 3+0 tokens",
    ]
    assert "secret" not in done.stderr and "hidden" not in done.stderr
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d .* [0-9.]+ s", done.stderr.splitlines()[0])


def test_log_likelihoods_as_harnesses_read_them(folder: Path) -> None:
    """lm-eval asks for one more token and drops the last entry of the list: it is there even if that token ends the text."""
    model = network(folder)
    context, continuation = list(b"Once upon"), list(b" a")
    ids = context + continuation
    following = int(model.logits(torch.tensor([ids]))[0, -1].argmax())
    expected = expected_logprobs(model, ids)[len(context) - 1 :]
    total = sum(expected[t, i].item() for t, i in enumerate(continuation))
    opened = open_tiny(folder)
    for ends in (frozenset[int](), frozenset([following])):
        text = opened.text._replace(ends=ends)
        with Server(replace(opened, text=text)) as url, openai.OpenAI(base_url=f"{url}v1", api_key="none") as client:
            found = client.completions.create(
                model="base", prompt=[ids], max_tokens=1, temperature=0, logprobs=1, seed=1234, echo=True
            ).choices[0]
            chat = client.chat.completions.create(
                model="base", messages=[{"role": "user", "content": "x"}], logprobs=True, temperature=0, max_tokens=1
            ).choices[0]
        assert found.finish_reason == ("stop" if ends else "length")
        scores = found.logprobs
        assert sum(scores.token_logprobs[len(context) : -1]) == pytest.approx(total, abs=1e-10)
        greedy = [
            x == max(top.values()) for x, top in zip(scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True)
        ]
        best = expected_logprobs(model, [*ids, following]).argmax(1).tolist()
        assert greedy == [a == b for a, b in zip([*ids, following][1:], best, strict=True)] and greedy[-1]
        assert len(chat.logprobs.content) == 1

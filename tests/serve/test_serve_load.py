"""Many clients at once: some leave, some are stuck, some are too many; the others get what they would get alone."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from tiny_server import open_tiny, post, write_models

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.serve.routes import Limits, Server
from handgrad.serve.served_models import Models
from handgrad.web.connection import MAX_PER_ADDRESS

NAMES = ("base", "one", "two")
LONG = {"model": "base", "prompt": "ab", "max_tokens": 100_000, "seed": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return open_tiny(write_models(tmp_path_factory.mktemp("models")))


@contextlib.contextmanager
def serving(models: Models, **limits: Any) -> Iterator[Server]:
    made = Server(models, limits=Limits(**limits))
    with made:
        yield made


@pytest.fixture
def endless(models: Models, monkeypatch: pytest.MonkeyPatch) -> Models:
    """Sequences that end only when they are ended: the window slides."""
    from handgrad.inference import engine

    real = engine.Options
    monkeypatch.setattr("handgrad.serve.plans.Options", lambda *a, **k: real(*a, **k, context_full="slide"))
    return models


def until(condition: Callable[[], bool]) -> None:
    while not condition():  # pytest ends a test that hangs, with the stacks of all threads
        time.sleep(0.01)


def idle(server: Server) -> bool:
    runner = server.runner
    free = runner.count == 0 and not runner._jobs and not runner._owner and not runner.engine.busy
    return free and not runner.engine.kept


def cache_bytes(server: Server) -> int:
    """Bytes of all tensors that the cache refers to."""
    seen: dict[int, int] = {}
    todo: list[Any] = [server.runner.engine.cache, *server.runner.engine.sequences, *server.runner.engine.kept]
    visited: set[int] = set()
    while todo:
        x = todo.pop()
        if id(x) in visited or isinstance(x, torch.nn.Module):
            continue
        visited.add(id(x))
        if isinstance(x, torch.Tensor):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            todo += x.values()
        elif isinstance(x, list | tuple | set):
            todo += x
        elif hasattr(x, "__dict__"):
            todo += vars(x).values()
    return sum(seen.values())


def test_clients_that_leave_do_not_change_what_others_get(models: Models) -> None:
    """32 clients of three models, streams and whole answers, every fourth gone after its first pieces or at once."""

    def asked(i: int) -> dict[str, Any]:
        prompt = "Once upon a time, there was one " * (1 + i % 3) + str(i)
        return {"model": NAMES[i % 3], "prompt": prompt, "max_tokens": 20 + i % 7, "temperature": 0.8, "seed": i}

    async def client(made: openai.AsyncOpenAI, i: int) -> str | None:
        if i % 8 == 3:  # leaves before there is an answer
            with contextlib.suppress(openai.APITimeoutError):
                await made.completions.create(**{**asked(i), "max_tokens": 100}, timeout=0.05)
            return None
        if i % 2:
            text = ""
            stream = await made.completions.create(**asked(i), stream=True)
            async for chunk in stream:
                text += chunk.choices[0].text
                if i % 4 == 3 and len(text) > 2:
                    await stream.close()
                    return None
            return text
        return (await made.completions.create(**asked(i))).choices[0].text

    async def all_clients(url: str) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}v1", api_key="none", max_retries=0, timeout=120) as made:
            return await asyncio.gather(*(client(made, i) for i in range(32)))

    with serving(models, parallel=8, queue=64) as server:
        level = cache_bytes(server)
        with ThreadPoolExecutor(1) as pool:  # this thread may have a loop: a browser's, of an earlier test
            found = pool.submit(asyncio.run, all_clients(server.url)).result()
        until(lambda: idle(server))
        assert cache_bytes(server) == level
        for i, text in enumerate(found):
            if text is not None:
                alone = post(server, "/v1/completions", asked(i))[1]["choices"][0]["text"]
                assert text == alone, i
        assert sum(text is None for text in found) == 8
        until(lambda: idle(server))
        assert cache_bytes(server) == level


def test_alone_means_without_the_server(models: Models) -> None:
    with serving(models) as server:
        asked = {"model": "base", "prompt": "Once", "max_tokens": 15, "temperature": 0.8, "seed": 4}
        text = post(server, "/v1/completions", asked)[1]["choices"][0]["text"]
    model = hg.load(str(models.network.source))
    assert text == hg.generate(model, "Once", 15, temperature=0.8, seed=4, format="raw")


def open_stream(server: Server, body: dict[str, Any], buffer: int | None = None) -> socket.socket:
    """Send a request, and read nothing."""
    made = socket.socket()
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.connect(("127.0.0.1", int(server.url.split(":")[-1][:-1])))
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    made.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
    return made


def test_the_queue_has_a_limit_and_those_who_leave_it_free_it(endless: Models) -> None:
    with serving(endless, parallel=1, queue=2) as server:
        running = open_stream(server, {**LONG, "stream": True})
        waiting = open_stream(server, LONG)
        streaming = open_stream(server, {**LONG, "stream": True})
        until(lambda: server.runner.count == 3)
        status, found = post(server, "/v1/completions", LONG)
        assert status == 429 and found["error"]["code"] == "queue_full"
        status, found = post(server, "/v1/completions", {**LONG, "n": 4})
        assert status == 400 and found["error"]["param"] == "n"
        waiting.close()
        until(lambda: server.runner.count == 2)
        streaming.close()
        until(lambda: server.runner.count == 1)
        running.close()
        until(lambda: idle(server))
        assert post(server, "/v1/completions", {**LONG, "max_tokens": 2})[0] == 200


def test_a_stuck_client_holds_no_place(endless: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing: its request ends because too much is unread, long before any timeout."""
    monkeypatch.setattr("handgrad.serve.runner.MAX_UNREAD", 20)
    with serving(endless, parallel=1, queue=1) as server:
        stuck = open_stream(server, {**LONG, "stream": True, "logprobs": 20}, buffer=4096)
        until(lambda: server.runner.count == 1)
        until(lambda: idle(server))
        assert post(server, "/v1/completions", {**LONG, "max_tokens": 2})[0] == 200
        stuck.close()


def test_a_connection_that_is_not_read_is_closed(endless: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.web.connection.REQUEST_TIMEOUT", 0.3)
    monkeypatch.setattr("handgrad.serve.runner.MAX_UNREAD", 10**9)
    with serving(endless, parallel=1, queue=1) as server:
        stuck = open_stream(server, {**LONG, "stream": True, "logprobs": 20}, buffer=4096)
        until(lambda: server.runner.count == 1)
        until(lambda: idle(server))
        stuck.close()


ASK = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_OPEN = [
    b"",
    b"POST /v1/completions HT",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{",
]


@pytest.mark.parametrize("sent", HALF_OPEN, ids=["nothing", "part of the headers", "part of the body"])
def test_half_open_connections_shut_nobody_out(models: Models, sent: bytes) -> None:
    with serving(models) as server:
        held = [open_connection(server, sent) for _ in range(MAX_PER_ADDRESS)]
        for _ in range(3):
            assert post(server, "/v1/completions", {**LONG, "max_tokens": 2})[0] == 200
        for connection in held:
            connection.close()


def test_an_address_has_its_share_of_connections(endless: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run are not given up for new ones: the new one is closed, and other addresses have room."""
    monkeypatch.setattr("handgrad.web.connection.MAX_PER_ADDRESS", 2)
    with serving(endless) as server:
        streams = [open_stream(server, {**LONG, "stream": True}) for _ in range(2)]
        until(lambda: server.runner.count == 2)
        with open_connection(server, ASK) as refused, contextlib.suppress(ConnectionResetError):
            assert refused.recv(12) == b""
        with open_connection(server, ASK, "127.0.0.2") as elsewhere:
            assert elsewhere.recv(12) == b"HTTP/1.1 200"
        assert server.runner.count == 2
        for stream in streams:
            stream.close()


def test_headers_must_arrive_in_half_of_the_time(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr("handgrad.web.connection.REQUEST_TIMEOUT", 0.4)
    real = asyncio.BaseEventLoop.call_later
    monkeypatch.setattr(
        asyncio.BaseEventLoop,
        "call_later",
        lambda loop, wait, f, *a, **k: asked.append(wait) or real(loop, wait, f, *a, **k),
    )
    with serving(models) as server:
        half, body = open_connection(server, HALF_OPEN[1]), open_connection(server, HALF_OPEN[2])
        for connection in (half, body):
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(10) == b""
            connection.close()
    assert asked.count(0.2) == 3  # for the headers of both, and then for the body of one


def open_connection(server: Server, sent: bytes, address: str = "127.0.0.1") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", int(server.url.split(":")[-1][:-1])), source_address=(address, 0))
    with contextlib.suppress(ConnectionError):  # it may be closed already
        made.sendall(sent)
    return made


def test_time_is_limited(endless: Models) -> None:
    with serving(endless, timeout=0.3) as server:
        status, found = post(server, "/v1/completions", LONG)
        assert status == 504 and found["error"]["code"] == "timeout"
        client = openai.OpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.APIError, match="more than"):
            for _ in client.completions.create(**LONG, stream=True):
                pass
        assert idle(server)


def test_a_step_that_fails_ends_its_requests_only(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(models) as server:
        engine = server.runner.engine
        monkeypatch.setattr(engine, "step", lambda: (_ for _ in ()).throw(HandgradError("the logits are not finite")))
        status, found = post(server, "/v1/completions", {**LONG, "max_tokens": 5})
        assert status == 500 and "not finite" in found["error"]["message"]
        assert server.runner.engine is not engine
        assert post(server, "/v1/completions", {**LONG, "max_tokens": 5})[0] == 200


def test_stopping_ends_requests(endless: Models) -> None:
    with serving(endless, parallel=1, queue=1) as server:
        answers: list[int] = []

        def ask() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                answers.append(post(server, "/v1/completions", LONG)[0])

        client = threading.Thread(target=ask)
        client.start()
        until(lambda: server.runner.count == 1)
    client.join()
    assert not server.runner._thread.is_alive() and answers == [503]

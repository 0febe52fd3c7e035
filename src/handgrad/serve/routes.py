"""The routes of OpenAI's interface, `/v1/attribution`, which is ours, and `/health`. Every request is a line in the log.

By default only this machine can connect, and the Host must be ours: a page from elsewhere that is open in a browser on this
machine could otherwise reach the server. Bodies are limited in size and in the time they take to arrive (`web`), requests in
tokens, in time and in number (`runner.py`).
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import HandgradError, NonFiniteError, printable, shown
from ..web.connection import BackgroundServer
from . import plans
from .answers import Form, usage
from .api_errors import ApiError
from .attribution_route import attribution
from .embeddings_route import answer as embeddings_answer
from .embeddings_route import embeddings
from .plans import Plan
from .requests import ATTRIBUTION, CHAT, COMPLETION, EMBEDDINGS, parse
from .runner import Job, Runner
from .served_models import Models

log = logging.getLogger("handgrad.serve")
SEND_BUFFER = 65_536  # bytes that the system holds for a client that does not read
OUR_HOST = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


@dataclass(frozen=True)
class Limits:
    """What requests may use.

    parallel     sequences that are computed at once
    queue        sequences that wait
    max_tokens   new tokens of a sequence; None: as many as the context holds
    timeout      seconds that a request may take
    body         bytes of a request
    """

    parallel: int = 16
    queue: int = 64
    max_tokens: int | None = None
    timeout: float = 600.0
    body: int = 4_000_000


class Answer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()


def refusal(error: ApiError) -> Answer:
    return Answer(error.content(), error.status if error.status != 499 else 400)


class Guard:
    """Middleware: who may send a request, and how large it may be; and a line of log for each. It leaves `receive` alone,
    which tells of clients that go."""

    def __init__(self, app: ASGIApp, api_key: str | None, loopback: bool, body: int):
        self.app, self.loopback, self.body = app, loopback, body
        self.key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        facts: dict[str, Any] = {"status": 500}  # of the request, for the log
        scope["facts"], started = facts, time.monotonic()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = facts.get("refused", message["status"])
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        error = self._error(scope["method"], scope["path"], dict(scope["headers"]))
        app = self.app if error is None else refusal(error)
        try:
            await app(scope, receive, send_with_headers)
        finally:
            log.info(_line(scope, facts, time.monotonic() - started))

    def _error(self, method: str, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if self.loopback and not OUR_HOST.fullmatch(headers.get(b"host", b"")):
            return ApiError(421, "wrong Host: connect to 127.0.0.1 or localhost", code="wrong_host")
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if (
            self.key is not None
            and path != "/health"
            and not (scheme.lower() == b"bearer" and hmac.compare_digest(key, self.key))
        ):
            return ApiError(401, "wrong or missing API key: send Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self.body:
            return ApiError(413, f"the body may have {self.body:,} bytes at most", code="body_too_large")
        if method == "POST" and _media_type(headers) != b"application/json":
            return ApiError(415, "the body must be JSON (Content-Type: application/json)", code="wrong_content_type")
        return None


def _line(scope: Scope, facts: dict[str, Any], seconds: float) -> str:
    """127.0.0.1 POST /v1/completions 200 smollm2 12+48 tokens 1.24 s. Nothing of what the client or the model wrote."""
    who = scope["client"][0] if scope.get("client") else "-"
    asked = printable(f"{scope['method']} {scope['path']}", 120).replace("\n", " ").replace("\t", " ")
    model = f" {facts['model']}" if "model" in facts else ""
    tokens = f" {facts['prompt_tokens']}+{facts['new_tokens']} tokens" if "prompt_tokens" in facts else ""
    return f"{who} {asked} {facts['status']}{model}{tokens} {seconds:.2f} s"


def _media_type(headers: dict[bytes, bytes]) -> bytes:
    return headers.get(b"content-type", b"").split(b";")[0].strip().lower()


def make_app(models: Models, runner: Runner, limits: Limits, api_key: str | None, loopback: bool) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Guard, api_key=api_key, loopback=loopback, body=limits.body)
    texts = ThreadPoolExecutor(1, "text")  # tokenizing a long prompt must not hold up the others
    started = int(time.time())

    @app.exception_handler(ApiError)
    async def refused(request: Request, reason: ApiError) -> Response:
        request.scope["facts"]["refused"] = reason.status  # 499: the client has gone
        return refusal(reason)

    @app.exception_handler(HandgradError)
    async def mistake(request: Request, reason: HandgradError) -> Response:
        status = 500 if isinstance(reason, NonFiniteError) else 400  # broken weights are not the client's mistake
        return refusal(ApiError(status, reason))

    @app.exception_handler(HTTPException)
    async def absent(request: Request, reason: HTTPException) -> Response:
        return refusal(ApiError(reason.status_code, f"{request.method} {shown(request.url.path)}: {reason.detail}"))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, reason: ClientDisconnect) -> Response:
        return Response(status_code=400)  # the client has left

    @app.exception_handler(Exception)
    async def failed(request: Request, reason: Exception) -> Response:
        return refusal(ApiError(500, "the server has failed; its log has the reason"))

    async def body_of(request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limits.body:
                raise ApiError(413, f"the body may have {limits.body:,} bytes at most", code="body_too_large")
        return bytes(body)

    async def in_text_thread(f: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(texts, f, *arguments)

    async def respond(request: Request, table: Any, prepare: Callable[..., Plan]) -> Response:
        """Parse, let the sequences join, and answer at once or as a stream."""
        asked = parse(await body_of(request), table)
        given, n = len(asked.get("prompt", [0])), asked.get("n", 1)
        runner.check_number(given * n, "n" if n > 1 else "prompt")
        plan = await in_text_thread(prepare, models, limits.max_tokens, asked)
        job = runner.submit(plan.prompts, plan.options, plan.stop)
        facts = request.scope["facts"]
        facts |= {"model": asked["model"], "prompt_tokens": plan.prompt_tokens, "new_tokens": 0}
        if asked.get("stream"):
            return EventStream(plan, job, facts)
        async with watching(request.receive, job.leave):
            return Answer(await whole(plan, job, facts))

    async def call(request: Request, compute: Callable[[], Any]) -> Any:
        """Run a function of the model between two steps, unless the client goes."""
        task = asyncio.create_task(runner.call(compute))
        async with watching(request.receive, task.cancel):
            try:
                return await task
            except asyncio.CancelledError:
                raise ClientDisconnect from None

    @app.get("/health")
    async def health() -> Response:
        runner.check_alive()
        return Answer({"status": "ok"})

    @app.get("/v1/models")
    async def list_models() -> Response:
        return Answer({"object": "list", "data": [_model(name, started) for name in models.served]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        return Answer(_model(plans.served(models, name).name, started))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await respond(request, COMPLETION, plans.completion)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await respond(request, CHAT, plans.chat)

    @app.post("/v1/attribution")
    async def attribute(request: Request) -> Response:
        asked = parse(await body_of(request), ATTRIBUTION)
        request.scope["facts"]["model"] = asked["model"]
        return Answer(await call(request, await in_text_thread(attribution, models, asked)))

    @app.post("/v1/embeddings")
    async def embed(request: Request) -> Response:
        asked = parse(await body_of(request), EMBEDDINGS)
        texts, compute = await in_text_thread(embeddings, models, asked)
        facts = request.scope["facts"]
        facts |= {"model": asked["model"], "prompt_tokens": sum(map(len, texts)), "new_tokens": 0}
        deadline = time.monotonic() + limits.timeout
        vectors = []
        for ids in texts:  # one after another: sequences of others go on between them
            vectors.append(await call(request, partial(compute, ids)))
            runner.check_time(deadline)
        return Answer(embeddings_answer(asked, texts, vectors))

    return app


def _model(name: str, started: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": started, "owned_by": "handgrad"}


@asynccontextmanager
async def watching(receive: Receive, leave: Callable[[], object]) -> AsyncIterator[None]:
    """Within the context `leave` is called when the client goes; and when the context is left, for any reason."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        leave()


async def whole(plan: Plan, job: Job, facts: dict[str, Any]) -> dict[str, Any]:
    """The answer in one piece."""
    parts: list[list[Any]] = [["", []] for _ in plan.prompts]
    async for update in job:
        text, entries = plan.choices[update.which].add(update)
        parts[update.which][0] += text
        parts[update.which][1] += entries
        facts["new_tokens"] += update.piece.id is not None
    choices = [
        plan.form.choice(i, choice, text, entries)
        for i, ((text, entries), choice) in enumerate(zip(parts, plan.choices, strict=True))
    ]
    return plan.form.whole(choices, usage(plan.prompt_tokens, facts["new_tokens"]))


class EventStream(Response):
    """Server-sent events: one for every piece of text, then the usage if it is wanted, then [DONE]."""

    def __init__(self, plan: Plan, job: Job, facts: dict[str, Any]):
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.plan, self.job, self.facts = plan, job, facts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with watching(receive, self.job.leave):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events():
                await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[str]:
        plan, begun = self.plan, set[int]()
        form: Form = plan.form
        try:
            async for update in self.job:
                i, choice = update.which, plan.choices[update.which]
                self.facts["new_tokens"] += update.piece.id is not None
                text, entries = choice.add(update)
                if text or entries or choice.finish or i not in begun:
                    yield _json(form.event([form.delta(i, choice, text, entries, i not in begun)]))
                    begun.add(i)
            if form.usage_wanted:
                yield _json(form.event([], usage(plan.prompt_tokens, self.facts["new_tokens"])))
            yield "[DONE]"
        except ApiError as error:
            self.facts["status"] = error.status
            yield _json(error.content())


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False)


class Server(BackgroundServer):
    """Serves models: in the background inside `with Server(models) as url`, or in the foreground with `run()`."""

    def __init__(
        self,
        models: Models,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        limits: Limits | None = None,
    ):
        limits = limits or Limits()
        self.runner = Runner(
            models.network, models.text, parallel=limits.parallel, queue=limits.queue, timeout=limits.timeout
        )
        app = make_app(models, self.runner, limits, api_key, is_loopback(host))
        try:
            super().__init__(app, host, port, SEND_BUFFER)
        except HandgradError:
            self.runner.close()
            raise

    def stopping(self) -> None:
        self.runner.stop()

    def stopped(self) -> None:
        self.runner.close()


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""The page on this machine: loopback only, for this machine's own browser only.

A page from elsewhere that the browser has open could try to reach us. So the Host must be ours, whoever changes something
must come from our own page, and nothing is served but the few assets and the answers below. A request is bounded in size
and in the time it takes to arrive, and connections in number.
"""

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import HandgradError
from . import views
from .proof import Prover
from .session import Forgotten, Session
from .stations import Station
from .steps import take_step

ASSETS = {
    "style.css": "text/css",
    "data.js": "text/javascript",
    "drawing.js": "text/javascript",
    "map.js": "text/javascript",
    "station.js": "text/javascript",
    "flow.js": "text/javascript",
    "step.js": "text/javascript",
    "tour.js": "text/javascript",
    "page.js": "text/javascript",
}
MOST_BODY = 64_000  # bytes of a request; a sentence of 4,000 needs at most six times that in JSON
POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PATIENCE = 1.5  # seconds a question about a proof waits for the answer
MOST_HEADERS = 16_384  # bytes
MOST_CONNECTIONS = 128
ARRIVAL = 10.0  # seconds a request may take to arrive, body and all, and a client to take any of the answer
IDLE = 5  # seconds a connection stays open between two requests


def asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


class Sentence(BaseModel):
    text: str
    version: int = 0


class Step(BaseModel):
    id: str
    lr: float = Field(allow_inf_nan=False)
    optimizer: str = "SGD"


class Answer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(plain(content), ensure_ascii=False).encode("utf-8", "surrogatepass")


def plain(x: Any) -> Any:
    """JSON has no infinity and no NaN: they are null."""
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    return x


def make_app(session: Session, prover: Prover) -> FastAPI:
    worker = ThreadPoolExecutor(1, "explain")
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    Next = Callable[[Request], Awaitable[Response]]

    @app.middleware("http")
    async def guard(request: Request, go_on: Next) -> Response:
        refused = refusal(request)
        response = Answer({"error": refused[1]}, refused[0]) if refused else await go_on(request)
        if refused:
            response.headers["Connection"] = "close"  # a body that was not read would be taken for the next request
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-store"
        return response

    @app.exception_handler(HandgradError)
    async def mistake(request: Request, reason: HandgradError) -> Response:
        return Answer({"error": str(reason)}, 410 if isinstance(reason, Forgotten) else 400)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, reason: RequestValidationError) -> Response:
        where = ".".join(str(x) for x in reason.errors()[0]["loc"])
        return Answer({"error": f"the request is not understood: {where}: {reason.errors()[0]['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def absent(request: Request, reason: HTTPException) -> Response:
        return Answer({"error": str(reason.detail)}, reason.status_code)

    def pair(text: str) -> tuple[int, int]:
        try:
            low, high = (int(x) for x in text.split(":"))
        except ValueError:
            raise HandgradError(f"a range is written from:to, not {text[:40]!r}") from None
        return low, high

    async def compute(f: Callable[..., Any], *arguments: Any) -> Any:
        """On the one thread that computes: two at once would only take the cores and the memory from each other."""
        return await asyncio.get_running_loop().run_in_executor(worker, f, *arguments)

    async def read(f: Callable[[], Any]) -> Response:
        """For somebody who waits for it."""
        session.readers += 1
        try:
            return Answer(await compute(f))
        finally:
            session.readers -= 1
            session.read_at = time.monotonic()

    async def answer(view: Callable[..., Any], id: str, *about: Any) -> Response:
        return await read(lambda: view(session, session.find(id), *about))

    def station_of(name: str) -> Station:
        return views.find_station(session, name)

    @app.get("/")
    async def page() -> Response:
        return Response(asset("page.html"), media_type="text/html; charset=utf-8")

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return Response(status_code=204)

    @app.get("/assets/{name}")
    async def part(name: str) -> Response:
        if name not in ASSETS:
            raise HTTPException(404, "there is no such part of the page")
        return Response(asset(name), media_type=ASSETS[name])

    @app.get("/api/table")
    async def table() -> Response:
        return Answer(views.table(session))

    @app.post("/api/sentence")
    async def sentence(given: Sentence) -> Response:
        return await read(lambda: views.overview(session, session.look(given.text, given.version)))

    @app.get("/api/overview")
    async def overview(id: str) -> Response:
        return await answer(views.overview, id)

    @app.get("/api/station")
    async def station(id: str, station: str) -> Response:
        return await answer(views.at_station, id, station_of(station))

    @app.get("/api/head")
    async def head(id: str, block: int, head: int) -> Response:
        return await answer(views.at_head, id, block, head)

    @app.get("/api/lens")
    async def lens(id: str, station: str) -> Response:
        return await answer(views.lens, id, station_of(station))

    @app.get("/api/slice")
    async def part_of(id: str, name: str, rows: str, columns: str, head: int | None = None) -> Response:
        return await answer(views.slice_of, id, name, head, pair(rows), pair(columns))

    @app.get("/api/value")
    async def value(id: str, name: str, rows: str, columns: str, head: int | None = None) -> Response:
        return await answer(views.value_of, id, name, head, pair(rows), pair(columns))

    @app.get("/api/proof")
    async def proof(id: str, station: str) -> Response:
        about = station_of(station)
        return Answer(await run_in_threadpool(prover.ask, await compute(session.find, id), about, PATIENCE))

    @app.get("/api/proofs")
    async def proofs(id: str) -> Response:
        return Answer(await run_in_threadpool(prover.ask, await compute(session.find, id), None, PATIENCE))

    @app.post("/api/step")
    async def step(given: Step) -> Response:
        return await answer(take_step, given.id, given.lr, given.optimizer)

    return app


def refusal(request: Request) -> tuple[int, str] | None:
    """Why a request is turned away, if it is."""
    host = request.headers.get("host", "")
    name, _, port = host.partition(":")
    if name not in ("127.0.0.1", "localhost") or not (port.isdigit() or not port):
        return 421, "handgrad explain answers to 127.0.0.1 and localhost only"
    length = request.headers.get("content-length", "")
    if "transfer-encoding" in request.headers:
        return 411, "say how long the request is, with Content-Length"
    if request.method in ("GET", "HEAD"):
        return (413, "a request of this kind has no body") if length.strip("0") else None
    if request.headers.get("origin", f"http://{host}") != f"http://{host}":
        return 403, "this request comes from another page"
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        return 415, "send JSON"
    if not length.isdigit() or int(length) > MOST_BODY:
        return 413, f"a request may have {MOST_BODY:,} bytes"
    return None


class Connection(H11Protocol):
    """Closed if a request does not arrive in time, or if the client stops reading the answer."""

    _timer: asyncio.TimerHandle | None = None
    _unread = 0  # bytes of the answer at the last look

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(ARRIVAL, self._look)

    def _look(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or (unread and unread == self._unread):
            self.transport.abort()
            return
        self._unread = unread
        self._wait()


class Server:
    """The page, served until it is stopped: `with Server(session) as url`, or `run()` for as long as the process lives."""

    def __init__(self, session: Session, port: int = 0):
        self.prover = Prover(session)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
            self._socket.listen(128)  # whoever comes before the first answer waits for it
        except OSError as reason:
            self._socket.close()
            raise HandgradError(f"port {port} cannot be had ({reason.strerror}): choose another with --port") from None
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        config = uvicorn.Config(
            make_app(session, self.prover), log_level="warning", timeout_graceful_shutdown=2, http=Connection, ws="none",
            timeout_keep_alive=IDLE, h11_max_incomplete_event_size=MOST_HEADERS,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.prover.stop()

    def __enter__(self) -> str:
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        return self.url

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self.prover.stop()

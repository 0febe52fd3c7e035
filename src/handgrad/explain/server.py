"""The web server of the page: on 127.0.0.1 only, for browsers on this machine only.

Other users and programs of this machine can connect to it too, and a page from elsewhere that is open in the same browser
could try. So the page and every answer need the key that is part of the printed address; the page sends it as a header, not
as a cookie, because a cookie would also go to other servers on 127.0.0.1. The Host must be ours, requests that change
something must come from our own page, and only the assets and the answers below are served. Requests are limited in size and
in the time they take to arrive, connections in number.
"""

import asyncio
import json
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ..errors import HandgradError
from ..machine import trim_heap
from ..web.connection import BackgroundServer
from . import (
    attention_view,
    attribution_view,
    compare_view,
    follow,
    lens_view,
    neuron_view,
    swaps_view,
    values,
    views,
    what_if,
)
from .learn_routes import add_routes
from .objectives import objective_of, token_id
from .page_files import asset, served
from .predictions import predict
from .proof import Prover
from .session import ExpiredError, Session, TracedSentence
from .stations import Station
from .steps import take_step

MAX_BODY_BYTES = 64_000  # a sentence of 4,000 bytes needs at most six times that in JSON
KEY_HEADER = "X-Handgrad-Key"
POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PROOF_WAIT = 1.5  # seconds that a request for a proof waits for new results


class SentenceRequest(BaseModel):
    text: str
    version: int = 0
    objective: dict[str, int | str | None] = Field(default_factory=dict)  # see objectives.objective_of


class StepRequest(BaseModel):
    id: str
    lr: float = Field(allow_inf_nan=False)
    optimizer: str = "SGD"


class JSONAnswer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(nonfinite_to_null(content), ensure_ascii=False).encode("utf-8", "surrogatepass")


def nonfinite_to_null(x: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have, by null."""
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {key: nonfinite_to_null(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [nonfinite_to_null(value) for value in x]
    return x


def make_app(session: Session, prover: Prover, key: str) -> FastAPI:
    worker = ThreadPoolExecutor(1, "explain")
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    Next = Callable[[Request], Awaitable[Response]]

    @app.middleware("http")
    async def guard(request: Request, call_next: Next) -> Response:
        rejected = rejection(request, key)
        response = JSONAnswer({"error": rejected[1]}, rejected[0]) if rejected else await call_next(request)
        if rejected:
            response.headers["Connection"] = "close"  # else the unread body would be parsed as the next request
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-store"
        return response

    @app.exception_handler(HandgradError)
    async def mistake(request: Request, reason: HandgradError) -> Response:
        return JSONAnswer({"error": str(reason)}, 410 if isinstance(reason, ExpiredError) else 400)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, reason: RequestValidationError) -> Response:
        where = ".".join(str(x) for x in reason.errors()[0]["loc"])
        return JSONAnswer({"error": f"invalid request: {where}: {reason.errors()[0]['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def absent(request: Request, reason: HTTPException) -> Response:
        return JSONAnswer({"error": str(reason.detail)}, reason.status_code)

    def pair(text: str) -> tuple[int, int]:
        try:
            low, high = (int(x) for x in text.split(":"))
        except ValueError:
            raise HandgradError(f"invalid range {text[:40]!r}: write from:to, for example 0:16") from None
        return low, high

    def numbers(text: str | None) -> list[int] | None:
        if text is None:
            return None
        try:
            return [int(x) for x in text.split(",")]
        except ValueError:
            raise HandgradError(f"invalid list {text[:40]!r}: write 3,5,8") from None

    async def compute(f: Callable[..., Any], *arguments: Any) -> Any:
        """Run on the only compute thread: two at once would compete for cores and memory."""
        return await asyncio.get_running_loop().run_in_executor(worker, f, *arguments)

    async def respond(f: Callable[[], Any]) -> Response:
        """Compute a response, counted as an open request, so that the prover waits."""
        session.waiting_clients += 1
        try:
            return JSONAnswer(await compute(f))
        finally:
            session.waiting_clients -= 1
            session.last_response_at = time.monotonic()

    async def answer(view: Callable[..., Any], id: str, *about: Any) -> Response:
        return await respond(lambda: view(session, session.find(id), *about))

    def station_of(name: str) -> Station:
        return views.find_station(session, name)

    @app.get("/")
    async def page() -> Response:
        return Response(asset("page.html"), media_type="text/html; charset=utf-8")

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return Response(status_code=204)

    @app.get("/assets/{name}")
    async def page_asset(name: str) -> Response:
        if name not in served():
            raise HTTPException(404, "the page has no such asset")
        return Response(asset(name), media_type=served()[name])

    @app.get("/api/table")
    async def table() -> Response:
        return JSONAnswer(views.table(session))

    @app.get("/api/progress")
    async def progress() -> Response:
        return JSONAnswer({**session.progress.report(), "better": session.better})

    @app.post("/api/sentence")
    async def trace_sentence(body: SentenceRequest) -> Response:
        def trace() -> dict[str, Any]:
            objective = objective_of(session, body.text, body.version, body.objective)
            return views.overview(session, session.sentence(body.text, body.version, objective))

        return await respond(trace)

    @app.get("/api/token")
    async def token(text: str) -> Response:
        id = token_id(session, text)
        return JSONAnswer({"id": id, "word": session.token_text(id)})

    @app.post("/api/predict")
    async def predictions(body: SentenceRequest) -> Response:
        return await respond(lambda: predict(session, body.text, body.version))

    @app.get("/api/overview")
    async def overview(id: str) -> Response:
        return await answer(views.overview, id)

    @app.get("/api/station")
    async def station(id: str, station: str) -> Response:
        return await answer(views.at_station, id, station_of(station))

    @app.get("/api/head")
    async def head(id: str, block: int, head: int) -> Response:
        return await answer(attention_view.at_head, id, block, head)

    @app.get("/api/lens")
    async def lens(id: str, station: str) -> Response:
        return await answer(lens_view.lens, id, station_of(station))

    @app.get("/api/effects")
    async def effects(id: str) -> Response:
        return await answer(what_if.effects, id)

    @app.get("/api/what-if")
    async def change(
        id: str,
        kind: str,
        block: int,
        head: int | None = None,
        edge: int | None = None,
        neuron: int | None = None,
        row: int | None = None,
        column: int | None = None,
        error: bool = False,
    ) -> Response:
        def view(session: Session, sentence: TracedSentence) -> dict[str, Any]:
            where = {"head": head, "edge": edge, "neuron": neuron, "row": row, "column": column}
            place = what_if.place_of(session, sentence, kind, block, **where)
            return (what_if.what_if_error if error else what_if.what_if)(session, sentence, place)

        return await answer(view, id)

    @app.get("/api/attribution")
    async def attribution(
        id: str,
        position: int | None = None,
        word: int | None = None,  # token ids
        against: int | None = None,
        steps: int = attribution_view.STEPS,
    ) -> Response:
        return await answer(attribution_view.attribution, id, position, word, against, steps)

    @app.get("/api/follow")
    async def number(id: str, name: str, row: int, column: int, head: int | None = None) -> Response:
        return await answer(follow.follow, id, name, head, row, column)

    @app.get("/api/swaps")
    async def swaps(id: str, position: int) -> Response:
        return await answer(swaps_view.swaps_at, id, position)

    @app.get("/api/neurons")
    async def neurons(id: str, block: int, position: int | None = None) -> Response:
        return await answer(neuron_view.neurons, id, block, position)

    @app.get("/api/heads")
    async def heads(id: str) -> Response:
        return await answer(attention_view.all_heads, id)

    @app.get("/api/compare")
    async def compare(id: str, other: str, station: str | None = None) -> Response:
        def view(session: Session, sentence: TracedSentence) -> dict[str, Any]:
            beside = session.find(other)
            if station is None:
                return compare_view.compare(session, sentence, beside)
            return compare_view.compare_station(session, sentence, beside, station_of(station))

        return await answer(view, id)

    @app.get("/api/slice")
    async def part_of(id: str, name: str, rows: str, columns: str, head: int | None = None) -> Response:
        return await answer(values.slice_of, id, name, head, pair(rows), pair(columns))

    @app.get("/api/value")
    async def value(id: str, name: str, rows: str, columns: str, head: int | None = None) -> Response:
        return await answer(values.value_of, id, name, head, pair(rows), pair(columns))

    @app.get("/api/matrix")
    async def entries(
        id: str, name: str, head: int | None = None, rows: str | None = None, columns: str | None = None
    ) -> Response:
        return await answer(values.entries_of, id, name, head, numbers(rows), numbers(columns))

    @app.get("/api/proof")
    async def proof(id: str, station: str) -> Response:
        about = station_of(station)
        return JSONAnswer(await run_in_threadpool(prover.request, await compute(session.find, id), about, PROOF_WAIT))

    @app.get("/api/proofs")
    async def proofs(id: str) -> Response:
        return JSONAnswer(await run_in_threadpool(prover.request, await compute(session.find, id), None, PROOF_WAIT))

    @app.post("/api/step")
    async def step(body: StepRequest) -> Response:
        prover.release()
        response = await answer(take_step, body.id, body.lr, body.optimizer)
        await compute(trim_heap)  # the trace before the step is free only now
        return response

    add_routes(app, session, compute, JSONAnswer)
    return app


def rejection(request: Request, key: str) -> tuple[int, str] | None:
    """Return the status and the message if the request must be rejected."""
    host = request.headers.get("host", "")
    name, _, port = host.partition(":")
    if name not in ("127.0.0.1", "localhost") or not (port.isdigit() or not port):
        return 421, "wrong Host: open the page as 127.0.0.1 or localhost"
    length = request.headers.get("content-length", "")
    if "transfer-encoding" in request.headers:
        return 411, "send a Content-Length instead of Transfer-Encoding"
    path = request.url.path
    given = request.query_params.get("key", "") if path == "/" else request.headers.get(KEY_HEADER, "")
    open_to_all = path.startswith("/assets/") or path == "/favicon.ico"  # the same files for everyone
    if not open_to_all and not secrets.compare_digest(given.encode(), key.encode()):
        return (
            403,
            "the key is missing or old: open the address that handgrad explain printed, with all that follows ?key=",
        )
    if request.method in ("GET", "HEAD"):
        return (413, "GET and HEAD requests must not have a body") if length.strip("0") else None
    if request.headers.get("origin", f"http://{host}") != f"http://{host}":
        return 403, "requests from other pages are not allowed"
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        return 415, "the body must be JSON (Content-Type: application/json)"
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        return 413, f"the request must have a Content-Length of at most {MAX_BODY_BYTES:,} bytes"
    return None


class Server(BackgroundServer):
    """Serves the page: in the background inside `with Server(session) as url`, or in the foreground with `run()`.

    The url contains the key without which nothing is answered."""

    def __init__(self, session: Session, port: int = 0):
        self.prover = Prover(session)
        self.key = secrets.token_urlsafe(24)
        super().__init__(make_app(session, self.prover, self.key), port=port)
        self.url += f"?key={self.key}"

    def stopped(self) -> None:
        self.prover.stop()

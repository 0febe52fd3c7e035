"""The web server of the page: on 127.0.0.1 only, for browsers on this machine only.

Other users and programs of this machine can connect to it too, and a page from elsewhere that is open in the same browser
could try. So the page and every answer need the key that is part of the printed address; the page sends it as a header, not
as a cookie, because a cookie would also go to other servers on 127.0.0.1. The Host must be ours, requests that change
something must come from our own page, and only the assets and the answers below are served. Requests are limited in size and
in the time they take to arrive, connections in number.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from inspect import Parameter, Signature
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, create_model
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ..errors import HandgradError
from ..machine import trim_heap
from ..web.connection import BackgroundServer
from .course import BusyError, Judge
from .json_numbers import as_json
from .page_files import asset
from .page_files import served as served_files
from .proofs.prover import Prover
from .routes import ROUTES, Route, Served
from .session.session import ExpiredError, Session

MAX_BODY_BYTES = 64_000  # a sentence of 4,000 bytes needs at most six times that in JSON
STATUS: dict[type[HandgradError], int] = {ExpiredError: 410, BusyError: 429}  # any other mistake: 400
KEY_HEADER = "X-Handgrad-Key"
POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class JSONAnswer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(as_json(content), ensure_ascii=False).encode("utf-8", "surrogatepass")


def make_app(session: Session, prover: Prover, key: str) -> FastAPI:
    worker = ThreadPoolExecutor(1, "explain")
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    Next = Callable[[Request], Awaitable[Response]]

    @app.middleware("http")
    async def guard(request: Request, call_next: Next) -> Response:
        rejected = rejection(request, key)
        response = JSONAnswer({"error": rejected[1]}, rejected[0]) if rejected else await call_next(request)
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-store"
        return response

    @app.exception_handler(HandgradError)
    async def mistake(request: Request, reason: HandgradError) -> Response:
        return JSONAnswer({"error": str(reason)}, STATUS.get(type(reason), 400))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, reason: RequestValidationError) -> Response:
        where = ".".join(str(x) for x in reason.errors()[0]["loc"])
        return JSONAnswer({"error": f"invalid request: {where}: {reason.errors()[0]['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def absent(request: Request, reason: HTTPException) -> Response:
        return JSONAnswer({"error": str(reason.detail)}, reason.status_code)

    @app.get("/")
    async def page() -> Response:
        return Response(asset("page.html"), media_type="text/html; charset=utf-8")

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return Response(status_code=204)

    @app.get("/assets/{name:path}")
    async def page_asset(name: str) -> Response:
        if name not in served_files():
            raise HTTPException(404, "the page has no such asset")
        return Response(asset(name), media_type=served_files()[name])

    served = Served(session, prover, Judge())
    for route in ROUTES.values():
        answer = _answerer(route, served, worker)
        app.add_api_route(f"/api/{route.name}", answer, methods=["POST" if route.post else "GET"], response_model=None)
    return app


def _answerer(route: Route, served: Served, worker: Executor) -> Callable[..., Awaitable[Response]]:
    """The function behind a URL, with the parameters of the route as FastAPI reads them."""

    async def compute(f: Callable[..., Any], *arguments: Any) -> Any:
        """Run on the only compute thread: two at once would compete for cores and memory."""
        return await asyncio.get_running_loop().run_in_executor(worker, f, *arguments)

    async def answer(**given: Any) -> Response:
        if route.beside:
            return JSONAnswer(await run_in_threadpool(route.answer, served, given))
        session = served.session
        session.waiting_clients += 1  # the prover waits meanwhile
        try:
            return JSONAnswer(await compute(route.answer, served, given))
        finally:
            session.waiting_clients -= 1
            session.last_response_at = time.monotonic()
            if route.trims:
                await compute(trim_heap)

    parameters = route.parameters()
    if not route.post:
        answer.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return answer
    fields: dict[str, Any] = {
        p.name: (p.annotation, ... if p.default is Parameter.empty else p.default) for p in parameters
    }
    body = Parameter("body", Parameter.KEYWORD_ONLY, annotation=create_model(route.name, **fields))

    async def answer_body(body: BaseModel) -> Response:
        return await answer(**{name: getattr(body, name) for name in fields})

    answer_body.__signature__ = Signature([body])  # type: ignore[attr-defined]
    return answer_body


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

"""The web server: what it serves and what it rejects."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny_session import TEXT, make_session

from handgrad.errors import HandgradError
from handgrad.explain_page.page_files import served
from handgrad.explain_page.server import Server
from handgrad.web.connection import MAX_PER_ADDRESS

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(make_session(n_blocks=1))
    with made:
        yield made


def call(
    server: Server, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server._socket.getsockname()[1])
    raw = json.dumps(body).encode() if isinstance(body, dict) else body
    sent = headers or (JSON if method == "POST" else {})
    connection.request(method, path, raw, {"X-Handgrad-Key": server.key, **sent})
    answer = connection.getresponse()
    text = answer.read().decode()
    kind = answer.headers.get("content-type", "")
    found = json.loads(text) if "json" in kind else text
    connection.close()
    return answer.status, found, dict(answer.headers)


def sentence(server: Server, text: str = TEXT) -> dict[str, Any]:
    status, found, _ = call(server, "POST", "/api/sentence", {"text": text})
    assert status == 200, found
    return found


def test_the_page_and_its_assets(server: Server) -> None:
    status, page, headers = call(server, "GET", f"/?key={server.key}")
    assert status == 200 and "handgrad" in page
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert "unsafe" not in headers["content-security-policy"] and "http" not in page
    for name in served():
        status, text, headers = call(server, "GET", f"/assets/{name}")
        assert status == 200 and text and "http://" not in text.replace("http://www.w3.org/", ""), name
        assert "innerHTML" not in text and "eval(" not in text


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/", None, {"Host": "evil.example"}, 421),
        ("GET", "/", None, {"Host": "evil.example:80"}, 421),
        ("GET", "/", None, {"Host": "127.0.0.1.evil.example"}, 421),
        ("GET", "/api/table", None, {"Host": "localhost:evil"}, 421),
        ("POST", "/api/sentence", {"text": TEXT}, {**JSON, "Origin": "http://evil.example"}, 403),
        ("POST", "/api/sentence", {"text": TEXT}, {**JSON, "Origin": "null"}, 403),
        ("POST", "/api/step", {"id": "x", "lr": 1}, {**JSON, "Origin": "https://127.0.0.1"}, 403),
        ("POST", "/api/sentence", b'{"text": "to be"}', {"Content-Type": "text/plain"}, 415),
        ("POST", "/api/sentence", {"text": "x" * 100_000}, None, 413),
        ("POST", "/api/sentence", {"text": "x" * 5_000}, None, 400),
        ("POST", "/api/sentence", b"{", None, 422),
        ("POST", "/api/sentence", {"text": 5}, None, 422),
        ("POST", "/api/sentence", {"text": TEXT, "version": 7}, None, 410),
        ("POST", "/api/sentence", b'{"text": "\\ud800 to be"}', None, 400),
        ("POST", "/api/step", {"id": "nonsense", "lr": 1}, None, 410),
        ("POST", "/api/step", b'{"id": "x", "lr": NaN}', None, 422),
        ("GET", "/assets/../server.py", None, None, 404),
        ("GET", "/assets/..%2fserver.py", None, None, 404),
        ("GET", "/assets/%2e%2e%2f%2e%2e%2fcli.py", None, None, 404),
        ("GET", "/assets//etc/passwd", None, None, 404),
        ("GET", "/etc/passwd", None, None, 404),
        ("GET", "/openapi.json", None, None, 404),
        ("GET", "/api/station?id=nonsense&station=a_1", None, None, 410),
        ("DELETE", "/api/table", None, {**JSON, "Content-Length": "0"}, 405),
    ],
)
def test_rejected_requests(
    server: Server, method: str, path: str, body: Any, headers: dict[str, str] | None, status: int
) -> None:
    found, answer, _ = call(server, method, path, body, headers)
    assert found == status
    assert "Traceback" not in str(answer) and answer


def test_invalid_parameters_get_an_error_message(server: Server) -> None:
    id = sentence(server)["id"]
    for about in [
        "station?station=nonsense", "head?block=9&head=0", "head?block=0&head=-1", "lens?station=a_0",
        "slice?name=a_11&rows=0:3&columns=9:2", "slice?name=a_11&rows=x&columns=0:1",
        "value?name=delta_x&rows=0:1&columns=0:1", "slice?name=blocks.0.sent&rows=0:1&columns=0:1",
        "matrix?name=a_11&rows=x", "matrix?name=a_11&columns=3,999", "matrix?name=x.sent&head=0",
    ]:  # fmt: skip
        status, found, _ = call(server, "GET", f"/api/{about}&id={id}")
        assert status == 400 and found["error"], about


def test_html_in_a_sentence_is_text(server: Server) -> None:
    found = sentence(server, '<img src=x onerror="alert(1)">')
    assert "".join(t["label"] for t in found["tokens"]) == '<img src=x onerror="alert(1)">'


def test_eight_clients_at_once(server: Server) -> None:
    def client(i: int) -> float:
        id = sentence(server, f"client number {i}")["id"]
        for about in ("station?station=a_11", "head?block=0&head=2", "proof?station=a_11", "lens?station=a_1"):
            status, found, _ = call(server, "GET", f"/api/{about}&id={id}")
            assert status == 200, found
        status, found, _ = call(server, "POST", "/api/step", {"id": id, "lr": 0.01})
        assert status == 200, found
        return found["measured"] - found["loss"]

    with ThreadPoolExecutor(8) as clients:
        assert all(change < 0 for change in clients.map(client, range(8)))


def test_a_port_that_is_taken(server: Server) -> None:
    server_port = server._socket.getsockname()[1]
    with pytest.raises(HandgradError, match="choose another with port"):
        Server(make_session(n_blocks=1), server_port)


@pytest.mark.parametrize("key", ["", "guess", "é", None])
def test_without_the_key_of_the_address_nothing_is_answered(server: Server, key: str | None) -> None:
    """Another user of the machine can connect as well."""
    headers = {"X-Handgrad-Key": (server.key[:-1] if key is None else key).encode("utf-8").decode("latin-1")}
    routes = [(method, route.path) for route in server._server.config.app.routes for method in route.methods]  # type: ignore[union-attr]
    assert ("GET", "/api/learn") in routes and ("POST", "/api/learn/grade") in routes and len(routes) > 20
    for method, path in routes:
        if path in ("/assets/{name:path}", "/favicon.ico"):
            continue
        body = {} if method == "POST" else None
        status, found, _ = call(server, method, path, body, {**headers, **(JSON if method == "POST" else {})})
        assert (status, list(found)) == (403, ["error"]) and "address that handgrad explain printed" in found[
            "error"
        ], path
        assert server.key not in str(found)
    assert call(server, "GET", "/")[0] == 403, "a header does not open the page"
    assert call(server, "GET", f"/api/learn?key={server.key}", None, headers)[0] == 403
    status, found, sent = call(server, "GET", f"/?key={server.key}", None, headers)
    assert status == 200 and server.key not in found and "set-cookie" not in sent
    assert call(server, "GET", f"/?key={server.key}&key=", None, headers)[0] == 403


def test_it_listens_on_loopback_only(server: Server) -> None:
    assert server._socket.getsockname()[0] == "127.0.0.1"


# ── misbehaving clients ────────────────────────────────────────────────────────────────────────


def connect(server: Server, *parts: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server._socket.getsockname()[1]), timeout=30)
    for part in parts:
        made.sendall(part.replace(b"KEY", server.key.encode()))
    return made


HEAD = b"POST /api/sentence HTTP/1.1\r\nHost: localhost\r\nX-Handgrad-Key: KEY\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "head",
    [HEAD, HEAD + b"Content-Length: 10\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n"],
    ids=["post", "post with a length", "get"],
)
def test_a_body_without_a_length_is_rejected_unread(server: Server, head: bytes) -> None:
    client = connect(server, head + b"Transfer-Encoding: chunked\r\n\r\n")
    sent = 0
    try:
        for _ in range(600):
            client.sendall(b"f4240\r\n" + b"x" * 1_000_000 + b"\r\n")
            sent += 1
    except OSError:
        pass
    assert sent < 50, "megabytes were taken"
    client.close()
    client = connect(server, head + b"Transfer-Encoding: chunked\r\n\r\n")
    assert b" 411 " in client.recv(1000)
    client.close()


def test_a_large_body_is_refused_before_it_has_arrived_and_is_not_the_next_request(server: Server) -> None:
    """Closing the connection instead would reset it, and the client could lose the answer."""
    body = HEAD.replace(b"KEY", b"") * 1000
    client = connect(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(body), body[: len(body) // 2])
    answer = http.client.HTTPResponse(client)
    answer.begin()
    assert answer.status == 413 and "at most 64,000 bytes" in json.loads(answer.read())["error"]
    client.sendall(body[len(body) // 2 :])
    client.sendall(
        b"GET /api/table HTTP/1.1\r\nHost: localhost\r\nX-Handgrad-Key: " + server.key.encode() + b"\r\n\r\n"
    )
    answer = http.client.HTTPResponse(client)
    answer.begin()
    assert answer.status == 200 and json.loads(answer.read())
    client.close()


def test_a_get_has_no_body(server: Server) -> None:
    assert call(server, "GET", "/api/table", b"x" * 10)[0] == 413
    assert call(server, "GET", "/api/table", None, {"Content-Length": "0"})[0] == 200


@pytest.mark.parametrize("parts", [[], [b"GET / HT"], [HEAD], [HEAD + b"Content-Length: 50\r\n\r\n", b'{"te']], ids=str)
def test_an_incomplete_request_closes_its_connection(
    server: Server, parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handgrad.web.connection.REQUEST_TIMEOUT", 0.5)
    client = connect(server, *parts)
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(100) == b""
    client.close()


def test_a_slow_request_closes_its_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.web.connection.REQUEST_TIMEOUT", 0.5)
    client = connect(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n")
    with pytest.raises(OSError):
        for i in range(600):
            client.sendall(f"X-{i}: y\r\n".encode())
            time.sleep(0.05)
    client.close()


def test_a_slow_response_is_not_cut_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.web.connection.REQUEST_TIMEOUT", 0.05)
    late = "handgrad.explain_page.session.progress.Progress.report"
    monkeypatch.setattr(late, lambda self, better: time.sleep(1) or {"late": True})
    assert call(server, "GET", "/api/progress")[1] == {"late": True}


def test_connections_are_limited(server: Server) -> None:
    idle = [connect(server) for _ in range(MAX_PER_ADDRESS + 20)]
    closed = 0
    for client in idle[:10]:  # the oldest have given way
        try:
            closed += client.recv(10) == b""
        except ConnectionResetError:
            closed += 1
    assert closed == 10
    assert call(server, "GET", f"/?key={server.key}")[0] == 200  # the others are open, and keep nobody out
    for client in idle:
        client.close()


@pytest.mark.parametrize("body", ["[" * 60_000, '{"text": ' * 7_000, '{"text": "a", "version": ' + "9" * 5_000 + "}"])
def test_malicious_json_gets_an_error_message(server: Server, body: str) -> None:
    status, answer, _ = call(server, "POST", "/api/sentence", body.encode())
    assert status in (400, 422) and answer["error"]

"""A uvicorn server whose connections are bounded in number, in all and per address, in the time a request takes to arrive,
and in the time a client takes to read."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import HandgradError, option

MAX_HEADER_BYTES = 16_384
MAX_CONNECTIONS = 256
MAX_PER_ADDRESS = 128  # connections of one client's address
REQUEST_TIMEOUT = 10.0  # seconds for a request to arrive, its headers in half of it, and for a client to read some more
MAX_DISCARDED_BYTES = 8_000_000  # of a body whose request was answered before it had arrived
KEEP_ALIVE = 5  # seconds that a connection stays open between requests


class BoundedConnection(H11Protocol):
    """A connection that is closed if a request does not arrive in time or the client stops reading the response. If there
    are too many, the one that has waited longest without a complete request gives way to the new one: connections that
    send nothing keep no other client out.

    A refused request is answered before its body has arrived. The rest of the body is read and discarded: closing a socket
    with unread data resets the connection, and the client would lose the answer."""

    _timer: asyncio.TimerHandle | None = None
    _unread = 0  # bytes of the response that were unread at the last check
    _waits_since = 0.0
    _discarded = 0  # bytes of a body after the answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()
        open_ones = [x for x in self.connections if isinstance(x, BoundedConnection) and not x.transport.is_closing()]
        same = [x for x in open_ones if x._address == self._address]
        if len(same) > MAX_PER_ADDRESS:
            _close_one(same, self)
        elif len(open_ones) > MAX_CONNECTIONS:
            _close_one(open_ones, self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._discarded = 0
        self._begin()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._discarded += len(data)
            if self._discarded > MAX_DISCARDED_BYTES:
                self.transport.abort()

    @property
    def _address(self) -> str | None:
        return None if self.client is None else self.client[0]

    @property
    def _incomplete(self) -> bool:
        """Whether its next request has not arrived."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _begin(self) -> None:
        """Wait for a request."""
        self._waits_since = self.loop.time()
        self._start_timer(REQUEST_TIMEOUT / 2, self._check_headers)

    def _start_timer(self, seconds: float, check: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, check)

    def _check_headers(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()
        else:
            self._start_timer(REQUEST_TIMEOUT / 2, self._check)

    def _check(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if self._incomplete or (unread and unread == self._unread):
            self.transport.abort()
            return
        self._unread = unread
        self._start_timer(REQUEST_TIMEOUT, self._check)


def _close_one(among: list[BoundedConnection], new: BoundedConnection) -> None:
    """Close the connection whose request is overdue for longest, or the new one if all others have sent theirs."""
    waiting = [x for x in among if x._incomplete and x is not new]
    min(waiting, key=lambda x: x._waits_since, default=new).transport.abort()


class _Server(uvicorn.Server):
    """Tells its owner before it waits for open requests to end."""

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None]):
        super().__init__(config)
        self._stopping = stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        await super().shutdown(sockets)


class BackgroundServer:
    """Serves an application: in the background inside `with server as url`, or in the foreground with `run()`."""

    def __init__(self, app: Any, host: str = "127.0.0.1", port: int = 0, send_buffer: int | None = None):
        """send_buffer   bytes that the system holds for a client that does not read"""
        self._socket = listen(host, port)
        if send_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}/"
        config = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=2, http=BoundedConnection,
            ws="none", timeout_keep_alive=KEEP_ALIVE, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )  # fmt: skip
        self._server = _Server(config, self.stopping)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.stopped()

    def stopping(self) -> None:
        """Called when the server is about to end: let open requests end. Must not wait."""

    def stopped(self) -> None:
        """Called when the server has ended: end what belongs to it."""

    def __enter__(self) -> str:
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        return self.url

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self.stopped()


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections; clients that connect before the server runs wait."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(128)
    except OSError as reason:
        made.close()
        where = f"port {port}" if host == "127.0.0.1" else f"{host}, port {port}"
        raise HandgradError(
            f"cannot listen on {where} ({reason.strerror}): choose another with {option('port')}"
        ) from None
    return made

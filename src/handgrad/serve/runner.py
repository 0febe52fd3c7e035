"""The thread that owns the engine. Requests come from the event loop; their pieces go back to it as they are computed.

    job = runner.submit(prompts, options, stop)      raises if too many sequences wait
    async for update in job: ...                     one for every new token of every sequence of the request
    job.leave()                                      the client has gone: its sequences end before the next step

A sequence counts from `submit` until it ends. A request that takes longer than its time, or whose client reads too slowly,
is ended here, whether it waits or runs: a client that is stuck holds no place.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import HandgradError
from ..inference.engine import Engine, Options
from ..inference.engine import Sequence as EngineSequence
from ..inference.model_text import ModelText
from ..inference.text_batch import Piece, Writer
from ..model.gpt import GPT
from .api_errors import ApiError

log = logging.getLogger("uvicorn.error")
MAX_UNREAD = 1024  # tokens of a sequence that its client has not taken


class Update(NamedTuple):
    """One more token of sequence `which` of a request."""

    which: int
    piece: Piece
    sequence: EngineSequence


@dataclass(eq=False)
class Job:
    """The sequences of one request."""

    runner: "Runner"
    prompts: list[list[int]]
    options: list[Options]
    stop: Sequence[str]
    deadline: float
    loop: asyncio.AbstractEventLoop
    updates: "asyncio.Queue[Update | ApiError]" = field(default_factory=asyncio.Queue)
    writers: list[Writer] = field(default_factory=list)
    left: int = 0  # sequences that have not ended
    sent: int = 0  # updates, counted by the runner's thread
    taken: int = 0  # updates, counted by the event loop
    gone: bool = False

    def leave(self) -> None:
        """The client does not want the rest. From the event loop, at any time."""
        if not self.gone:
            self.gone = True
            self.updates.put_nowait(ApiError(499, "the client has closed the connection"))
            self.runner.wake()

    async def __aiter__(self) -> AsyncIterator[Update]:
        """The updates until every sequence has ended. Raises ApiError if the request fails."""
        left = len(self.prompts)
        while left:
            update = await self.updates.get()
            if isinstance(update, ApiError):
                raise update
            self.taken += 1
            left -= update.piece.finish is not None
            yield update

    def send(self, update: Update | ApiError) -> None:
        """From the runner's thread."""
        self.sent += 1
        try:
            self.loop.call_soon_threadsafe(self.updates.put_nowait, update)
        except RuntimeError:  # the event loop has ended
            self.gone = True


class Runner:
    """Runs requests on one engine.

    parallel      most sequences that are computed at once
    queue         most sequences that wait
    timeout       seconds that a request may take
    """

    def __init__(self, model: GPT, text: ModelText, *, parallel: int, queue: int, timeout: float):
        self.model, self.text, self.parallel = model, text, parallel
        self.capacity, self.timeout = parallel + queue, timeout
        self.engine = Engine(model, max_running=parallel)
        self.count = 0  # sequences that wait or run
        self._jobs: list[Job] = []  # in the engine
        self._new: list[Job] = []
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._owner: dict[EngineSequence, tuple[Job, int]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, prompts: list[list[int]], options: list[Options], stop: Sequence[str]) -> Job:
        """Let a request wait for its turn. From the event loop."""
        n = len(prompts)
        deadline = time.monotonic() + self.timeout
        job = Job(self, prompts, options, stop, deadline, asyncio.get_running_loop(), left=n)
        with self._changed:
            self._take(n)
            self._new.append(job)
            self._changed.notify()
        return job

    async def call(self, compute: Callable[[], Any]) -> Any:
        """Run a function of the model between two steps."""
        future: Future[Any] = Future()
        with self._changed:
            self._take(1)
            future.add_done_callback(lambda _: self._release(1))
            self._calls.append((compute, future))
            self._changed.notify()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self.timeout)
        except TimeoutError:
            raise self._too_long() from None

    def _too_long(self) -> ApiError:
        limit = f"the request has taken more than {self.timeout:g} seconds"
        return ApiError(504, f"{limit}: ask for fewer tokens", code="timeout")

    def check_time(self, deadline: float) -> None:
        """Raise if a request has taken too long."""
        if time.monotonic() > deadline:
            raise self._too_long()

    def check_alive(self) -> None:
        """Raise if requests will not be answered."""
        if self._closed or not self._thread.is_alive():
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def stop(self) -> None:
        """End all requests before the next step, then the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        self._thread.join()

    def check_number(self, n: int, param: str) -> None:
        """Raise if a request has more sequences than can ever wait."""
        if n > self.capacity:
            most = f"and the server takes {self.capacity} at a time: send several requests"
            raise ApiError(400, f"the request has {n:,} sequences, {most}", param, "too_many")

    def _take(self, n: int) -> None:
        """Count sequences that wait or run. The caller holds the lock, so that the thread does not end in between."""
        if self._closed:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self.count + n > self.capacity:
            raise ApiError(429, "the server is busy: too many requests wait; try again later", code="queue_full")
        self.count += n

    def _release(self, n: int) -> None:
        with self._changed:
            self.count -= n

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._new or self._calls or self._jobs or self._closed):
                    self._changed.wait()
                new, self._new = self._new, []
                calls, self._calls = self._calls, []
                closed = self._closed
            for job in new:
                self._join(job)
            for compute, future in calls:
                _answer(compute, future)
            self._sweep(closed)
            if closed:
                self.engine.close()
                return
            try:
                self._step()
            except Exception as reason:
                self._fail(reason)

    def _join(self, job: Job) -> None:
        self._jobs.append(job)
        if job.gone:
            return  # _sweep ends it
        try:
            for i, (prompt, options) in enumerate(zip(job.prompts, job.options, strict=True)):
                job.writers.append(Writer(self.engine, prompt, options, self.text, job.stop))
                self._owner[job.writers[-1].sequence] = job, i
        except HandgradError as reason:
            self._end(job, ApiError(400, reason, "prompt", "invalid_value"))

    def _sweep(self, closed: bool) -> None:
        """End the requests that are not wanted any more, or have taken too long."""
        now = time.monotonic()
        for job in list(self._jobs):
            if job.gone:
                self._end(job)
            elif closed:
                self._end(job, ApiError(503, "the server is shutting down", code="shutting_down"))
            elif now > job.deadline:
                self._end(job, self._too_long())
            elif job.sent - job.taken > MAX_UNREAD * len(job.prompts):
                self._end(job, ApiError(499, "the client reads too slowly", code="slow_client"))

    def _step(self) -> None:
        for event in self.engine.step():
            if event.sequence not in self._owner:
                continue
            job, i = self._owner[event.sequence]
            try:
                piece = job.writers[i].piece(event)
            except HandgradError as reason:  # this sequence has failed, no other
                log.error("a sequence failed: %s", reason)
                self._end(job, ApiError(500, reason, code="sequence_failed"))
                continue
            if piece.finish is not None:  # the place is free before the client knows
                del self._owner[event.sequence]
                job.left -= 1
                self._release(1)
                if not job.left:
                    self._jobs.remove(job)
            job.send(Update(i, piece, event.sequence))

    def _end(self, job: Job, reason: ApiError | None = None) -> None:
        """Take a request out of the engine, and tell its client why."""
        for writer in job.writers:
            self.engine.cancel(writer.sequence)
            self._owner.pop(writer.sequence, None)
        self._jobs.remove(job)
        self._release(job.left)
        if reason is not None:
            job.send(reason)

    def _fail(self, reason: Exception) -> None:
        """A step has failed, for an unknown sequence: end all of them and start with a new engine."""
        log.error("the engine failed", exc_info=reason)
        message = str(reason) if isinstance(reason, HandgradError) else "the engine failed; the log has the reason"
        self.engine = Engine(self.model, max_running=self.parallel)
        for job in list(self._jobs):
            for writer in job.writers:
                self._owner.pop(writer.sequence, None)
            job.writers.clear()
            self._end(job, ApiError(500, message, code="engine_failed"))


def _answer(compute: Callable[[], Any], future: "Future[Any]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(compute())
    except Exception as reason:
        future.set_exception(reason)

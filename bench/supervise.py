"""Runs the parts of a bench in a child process: one that is killed, by the system for lack of memory or by a crash, costs
the contender that was running, and the rest goes on."""

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

from .attempts import Attempts, problem
from .process import ended_by
from .row import Row
from .scenarios import Part

Tell = Callable[
    [int, str, float], None
]  # the number of the part, its contender, and the share of the part that is done
REFRESH = 0.5  # seconds between calls of `tick`


def measure(parts: list[Part], tell: Tell, tick: Callable[[], None] = lambda: None) -> Iterator[tuple[Part, list[Row]]]:
    """Measure all parts, one after another."""
    i, known = 0, dict[str, str]()  # the part to go on with, and the problems that ended earlier children in it
    while i < len(parts):
        running = ""
        for kind, *found in _events(parts[i:], known, tick):
            if kind == "ended":
                break
            if kind == "begin":
                running, done = found
                tell(i, running, done)
            else:
                yield parts[i], found[0]
                i, known, running = i + 1, {}, ""
        else:
            return
        if running in known or not running:  # not a contender, or the same one again: give up this part
            row = Row(parts[i].scenario, parts[i].case, running or "handgrad", problem=f"failed: {found[0]}")
            yield parts[i], [row]
            i, known = i + 1, {}
        else:
            known[running] = f"failed: {found[0]}"


def _events(parts: list[Part], known: dict[str, str], tick: Callable[[], None]) -> Iterator[tuple[Any, ...]]:
    """What a child process reports; ("ended", why) if it ends before all parts are measured."""
    # fork: this process has not computed anything, so there are no threads of torch that the child would lack
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(parts, known, send))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork, where other threads exist
        child.start()
    send.close()
    measured, ended = 0, False
    try:
        while measured < len(parts):
            while not receive.poll(REFRESH):
                tick()
            event = receive.recv()
            measured += event[0] == "rows"
            yield event
    except EOFError:
        ended = True
    finally:  # also if interrupted
        _end(child)
    if ended:
        code = child.exitcode or 0
        yield "ended", ended_by(-code) if code < 0 else f"its process ended with status {code}"


def _end(child: ForkProcess) -> None:
    """End the child and all processes that it has started, which would run beside the next contender."""
    assert child.pid is not None
    with contextlib.suppress(ProcessLookupError):  # it has not made its group yet
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.join()


def _work(parts: list[Part], known: dict[str, str], send: Connection) -> None:
    """Measure parts and report. Runs in the child."""
    os.setpgid(0, 0)  # a group with all processes that it starts
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(2, 1)  # stdout is reserved for JSON
    for part in parts:
        attempts = Attempts(known, lambda name, done: send.send(("begin", name, done)))
        try:
            rows = part.measure(attempts)
        except Exception as reason:  # not of one contender: preparing the case failed
            rows = [Row(part.scenario, part.case, "handgrad", problem=problem(reason))]
        send.send(("rows", rows))
        known = {}

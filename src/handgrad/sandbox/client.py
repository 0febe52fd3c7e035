"""Run untrusted programs (regular expressions and chat templates from files) in a child process with limits.

Either can run forever or exhaust memory, which cannot be stopped inside this process. One child, started at first use,
serves all requests. A request that exceeds its CPU time or memory kills the child and raises LimitError; the next request
starts a new child. The child exits with this process; a forked process starts its own.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import HandgradError, LimitError
from . import worker

REPLY_TIMEOUT = 30  # seconds; generous, because the machine may be busy

_lock = threading.RLock()
_child: "_Child | None" = None


class _ChildExited(Exception):
    """The child has exited. Argument: its status."""


class _Child:
    def __init__(self) -> None:
        folders = []
        for package in ("jinja2", "markupsafe"):
            spec = importlib.util.find_spec(package)
            if spec is not None and spec.origin is not None:
                folders.append(str(Path(spec.origin).parent.parent))
        program = [sys.executable, "-I", "-S", worker.__file__, str(os.getpid()), *dict.fromkeys(folders)]
        try:
            self._process = subprocess.Popen(
                program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}, bufsize=0
            )
        except OSError as reason:
            raise HandgradError(f"cannot start {sys.executable} for the sandbox: {reason.strerror}") from None

    def call(self, request: bytes) -> Any:
        assert self._process.stdin is not None
        try:
            data = memoryview(len(request).to_bytes(4, "big") + request)
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]
            return json.loads(self._read_reply().decode("utf-8", "surrogatepass"))
        except OSError:
            raise _ChildExited(self._process.wait()) from None

    def _read_reply(self) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + REPLY_TIMEOUT
        reply = bytearray()
        while len(reply) < 4 or len(reply) < 4 + int.from_bytes(reply[:4], "big"):
            if not select.select([pipe], [], [], max(0, deadline - time.monotonic()))[0]:
                raise _ChildExited(-signal.SIGPROF)
            part = os.read(pipe, 1 << 20)
            if not part:
                raise _ChildExited(self._process.wait())
            reply += part
        return bytes(reply[4:])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close()

    def abandon(self) -> None:
        """Close the pipes without waiting: after a fork the child belongs to the parent process."""
        self._process.returncode = 0
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def call(function: str, label: str, **arguments: Any) -> Any:
    """Call a function of `worker` in the child. Error messages call the program that runs there `label`."""
    try:
        request = json.dumps({"function": function, **arguments}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as reason:
        raise HandgradError(f"{label}: the input cannot be sent to the sandbox: {reason}") from None
    global _child
    with _lock:
        for fresh in (False, True):
            if _child is None:
                fresh, _child = True, _Child()
            try:
                return _child.call(request)
            except _ChildExited as reason:
                status = reason.args[0]
                _stop()
                if status == -signal.SIGPROF:
                    raise LimitError(
                        f"{label} takes too long: more than {worker.SECONDS:g} s of CPU time; make it simpler"
                    ) from None
                if status == worker.NO_MEMORY:
                    raise LimitError(f"{label} needs more than {worker.MEMORY // 1_000_000} MB of memory") from None
                if fresh:  # otherwise the child may have been killed before this request
                    raise HandgradError(f"{label} crashed its process (exit status {status})") from None
            except BaseException:
                _stop()  # its reply must not be read as that of the next request
                raise
    raise AssertionError


def match(patterns: Sequence[str], names: Sequence[str]) -> list[set[str]]:
    """For each regular expression, the names it matches: the complete name or the part after any dot."""
    label = (
        f"one of {len(patterns)} regular expressions" if len(patterns) > 1 else f"the regular expression {patterns[0]}"
    )
    matched = []
    for pattern, found in zip(patterns, call("match", label, patterns=patterns, names=names), strict=True):
        if isinstance(found, str):
            raise HandgradError(f"{pattern} is not a regular expression: {found}")
        matched.append({names[i] for i in found})
    return matched


def _stop() -> None:
    global _child
    if _child is not None:
        _child.stop()
        _child = None


def _after_fork() -> None:
    global _child, _lock
    _lock = threading.RLock()
    if _child is not None:
        _child.abandon()
        _child = None


atexit.register(_stop)
os.register_at_fork(after_in_child=_after_fork)

"""Foreign programs — regular expressions and chat templates from files — run in a child process with limits.

Both can run for ever or fill the memory, and nothing stops them inside this process. One child, started when it is first
needed, answers all requests; a request that takes more than its share of processor time or memory ends the child and is
a HandgradError, and the next request starts another child. The child ends with this process; a forked process starts a
child of its own.
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

PATIENCE = 30  # seconds until a child that neither computes nor answers is given up: the machine may be busy

_lock = threading.RLock()
_child: "_Child | None" = None


class _Ended(Exception):
    """The child has ended, with this status."""


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
            raise HandgradError(f"cannot start {sys.executable} to run a foreign program: {reason.strerror}") from None

    def ask(self, request: bytes) -> Any:
        assert self._process.stdin is not None
        try:
            data = memoryview(len(request).to_bytes(4, "big") + request)
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]
            return json.loads(self._answer().decode("utf-8", "surrogatepass"))
        except OSError:
            raise _Ended(self._process.wait()) from None

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        give_up = time.monotonic() + PATIENCE
        found = bytearray()
        while len(found) < 4 or len(found) < 4 + int.from_bytes(found[:4], "big"):
            if not select.select([pipe], [], [], max(0, give_up - time.monotonic()))[0]:
                raise _Ended(-signal.SIGPROF)
            part = os.read(pipe, 1 << 20)
            if not part:
                raise _Ended(self._process.wait())
            found += part
        return bytes(found[4:])

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close()

    def forget(self) -> None:
        """After a fork: it is the child of another process."""
        self._process.returncode = 0
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def ask(call: str, about: str, **given: Any) -> Any:
    """What `sandboxed.worker` answers. `about` is what messages call the program that runs there."""
    try:
        request = json.dumps({"call": call, **given}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as reason:
        raise HandgradError(f"{about} cannot be given this: {reason}") from None
    global _child
    with _lock:
        for fresh in (False, True):
            if _child is None:
                fresh, _child = True, _Child()
            try:
                return _child.ask(request)
            except _Ended as reason:
                status = reason.args[0]
                _stop()
                if status == -signal.SIGPROF:
                    raise LimitError(
                        f"{about} takes too long: more than {worker.SECONDS:g} s of processor time; make it simpler"
                    ) from None
                if status == worker.NO_MEMORY:
                    raise LimitError(f"{about} needs more than {worker.MEMORY // 1_000_000} MB of memory") from None
                if fresh:  # otherwise it may have been killed before this request
                    raise HandgradError(f"{about} ended the process it ran in (status {status})") from None
            except BaseException:
                _stop()  # an answer to this request must not be taken for the next one's
                raise
    raise AssertionError


def match(patterns: Sequence[str], names: Sequence[str]) -> list[set[str]]:
    """For each regular expression the names that it matches, whole or from behind a dot to the end."""
    called = (
        f"one of {len(patterns)} regular expressions" if len(patterns) > 1 else f"the regular expression {patterns[0]}"
    )
    matched = []
    for pattern, found in zip(patterns, ask("match", called, patterns=patterns, names=names), strict=True):
        if isinstance(found, str):
            raise HandgradError(f"{pattern} is not a regular expression: {found}")
        matched.append({names[i] for i in found})
    return matched


def _stop() -> None:
    global _child
    if _child is not None:
        _child.end()
        _child = None


def _forked() -> None:
    global _child, _lock
    _lock = threading.RLock()
    if _child is not None:
        _child.forget()
        _child = None


atexit.register(_stop)
os.register_at_fork(after_in_child=_forked)

"""Run untrusted programs (regular expressions and chat templates from files) in a child process with limits.

Either can run forever or exhaust memory, which cannot be stopped inside this process. One child, started at first use,
serves all requests. A request that exceeds its CPU time or memory kills the child and raises LimitError; the next request
starts a new child. The child exits with this process; a forked process starts its own.
"""

import atexit
import importlib.util
import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import HandgradError, LimitError
from . import worker
from .child import Child, ChildExited

REPLY_TIMEOUT = 30  # seconds; generous, because the machine may be busy

_lock = threading.RLock()
_child: Child | None = None


def _start() -> Child:
    folders = []
    for package in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).parent.parent))
    return Child(worker.__file__, list(dict.fromkeys(folders)), {})


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
                fresh, _child = True, _start()
            try:
                return json.loads(_child.call(request, REPLY_TIMEOUT).decode("utf-8", "surrogatepass"))
            except ChildExited as reason:
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

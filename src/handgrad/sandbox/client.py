"""Run untrusted programs (regular expressions and chat templates from files) in a child process with limits.

Either can run forever or exhaust memory, which cannot be stopped inside this process. One child, started at first use,
serves all requests. A request that exceeds its CPU time or memory kills the child and raises LimitError; the next request
starts a new child.
"""

import importlib.util
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import HandgradError, LimitError
from . import worker
from .child import Child, ChildExited, Service

REPLY_TIMEOUT = 30  # seconds; generous, because the machine may be busy


def _start() -> Child:
    folders = []
    for package in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).parent.parent))
    return Child(worker.__file__, list(dict.fromkeys(folders)), {})


_service = Service(_start)


def call(function: str, label: str, **arguments: Any) -> Any:
    """Call a function of `worker` in the child. Error messages call the program that runs there `label`."""
    try:
        request = json.dumps({"function": function, **arguments}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as reason:
        raise HandgradError(f"{label}: the input cannot be sent to the sandbox: {reason}") from None
    try:
        reply = _service.call(request, REPLY_TIMEOUT, (-signal.SIGPROF, worker.NO_MEMORY))
    except ChildExited as reason:
        status = reason.args[0]
        if status == -signal.SIGPROF:
            raise LimitError(
                f"{label} takes too long: more than {worker.SECONDS:g} s of CPU time; make it simpler"
            ) from None
        if status == worker.NO_MEMORY:
            raise LimitError(f"{label} needs more than {worker.MEMORY // 1_000_000} MB of memory") from None
        raise HandgradError(f"{label} crashed its process (exit status {status})") from None
    return json.loads(reply.decode("utf-8", "surrogatepass"))


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

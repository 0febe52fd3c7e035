"""Run untrusted programs (regular expressions, chat templates and tokenizers from files) in a child process with limits, and
read files there that a few bytes can make huge.

Each can run forever or exhaust memory, which cannot be stopped inside this process. One child, started at first use,
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
REPLY_TIMEOUT_PER_BYTE = 50e-6  # of a file that is read
PACKAGES = ("jinja2", "markupsafe", "tokenizers", "pyarrow", "numpy")
# One thread and one heap, whose memory is what is used: others reserve gigabytes of addresses.
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0", "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_IO_THREADS": "1",
}  # fmt: skip


def _start() -> Child:
    folders = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).parent.parent))
    return Child(worker.__file__, list(dict.fromkeys(folders)), ENVIRONMENT)


_service = Service(_start)


def call(function: str, label: str, work: int = 0, **arguments: Any) -> Any:
    """Call a function of `worker` in the child. Error messages call the program that runs there `label`. A function that
    reads a file may take longer, by its number of bytes, `work`."""
    try:
        request = json.dumps({"function": function, "work": work, **arguments}, ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )
    except (TypeError, ValueError, RecursionError) as reason:
        raise HandgradError(f"{label}: the input cannot be sent to the sandbox: {reason}") from None
    try:
        timeout = REPLY_TIMEOUT + REPLY_TIMEOUT_PER_BYTE * work
        reply = _service.call(request, timeout, (-signal.SIGPROF, worker.NO_MEMORY))
    except ChildExited as reason:
        status = reason.args[0]
        if status == -signal.SIGPROF:
            raise LimitError(
                f"{label} takes too long: more than {worker.SECONDS:g} s of CPU time; make it simpler"
            ) from None
        if status in (worker.NO_MEMORY, -signal.SIGABRT):  # libraries in Rust abort where Python raises
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

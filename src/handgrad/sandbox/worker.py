"""The child process: reads requests, answers each within limits of processor time and memory, or dies.

Run as `python -I -S worker.py PARENT FOLDER…`: the parent's process id, and folders in which to find jinja2. A message is
its length in four bytes, then JSON. Time is limited by a timer whose signal ends the process even inside a regular
expression; memory by the address space, so that a MemoryError ends it with status 3.
"""

import contextlib
import importlib
import json
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

SECONDS = 1.0  # of processor time for one request, and for each byte of it
SECONDS_PER_BYTE = 5e-6
MEMORY = 200_000_000  # bytes above what the process has when it starts, and for each byte of the request
MEMORY_PER_BYTE = 20
TEXT = 4_000_000  # bytes of an answer, and for each byte of the request
TEXT_PER_BYTE = 8
NO_MEMORY = 3
TEMPLATES = 16  # kept compiled

_templates: dict[str, Any] = {}


def match(given: dict[str, Any]) -> list[list[int] | str]:
    """For each pattern, the numbers of the names that it matches, whole or from behind a dot to the end; or why it is not
    a regular expression."""
    names = given["names"]
    begins = [[0, *(i + 1 for i, sign in enumerate(name) if sign == ".")] for name in names]
    found: list[list[int] | str] = []
    for pattern in given["patterns"]:
        try:
            compiled = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as reason:
            found.append(str(reason))
            continue
        found.append([n for n, name in enumerate(names) if any(compiled.fullmatch(name, i) for i in begins[n])])
    return found


def prepare(given: dict[str, Any]) -> Any:
    """Compile a chat template. None, or the line and the reason why it is not one."""
    templates = importlib.import_module("templates")
    try:
        template = templates.Template(given["source"], given["special"], given["now"])
    except templates.Mistake as reason:
        return reason.args
    if len(_templates) >= TEMPLATES:
        _templates.clear()
    _templates[given["key"]] = template
    return None


def render(given: dict[str, Any]) -> Any:
    return _with_template(given, lambda template: template.render(given["messages"], given["opening"]))


def segments(given: dict[str, Any]) -> Any:
    return _with_template(given, lambda template: template.segments(given["messages"]))


def _with_template(given: dict[str, Any], use: Callable[[Any], Any]) -> Any:
    """{"done": …}, {"fails": why}, or {} if the template has to be prepared first."""
    template = _templates.get(given["key"])
    if template is None:
        return {}
    try:
        return {"done": use(template)}
    except MemoryError:
        raise
    except Exception as reason:  # the template is a foreign program: it can fail in any way
        return {"fails": f"{reason}"[:2000] or type(reason).__name__}


CALLS = {f.__name__: f for f in (match, prepare, render, segments)}


def main() -> None:
    parent = int(sys.argv[1])
    sys.path += [os.path.dirname(os.path.abspath(__file__)), *sys.argv[2:]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    while True:
        while not select.select([0], [], [], 2)[0]:
            if os.getppid() != parent:  # it is gone, and a copy of it keeps the pipe open
                return
        head = _read(4)
        if head is None:
            return
        raw = _read(int.from_bytes(head, "big"))
        if raw is None:
            return
        size = len(raw)
        if "templates" not in sys.modules and raw.startswith(b'{"call": "prepare"'):
            importlib.import_module("templates")  # jinja2 takes a while: not of the template's time
        _limit_memory(MEMORY + MEMORY_PER_BYTE * size)
        signal.setitimer(signal.ITIMER_PROF, SECONDS + SECONDS_PER_BYTE * size)
        try:
            request = json.loads(raw)
            del raw
            answer = json.dumps(CALLS[request.pop("call")](request), ensure_ascii=False)
            ready = answer.encode("utf-8", "surrogatepass")
            del answer, request
        except MemoryError:
            os._exit(NO_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(ready) > TEXT + TEXT_PER_BYTE * size:
            ready = b'{"fails": "it writes too much"}'
        _write(len(ready).to_bytes(4, "big") + ready)


def _limit_memory(above: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # where the system has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_started_with() + above, resource.RLIM_INFINITY))


def _started_with(known: list[int] = []) -> int:  # noqa: B006
    """Bytes of address space at the first request."""
    if not known:
        with open("/proc/self/statm", encoding="ascii") as file:
            known.append(int(file.read().split()[0]) * resource.getpagesize())
    return known[0]


def _read(count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(0, min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    main()

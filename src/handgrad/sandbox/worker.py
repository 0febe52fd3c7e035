"""The sandboxed child process: answers requests within limits of CPU time and memory, or exits.

Run as `python -I -S worker.py PARENT FOLDER…`: the parent's process id, and folders to import jinja2 from. A message is its
length in four bytes, then JSON. A CPU timer kills the process even inside a regular expression; a limit on the address
space raises MemoryError, which exits with status NO_MEMORY.
"""

import contextlib
import importlib
import json
import math
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

SECONDS = 1.0  # CPU time of a request
SECONDS_PER_BYTE = 5e-6  # added for each byte of the request
MEMORY = 200_000_000  # bytes above what the process uses at its first request
MEMORY_PER_BYTE = 20
TEXT = 4_000_000  # bytes of a reply
TEXT_PER_BYTE = 8
NO_MEMORY = 3  # exit status
MAX_TEMPLATES = 16  # compiled templates in memory

_templates: dict[str, Any] = {}


def match(request: dict[str, Any]) -> list[list[int] | str]:
    """For each pattern, the indices of the names it matches, or why it is not a regular expression. A pattern must match
    the complete name or the part after any dot."""
    names = request["names"]
    starts = [[0, *(i + 1 for i, c in enumerate(name) if c == ".")] for name in names]
    found: list[list[int] | str] = []
    for pattern in request["patterns"]:
        try:
            compiled = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as reason:
            found.append(str(reason))
            continue
        found.append([n for n, name in enumerate(names) if any(compiled.fullmatch(name, i) for i in starts[n])])
    return found


def prepare(request: dict[str, Any]) -> Any:
    """Compile a chat template. Returns None, or the line number and reason of a syntax error."""
    templates = importlib.import_module("templates")
    try:
        template = templates.Template(request["source"], request["special"], request["now"])
    except templates.TemplateError as reason:
        return reason.args
    if len(_templates) >= MAX_TEMPLATES:
        _templates.clear()
    _templates[request["key"]] = template
    return None


def render(request: dict[str, Any]) -> Any:
    arguments = request["messages"], request["add_generation_prompt"], request.get("tools")
    return _with_template(request, lambda template: template.render(*arguments))


def segments(request: dict[str, Any]) -> Any:
    return _with_template(request, lambda template: template.segments(request["messages"]))


def _with_template(request: dict[str, Any], use: Callable[[Any], Any]) -> Any:
    """{"result": …}, {"error": reason}, or {} if the template must be prepared first."""
    template = _templates.get(request["key"])
    if template is None:
        return {}
    try:
        return {"result": use(template)}
    except MemoryError:
        raise
    except Exception as reason:  # a template can raise anything
        return {"error": f"{reason}"[:2000] or type(reason).__name__}


FUNCTIONS = {f.__name__: f for f in (match, prepare, render, segments)}


def main() -> None:
    parent = int(sys.argv[1])
    sys.path += [os.path.dirname(os.path.abspath(__file__)), *sys.argv[2:]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    while (raw := next_request(parent)) is not None:
        size = len(raw)
        if "templates" not in sys.modules and raw.startswith(b'{"function": "prepare"'):
            importlib.import_module("templates")  # importing jinja2 must not count as the template's time
        limit_memory(MEMORY + MEMORY_PER_BYTE * size)
        signal.setitimer(signal.ITIMER_PROF, SECONDS + SECONDS_PER_BYTE * size)
        try:
            request = json.loads(raw)
            del raw
            text = json.dumps(FUNCTIONS[request.pop("function")](request), ensure_ascii=False)
            reply = text.encode("utf-8", "surrogatepass")
            del text, request
        except MemoryError:
            os._exit(NO_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(reply) > TEXT + TEXT_PER_BYTE * size:
            reply = b'{"error": "the output is too long"}'
        write(len(reply).to_bytes(4, "big") + reply)


def next_request(parent: int, idle: float = math.inf) -> bytes | None:
    """Wait for a message. Returns None if the parent has ended, or if none has come for `idle` seconds."""
    waited = 0
    while not select.select([0], [], [], 2)[0]:
        waited += 2
        if os.getppid() != parent or waited >= idle:  # a fork of an ended parent keeps the pipe open
            return None
    head = _read(4)
    return None if head is None else _read(int.from_bytes(head, "big"))


def limit_memory(extra: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (_initial_memory() + extra, resource.RLIM_INFINITY))


def _initial_memory(measured: list[int] = []) -> int:  # noqa: B006
    """Bytes of address space at the first request, measured once."""
    if not measured:
        with open("/proc/self/statm", encoding="ascii") as file:
            measured.append(int(file.read().split()[0]) * resource.getpagesize())
    return measured[0]


def _read(count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(0, min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def write(data: bytes, pipe: int = 1) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


if __name__ == "__main__":
    main()

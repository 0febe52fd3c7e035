"""The sandboxed child process: answers requests within limits of CPU time and memory, or exits.

Run as `python -I -S worker.py PARENT FOLDER…`: the parent's process id, and folders to import libraries from. A message is
its length in four bytes, then JSON that begins with the function and the bytes of a file it reads. A CPU timer kills the
process even inside a regular expression; a limit on the address space raises MemoryError, which exits with status NO_MEMORY.
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
SECONDS_PER_BYTE = 5e-6  # added for each byte of the request, and of the file
MEMORY = 200_000_000  # bytes above what the process uses at its first request
MEMORY_PER_BYTE = 20
TEXT = 4_000_000  # bytes of a reply
TEXT_PER_BYTE = 8
NO_MEMORY = 3  # exit status
MAX_TEMPLATES = 16  # compiled templates in memory
LIBRARIES = {"prepare": "templates", "tokenize": "tokenizers", "scan": "pyarrow.parquet"}  # imported without limits
PAGE = 1 << 20  # bytes that are read of a file at once
ROWS = 256  # of a table

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


def tokenize(request: dict[str, Any]) -> dict[str, str]:
    """Encode and decode long runs of each character and word with tokenizers. {}, or {"error": reason} if one makes a text
    more than `growth` times as long, or if the first one fails."""
    characters, length, growth = request["characters"], request["length"], request["growth"]
    runs = [x * (length // len(x) or 1) for x in (*characters, *request["words"])]
    texts = [characters, *(f"{run}\x01{characters}" for run in runs), " a1.\n" * (length // 5)]
    for i, description in enumerate(request["tokenizers"]):
        try:
            made = importlib.import_module("tokenizers").Tokenizer.from_str(description)
            for text in texts:
                found = len(made.encode(text)), 0 if made.decoder is None else len(made.decoder.decode([text]))
                if max(found) > growth * len(text):
                    return {"error": f"makes {max(found):,} tokens or characters of {len(text):,} characters"}
        except MemoryError:
            raise
        except BaseException as reason:  # a panic in the library's Rust code is not an Exception
            if i == 0:
                return {"error": f"fails: {reason}"[:2000]}
    return {}


def scan(request: dict[str, Any]) -> dict[str, str]:
    """Decode a .parquet file as the parent will. {}, or {"error": reason}."""
    try:
        with open(request["file"], "rb") as opened:
            table = importlib.import_module("pyarrow.parquet").ParquetFile(opened, buffer_size=PAGE)
            for _ in table.iter_batches(batch_size=ROWS, use_threads=False):
                pass
    except MemoryError:
        raise
    except Exception as reason:
        return {"error": f"{reason}"[:2000]}
    return {}


FUNCTIONS = {f.__name__: f for f in (match, prepare, render, segments, tokenize, scan)}
HEAD = re.compile(rb'\{"function": "(\w+)", "work": (\d+)')


def main() -> None:
    parent = int(sys.argv[1])
    sys.path += [os.path.dirname(os.path.abspath(__file__)), *sys.argv[2:]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    while (raw := next_request(parent)) is not None:
        head = HEAD.match(raw)
        assert head is not None
        size = len(raw) + int(head[2])
        library = LIBRARIES.get(head[1].decode(), "json")
        if library not in sys.modules:  # importing it must not count as the program's time and memory
            _set_memory(resource.RLIM_INFINITY)
            importlib.import_module(library)
            _measured.clear()
        limit_memory(MEMORY + MEMORY_PER_BYTE * size)
        signal.setitimer(signal.ITIMER_PROF, SECONDS + SECONDS_PER_BYTE * size)
        try:
            request = json.loads(raw)
            del raw
            text = json.dumps(FUNCTIONS[request["function"]](request), ensure_ascii=False)
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
        _set_memory(_initial_memory() + extra)


def _set_memory(limit: int) -> None:
    """Limit the address space, within what `ulimit -v` allows."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    inside = [x for x in (limit, hard) if x != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(inside, default=resource.RLIM_INFINITY), hard))


_measured: list[int] = []


def _initial_memory() -> int:
    """Bytes of address space before the first request that needs the latest library, measured once."""
    if not _measured:
        with open("/proc/self/statm", encoding="ascii") as file:
            _measured.append(int(file.read().split()[0]) * resource.getpagesize())
    return _measured[0]


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

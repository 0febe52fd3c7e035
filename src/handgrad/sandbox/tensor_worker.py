"""The sandboxed child that runs Python functions on tensors: each request in a separate fork with limits.

Run as `python -I -S tensor_worker.py PARENT FOLDER…`: the parent's process id, and the folders to import from. A request and
a reply are JSON, preceded by its length in four bytes and followed by the bytes of its tensors.

A fork cannot open a file or a socket, by any call of any library: it may have no more open files than it has. It ends after
its time, and gets no more than its memory. An audit hook refuses what needs no open file: deleting, renaming, other
processes, foreign functions; calls that Python does not report to the hook are taken away.
"""

import ast
import builtins
import contextlib
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

NAME = "<answer>"  # the file name of the code in tracebacks
IDLE = 600  # seconds without a request after which the child exits, and frees the memory that torch takes
MESSAGE = 600  # characters
NO_MEMORY = 3  # exit status
REFUSED = ("open", "os", "socket", "subprocess", "ctypes", "shutil", "resource", "mmap", "fcntl", "signal", "glob", "pty",
           "tempfile", "urllib", "http", "ftplib", "smtplib", "sqlite3", "webbrowser", "pathlib")  # fmt: skip
UNREPORTED = {  # calls that no audit hook sees, by module
    "os": ("mkfifo", "mknod", "setpgid", "setsid", "setpriority", "nice", "chroot", "unshare", "setns", "closerange",
           "sched_setaffinity", "sched_setscheduler", "sched_setparam", "dup", "dup2", "close"),
    "signal": ("setitimer", "alarm", "signal", "pthread_sigmask", "siginterrupt", "set_wakeup_fd", "raise_signal"),
}  # fmt: skip
GRACE = 5.0  # seconds that a fork may take after its time to end by itself
ALWAYS = ("torch", "torch.nn", "torch.nn.functional", "math", "typing", "collections", "collections.abc", "functools",
          "itertools", "operator", "__future__")  # fmt: skip


class Refused(Exception):
    """The code asked for something that it may not do here."""


class Fault(Exception):
    """The answer has a problem. Arguments: its kind, a message, the line."""


def main() -> None:
    parent = int(sys.argv[1])
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path += [here, *sys.argv[2:]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    handgrad = types.ModuleType("handgrad")  # its parts can be imported one by one, without all of it
    handgrad.__path__ = [os.path.dirname(here)]
    sys.modules["handgrad"] = handgrad
    worker = importlib.import_module("worker")
    _warm_up()
    while (raw := worker.next_request(parent, IDLE)) is not None:
        reply = _in_a_fork(raw, worker)
        worker.write(len(reply).to_bytes(4, "big") + reply)


def _warm_up() -> None:
    """Import what torch would import at first use, when the fork can open no files any more."""
    torch = importlib.import_module("torch")
    importlib.import_module("torch.nn.functional")
    torch.set_num_threads(1)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    repr(torch.einsum("ij,jk->ik", x, x))
    torch.vmap(torch.sum)(x)
    x.numpy().tobytes()


def _in_a_fork(raw: bytes, worker: Any) -> bytes:
    length = int.from_bytes(raw[:4], "big")
    request = json.loads(raw[4 : 4 + length])
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reading)
            os.setpgid(0, 0)
            worker.write(_answer(request, raw[4 + length :], worker), writing)
        except MemoryError:
            os._exit(NO_MEMORY)
        finally:
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + request["wall"] + GRACE
    reply, late = bytearray(), False
    while len(reply) <= request["reply"]:
        late = not select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]
        if late or not (part := os.read(reading, 1 << 20)):
            break
        reply += part
    os.close(reading)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)  # nothing of it is left, whatever it started
    status = os.waitpid(pid, 0)[1]
    if not late and len(reply) >= 4 and 4 + int.from_bytes(reply[:4], "big") <= len(reply) <= request["reply"]:
        return bytes(reply)
    return _encode({"problem": {"kind": "time" if late else _ending(status, len(reply) > request["reply"])}})


def _ending(status: int, too_long: bool) -> str:
    if too_long:
        return "long"
    if os.WIFSIGNALED(status):
        return "time" if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU) else "crash"
    return "memory" if os.WEXITSTATUS(status) == NO_MEMORY else "exit"


def _encode(answer: dict[str, Any], tensors: bytes = b"") -> bytes:
    head = json.dumps(answer).encode()
    return len(head).to_bytes(4, "big") + head + tensors


# ── inside the fork ─────────────────────────────────────────────────────────────────────────────────────────────────


def _answer(request: dict[str, Any], data: bytes, worker: Any) -> bytes:
    """Run the code on each case, and return its outputs, what it printed and which arguments it changed."""
    for name in request["modules"]:
        _import(name)
    cases = [[_decode(x, request["tensors"], data) for x in case] for case in request["cases"]]
    printed: list[str] = []
    tensors: list[bytes] = []
    answer: dict[str, Any] = {"printed": printed, "outputs": [], "changed": []}
    _confine(request, worker)
    try:
        tree = _parse(request)
        namespace: dict[str, Any] = {"__name__": "answer", "__builtins__": _builtins(request, printed)}
        exec(compile(tree, NAME, "exec", dont_inherit=True), namespace)
        function = namespace.get(request["function"])
        if not isinstance(function, types.FunctionType):
            raise Fault("missing", f"the code has no function {request['function']}", None)
        for described, case, returns in zip(request["cases"], cases, request["returns"], strict=True):
            outputs = list(_flat(function(*case), returns, f"{request['function']} returned"))
            answer["outputs"].append([_output(x, name, tensors, request["reply"]) for name, x in outputs])
            again = [_decode(x, request["tensors"], data) for x in described]
            changed = [n for n, a, b in zip(request["arguments"], case, again, strict=True) if not _equal(a, b)]
            answer["changed"] += [name for name in changed if name not in answer["changed"]]
    except Fault as reason:
        answer["problem"] = dict(zip(("kind", "message", "line"), reason.args, strict=True))
    except MemoryError:
        answer["problem"] = {"kind": "memory"}
    except BaseException as reason:
        answer["problem"] = {"kind": _kind(reason), "message": _text(reason), "line": _line_of(reason)}
    return _encode(answer, b"".join(tensors) if "problem" not in answer else b"")


def _import(name: str) -> None:
    """Import a module, or the module of a name in it."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        importlib.import_module(name.rpartition(".")[0])


def _confine(request: dict[str, Any], worker: Any) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    worker.limit_memory(request["memory"])
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    seconds = int(request["cpu"]) + 2  # in case that its timers do not end it
    hard = {resource.RLIMIT_NOFILE: 0, resource.RLIMIT_NPROC: 0, resource.RLIMIT_AS: soft, resource.RLIMIT_CPU: seconds}
    for limit, most in hard.items():
        resource.setrlimit(limit, (most, most))
    signal.setitimer(signal.ITIMER_PROF, request["cpu"])
    signal.setitimer(signal.ITIMER_REAL, request["wall"])

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event.partition(".")[0] in REFUSED:
            _refusing(event)()

    for name, calls in UNREPORTED.items():
        for module in (sys.modules[name], sys.modules[{"os": "posix", "signal": "_signal"}[name]]):
            for call in calls:
                vars(module)[call] = _refusing(f"{name}.{call}")
    sys.addaudithook(refuse)


def _refusing(name: str, why: str = "an answer uses no files, no network and no other programs") -> Callable[..., Any]:
    """A function to stand for the one of that name."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise Refused(f"{name} is refused: {why}")

    return refuse


def _parse(request: dict[str, Any]) -> ast.Module:
    try:
        tree: ast.Module = ast.parse(str(request["code"]), NAME)
    except SyntaxError as reason:
        raise Fault("syntax", reason.msg, reason.lineno) from None
    except (ValueError, RecursionError) as reason:
        raise Fault("syntax", str(reason), None) from None
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
        name = name.rpartition(".")[2]
        if name in request["forbidden"] or name.endswith("_backward"):
            raise Fault("forbidden", name, getattr(node, "lineno", None))
    return tree


def _builtins(request: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    """Python's own functions, with `import` and `print` of ours, and without those that read files or ask."""
    made = dict(vars(builtins))
    allowed = {*ALWAYS, *request["modules"]}
    real = builtins.__import__
    room = [request["printed"]]

    def guarded(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        parts = {f"{name}.{part}" for part in fromlist or ()}
        loaded = name.startswith("torch.") and name in sys.modules  # torch's own code imports through this function too
        if level == 0 and (loaded or name in allowed or (parts and parts <= allowed)):
            return real(name, globals, locals, fromlist, level)
        known = ", ".join(["torch", "math", *request["modules"]])
        raise Refused(f"import {name} is refused: an answer can import {known} and Python's typing and iteration tools")

    def show(*values: Any, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = False) -> None:
        text = (sep.join(str(value) for value in values) + end)[: room[0]]
        room[0] -= len(text)
        printed.append(text)

    def leave(*_: Any) -> Any:
        raise SystemExit

    why = "an answer uses no files and asks no questions"
    made |= {name: _refusing(f"{name}()", why) for name in ("open", "input", "breakpoint", "help")}
    made |= {"__import__": guarded, "print": show, "exit": leave, "quit": leave}
    return made


def _decode(x: Any, described: list[dict[str, Any]], data: bytes) -> Any:
    """Rebuild an argument: a tensor, a plain value, a list, or a NamedTuple by its full name."""
    torch = sys.modules["torch"]
    kind, value = x["kind"], x["value"]
    if kind == "tensor":
        about = described[value]
        dtype = getattr(torch, about["dtype"])
        part = bytearray(data[about["start"] : about["end"]])
        flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        return flat.clone().reshape(about["shape"])
    if kind == "plain":
        return value
    items = [_decode(item, described, data) for item in value]
    if kind == "list":
        return items
    module, _, name = kind.rpartition(".")
    return getattr(importlib.import_module(module), name)(*items)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(sys.modules["torch"].equal(a, b)) if hasattr(a, "untyped_storage") else a is b or a == b


def _flat(found: Any, expected: list[Any], what: str) -> Iterator[tuple[str, Any]]:
    """Pair the returned values with the names of what is expected; a list stands for a tuple: its name, then its fields."""
    wanted = ", ".join(_first(x) for x in expected)
    if found is ...:
        found = [...] * len(expected)
    if len(expected) == 1 and not isinstance(found, tuple | list):
        found = (found,)
    if not isinstance(found, tuple | list):
        raise Fault("returned", f"{what} {_described(found)} instead of {len(expected)} values: {wanted}", None)
    if len(found) != len(expected):
        count = f"{len(found)} value{'s' * (len(found) != 1)} instead of {len(expected)}"
        raise Fault("returned", f"{what} {count}: {wanted}", None)
    for x, name in zip(found, expected, strict=True):
        if isinstance(name, list):
            yield from _flat(x, name[1:], f"{name[0]} has")
        else:
            yield name, x


def _first(expected: Any) -> str:
    return str(expected[0] if isinstance(expected, list) else expected)


def _described(x: Any) -> str:
    return "None" if x is None else f"a {type(x).__name__}"


def _output(x: Any, name: str, tensors: list[bytes], limit: int) -> dict[str, Any]:
    torch = sys.modules["torch"]
    if x is ...:  # as the exercise was given: not written yet
        return {"name": name, "shape": None, "dtype": ""}
    if not isinstance(x, torch.Tensor):
        raise Fault("returned", f"{name} is {_described(x)}; return a tensor", None)
    if x.layout != torch.strided or x.device.type != "cpu" or x.is_complex() or x.is_quantized:
        raise Fault("returned", f"{name} is not an ordinary tensor of real numbers: {x.dtype}, {x.layout}", None)
    if 8 * x.numel() + sum(map(len, tensors)) > limit // 2:
        raise Fault("returned", f"{name} is too large: its shape is {tuple(x.shape)}", None)
    dtype = str(x.dtype).removeprefix("torch.")
    tensors.append(x.detach().double().contiguous().numpy().tobytes())
    return {"name": name, "shape": list(x.shape), "dtype": dtype}


def _kind(reason: BaseException) -> str:
    if isinstance(reason, Refused):
        return "refused"
    if isinstance(reason, SystemExit):
        return "exit"
    if isinstance(reason, NotImplementedError):
        return "unwritten"
    return "memory" if "can't allocate memory" in _text(reason) else "exception"


def _text(reason: BaseException) -> str:
    try:
        text = str(reason)
    except BaseException:
        text = ""
    if isinstance(reason, Refused):
        return text[:MESSAGE]
    return f"{type(reason).__name__}: {text}"[:MESSAGE] if text else type(reason).__name__


def _line_of(reason: BaseException) -> int | None:
    """The last line of the code that was running."""
    found, step = None, reason.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == NAME:
            found = step.tb_lineno
        step = step.tb_next
    return found


if __name__ == "__main__":
    main()

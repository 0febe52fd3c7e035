"""The processes in which answers run: one keeps Python ready, and forks a confined one for each answer.

They have no torch of their own (see remote_torch): tensors are numbers of tensors that the process at the other end of a
pipe holds, and what the answer returns are such numbers. Nothing that an answer does here can change how it is judged.
"""

import ast
import builtins
import importlib
import json
import os
import signal
import socket
import sys
import types
from collections.abc import Iterator
from typing import Any

from . import remote_torch
from .confine import Refused, confine, refusing
from .link import send

NAME = "<answer>"  # the file name of the code in tracebacks
MESSAGE = 600  # characters
NO_MEMORY = 3  # exit status
ALWAYS = ("torch", "torch.nn", "torch.nn.functional", "math", "typing", "collections", "collections.abc", "functools",
          "itertools", "operator", "__future__")  # fmt: skip


class Fault(Exception):
    """The answer has a problem. Arguments: its kind, a message, the line."""


def start(filter: Any, worker: Any) -> socket.socket:
    """Start the process that forks; returns the socket through which `ask` and `end` tell it what to do."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours
    try:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        for name in ALWAYS[3:]:
            importlib.import_module(name)
        remote_torch.install()
        while _next(theirs, filter, worker):
            pass
    finally:
        os._exit(0)


def ask(control: socket.socket, request: dict[str, Any], pipe: int) -> None:
    """Have an answer run that computes through the pipe."""
    raw = json.dumps(request).encode()
    socket.send_fds(control, [len(raw).to_bytes(4, "big")], [pipe])
    control.sendall(raw)


def end(control: socket.socket) -> int:
    """End the answer's process, if it still runs, and return its status."""
    control.sendall(b".")
    return int.from_bytes(control.recv(4, socket.MSG_WAITALL), "big")


def _next(control: socket.socket, filter: Any, worker: Any) -> bool:
    head, pipes, *_ = socket.recv_fds(control, 4, 1)
    if not head:
        return False
    raw = control.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
    pid = os.fork()
    if not pid:
        try:
            os.setpgid(0, 0)
            _answer(json.loads(raw), pipes[0], filter, worker)
        except MemoryError:
            os._exit(NO_MEMORY)
        finally:
            os._exit(0)
    os.close(pipes[0])
    told = control.recv(1)
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if told:
        control.sendall(status.to_bytes(4, "big"))
    return bool(told)


# ── inside the fork ─────────────────────────────────────────────────────────────────────────────────────────────────


def _answer(request: dict[str, Any], pipe: int, filter: Any, worker: Any) -> None:
    """Run the code on each case, and send which tensors it returned, and what it printed."""
    remote_torch.pipe = pipe
    for name in request["modules"]:
        _import(name)
    _forget(request["hidden"])
    cases = [[_decode(x) for x in case] for case in request["cases"]]
    printed: list[str] = []
    outputs: list[list[int | None]] = []
    confine(request, [pipe], filter, worker.limit_memory)
    problem: dict[str, Any] | None = None
    try:
        namespace: dict[str, Any] = {"__name__": "answer", "__builtins__": _builtins(request, printed)}
        exec(compile(_parse(request["code"]), NAME, "exec", dont_inherit=True), namespace)
        function = namespace.get(request["function"])
        if not isinstance(function, types.FunctionType):
            raise Fault("missing", f"the code has no function {request['function']}", None)
        for case, returns in zip(cases, request["returns"], strict=True):
            found = _flat(function(*case), returns, f"{request['function']} returned")
            outputs.append([_number(name, x) for name, x in found])
    except Fault as reason:
        problem = dict(zip(("kind", "message", "line"), reason.args, strict=True))
    except MemoryError:
        problem = {"kind": "memory"}
    except BaseException as reason:
        problem = {"kind": _kind(reason), "message": _text(reason), "line": _line_of(reason)}
    send(pipe, ["end", {"printed": printed, "problem": problem, "outputs": outputs}])


def _import(name: str) -> None:
    """Import a module, or the module of a name in it."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        importlib.import_module(name.rpartition(".")[0])


def _forget(hidden: list[str]) -> None:
    """Remove functions from every module that has them: they are the solution."""
    for path in hidden:
        home, _, name = path.rpartition(".")
        function = vars(sys.modules.get(home, builtins)).get(name)
        for module in [m for m in sys.modules.values() if m.__name__.startswith("handgrad.")]:
            for key in [key for key, value in vars(module).items() if value is function is not None]:
                delattr(module, key)


def _parse(code: str) -> ast.Module:
    try:
        return ast.parse(code, NAME)
    except SyntaxError as reason:
        raise Fault("syntax", reason.msg, reason.lineno) from None
    except (ValueError, RecursionError) as reason:
        raise Fault("syntax", str(reason), None) from None


def _builtins(request: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    """Python's own functions, with `import` and `print` of ours, and without those that read files or ask."""
    made = dict(vars(builtins))
    allowed = {*ALWAYS, *request["modules"]}
    real = builtins.__import__
    room = [request["printed"]]

    def guarded(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        parts = {f"{name}.{part}" for part in fromlist or ()}
        if level == 0 and (name in allowed or (parts and parts <= allowed)):
            return real(name, globals, locals, fromlist, level)
        if name.startswith("torch."):
            getattr(sys.modules["torch"], name.split(".")[1])  # says why not
        known = ", ".join(["torch", "math", *request["modules"]])
        raise Refused(f"import {name} is refused: an answer can import {known} and Python's typing and iteration tools")

    def show(*values: Any, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = False) -> None:
        text = (sep.join(str(value) for value in values) + end)[: room[0]]
        room[0] -= len(text)
        printed.append(text)

    def leave(*_: Any) -> Any:
        raise SystemExit

    why = "an answer uses no files and asks no questions"
    made |= {name: refusing(f"{name}()", why) for name in ("open", "input", "breakpoint", "help")}
    made |= {"__import__": guarded, "print": show, "exit": leave, "quit": leave}
    return made


def _decode(x: Any) -> Any:
    """Rebuild an argument: a tensor, a plain value, a list, or a NamedTuple by its full name."""
    kind, value = x["kind"], x["value"]
    if kind == "tensor":
        return remote_torch.tensor(value)
    if kind == "plain":
        return value
    items = [_decode(item) for item in value]
    if kind == "list":
        return items
    module, _, name = kind.rpartition(".")
    return getattr(importlib.import_module(module), name)(*items)


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


returned: list[Any] = []  # tensors that must be kept until they are read


def _number(name: str, x: Any) -> int | None:
    if x is ...:  # as the exercise was given: not written yet
        return None
    if not isinstance(x, remote_torch.Tensor):
        raise Fault("returned", f"{name} is {_described(x)}; return a tensor", None)
    returned.append(x)
    return x._number


def _kind(reason: BaseException) -> str:
    kinds = {
        remote_torch.Forbidden: "forbidden", Refused: "refused", SystemExit: "exit", NotImplementedError: "unwritten",
        PermissionError: "refused", EOFError: "crash",
    }  # fmt: skip
    found = next((kind for type, kind in kinds.items() if isinstance(reason, type)), "exception")
    return "memory" if found == "exception" and "can't allocate memory" in _text(reason) else found


def _text(reason: BaseException) -> str:
    try:
        text = str(reason)
    except BaseException:
        text = ""
    if isinstance(reason, PermissionError):
        return "the system refused it: an answer uses no files, no network and no other programs"
    if isinstance(reason, Refused | remote_torch.Forbidden):
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

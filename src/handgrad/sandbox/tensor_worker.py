"""The sandboxed child that judges need: it runs a Python function in one confined process, and its tensors in another.

Run as `python -I -S tensor_worker.py PARENT FOLDER…`: the parent's process id, and the folders to import from. A request and
a reply are JSON, preceded by its length in four bytes and followed by the bytes of its tensors.

For each request there are two forks. The answer's process has Python but no torch (answer_worker). The process here holds the
tensors and computes what the answer asks for: functions and methods of torch by their names, except those that differentiate.
Both are confined, so neither can touch a file, the network or another process.
"""

import contextlib
import importlib
import inspect
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

IDLE = 600  # seconds without a request after which the child exits, and frees the memory that torch takes
NO_MEMORY, CRASHED = 3, 4  # exit status
GRACE = 5.0  # seconds that a fork may take after its time to end by itself
DERIVES = re.compile("backward|grad|vjp|jvp|jac|hess|dual|functorch|functional_call|^func$", re.IGNORECASE)
SPACES = ("torch", "torch.nn", "torch.nn.functional", "torch.linalg", "torch.special")
FILES = (
    "from_file",
    "from_numpy",
    "frombuffer",
)  # functions of torch that read something else than tensors and numbers


class Forbidden(Exception):
    """A name that differentiates."""


class Refused(Exception):
    """A name that an answer cannot use."""


def main() -> None:
    parent = int(sys.argv[1])
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path += [here, *sys.argv[2:]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handgrad = types.ModuleType("handgrad")  # its parts can be imported one by one, without all of it
    handgrad.__path__ = [os.path.dirname(here)]
    sys.modules["handgrad"] = handgrad
    confine, worker = importlib.import_module("confine"), importlib.import_module("worker")
    filter = confine.kernel_filter()
    answers = importlib.import_module("answer_worker")
    control = answers.start(filter, worker)  # before torch is imported: an answer must not find it
    _warm_up()
    while (raw := worker.next_request(parent, IDLE)) is not None:
        reply = _in_forks(raw, control, filter)
        worker.write(len(reply).to_bytes(4, "big") + reply)


def _warm_up() -> None:
    """Import what torch would import at first use, when the fork can open no files any more."""
    torch = importlib.import_module("torch")
    importlib.import_module("torch.nn.functional")
    torch.set_num_threads(1)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    repr(torch.einsum("ij,jk->ik", x, x))
    repr(x.float() @ x.float())
    x.numpy().tobytes()


def _in_forks(raw: bytes, control: socket.socket, filter: Any) -> bytes:
    answers, worker = sys.modules["answer_worker"], sys.modules["worker"]
    length = int.from_bytes(raw[:4], "big")
    request = json.loads(raw[4 : 4 + length])
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setpgid(0, 0)
            confine = sys.modules["confine"].confine
            tensors = list(_tensors(request, raw[4 + length :]))
            by_kernel = confine(request, [ours.fileno(), writing], filter, worker.limit_memory)
            worker.write(_answer(request, tensors, ours.fileno(), by_kernel), writing)
        except MemoryError:
            os._exit(NO_MEMORY)
        except BaseException:  # a message that no answer sends by itself
            os._exit(CRASHED)
        finally:
            os._exit(0)
    os.close(writing)
    ours.close()
    answers.ask(control, {name: value for name, value in request.items() if name != "tensors"}, theirs.fileno())
    theirs.close()
    reply, late = _collect(reading, request["reply"], time.monotonic() + request["wall"] + GRACE)
    os.close(reading)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)  # nothing of it is left, whatever it started
    status, of_answer = os.waitpid(pid, 0)[1], answers.end(control)
    if not late and len(reply) >= 4 and 4 + int.from_bytes(reply[:4], "big") <= len(reply) <= request["reply"]:
        return reply
    if not late and reply == b"\0":  # the answer's process has ended before it had returned
        status = of_answer
    return _encode({"problem": {"kind": "time" if late else _ending(status, len(reply) > request["reply"])}})


def _collect(pipe: int, most: int, deadline: float) -> tuple[bytes, bool]:
    """What comes through the pipe, at most a little more than `most` bytes, and whether the deadline passed."""
    found = bytearray()
    while len(found) <= most:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return bytes(found), True
        if not (part := os.read(pipe, 1 << 20)):
            break
        found += part
    return bytes(found), False


def _ending(status: int, too_long: bool) -> str:
    if too_long:
        return "long"
    if os.WIFSIGNALED(status):
        return "time" if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU) else "crash"
    return {NO_MEMORY: "memory", CRASHED: "crash"}.get(os.WEXITSTATUS(status), "exit")


def _encode(answer: dict[str, Any], tensors: bytes = b"") -> bytes:
    head = json.dumps(answer).encode()
    return len(head).to_bytes(4, "big") + head + tensors


# ── inside the fork ─────────────────────────────────────────────────────────────────────────────────────────────────


def _tensors(request: dict[str, Any], data: bytes) -> Iterator[Any]:
    torch = sys.modules["torch"]
    for about in request["tensors"]:
        dtype = getattr(torch, about["dtype"])
        part = bytearray(data[about["start"] : about["end"]])
        flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        yield flat.clone().reshape(about["shape"])


def _answer(request: dict[str, Any], given: list[Any], pipe: int, by_kernel: bool) -> bytes:
    """Compute for the answer until it has returned, then encode what it returned and which arguments it changed."""
    torch, link = sys.modules["torch"], sys.modules["link"]
    with torch.inference_mode():  # there is nothing to differentiate
        server = Torch([x.clone() for x in given])
        while True:
            try:
                message = link.receive(pipe)
            except EOFError:
                return b"\0"
            if isinstance(message, list) and message[:1] == ["end"]:
                break
            link.send(pipe, server.reply(message))
        found, tensors = message[1], list[bytes]()
        answer: dict[str, Any] = {"printed": found["printed"], "kernel": by_kernel, "outputs": []}
        if found["problem"] is not None:
            return _encode({**answer, "problem": found["problem"]})
        try:
            for numbers, names in zip(found["outputs"], request["returns"], strict=True):
                pairs = zip(_flat(names), numbers, strict=True)
                answer["outputs"].append([_output(server, n, name, tensors, request["reply"]) for name, n in pairs])
        except Refused as reason:
            return _encode({**answer, "problem": {"kind": "returned", "message": str(reason)}})
        changed = {n for n, x in enumerate(given) if not torch.equal(server.given[n], x)}
        arguments = zip(*request["cases"], strict=True)
        named = zip(request["arguments"], arguments, strict=True)
        answer["changed"] = [name for name, cases in named if any(changed & set(_numbers(x)) for x in cases)]
        return _encode(answer, b"".join(tensors))


class Torch:
    """What an answer can use of torch: functions and methods by their names, tensors by their numbers."""

    def __init__(self, given: list[Any]):
        self.given = given
        self.tensors = dict(enumerate(given))
        self._count = len(given)
        self._torch = sys.modules["torch"]
        self._homes = {name: importlib.import_module(name) for name in SPACES}
        functions = {*dir(self._torch._C._VariableFunctions), *self._torch.functional.__all__, "manual_seed"}
        self._functions = {"torch": functions - {*FILES}}

    def reply(self, message: list[Any]) -> dict[str, Any]:
        try:
            what, space, name, *rest = message
            value = self._find(space, name)[0] if what == "look" else self._call(space, name, *rest)
            return {"value": sys.modules["link"].encode(value, self._pack)}
        except Exception as reason:
            return {"error": [type(reason).__name__, str(reason)[:2000]]}

    def _find(self, space: str, name: str) -> tuple[Any, Any]:
        """What the name is there (function, method, property, module, or its value), and itself."""
        torch = self._torch
        operator = space == "Tensor" and name in sys.modules["remote_torch"].OPERATORS
        if DERIVES.search(name):
            raise Forbidden(name)
        shown = f"a tensor's {name}" if space == "Tensor" else f"{space}.{name}"
        refused = Refused(f"{shown} is refused: an answer can use torch's functions and methods on tensors")
        if space not in ("Tensor", *SPACES) or (name.startswith("_") and not operator):
            raise refused
        if space == "Tensor":
            found = inspect.getattr_static(torch.Tensor, name, None)
            if found is None:
                raise AttributeError(f"'Tensor' object has no attribute {name!r}")
            method = callable(getattr(torch.Tensor, name))
            return ("method", getattr(torch.Tensor, name)) if method else ("property", lambda x: getattr(x, name))
        if f"{space}.{name}" in SPACES:
            return "module", None
        found = vars(self._homes[space]).get(name)
        if found is None:
            raise AttributeError(f"module {space!r} has no attribute {name!r}")
        if isinstance(found, torch.dtype | float):
            return found, found
        allowed = (
            name in self._functions["torch"] if space == "torch" else callable(found) and not inspect.isclass(found)
        )
        if not allowed or space == "torch.nn":
            raise refused
        return "function", found

    def _call(self, space: str, name: str, arguments: Any, options: Any, freed: list[int]) -> Any:
        function = self._find(space, name)[1]
        decode = sys.modules["link"].decode
        given, named = decode(arguments, self._unpack), dict(decode(options, self._unpack))
        for number in freed:
            self.tensors.pop(number, None)
        for option in named:
            if DERIVES.search(option):
                raise Forbidden(option)
        if space == "Tensor" and not isinstance(given[0], self._torch.Tensor):
            raise TypeError(f"{name} is a method of tensors")
        return function(*given, **named)

    def _unpack(self, kind: str, parts: list[Any]) -> Any:
        if kind == "tensor":
            return self.tensors[parts[0]]
        found = getattr(self._torch, parts[0]) if kind == "dtype" else None
        if not isinstance(found, self._torch.dtype):
            raise TypeError(f"torch does not take a {kind} here")
        return found

    def _pack(self, x: Any) -> list[Any]:
        torch, encode = self._torch, sys.modules["link"].encode
        if isinstance(x, torch.Tensor):
            self.tensors[self._count] = x
            self._count += 1
            return ["tensor", self._count - 1]
        if isinstance(x, torch.dtype):
            return ["dtype", str(x).removeprefix("torch.")]
        if isinstance(x, torch.Size):
            return ["size", *x]
        if isinstance(x, tuple):
            names = [name for name, value in vars(type(x)).items() if inspect.ismemberdescriptor(value)]
            return ["fields", ["list", *names], encode(list(x), self._pack)]
        if isinstance(x, torch.device | torch.layout | torch.memory_format):
            return str(x)  # type: ignore[return-value]
        raise Refused(f"its result is a {type(x).__name__}: an answer can use tensors, numbers and text")


def _output(server: Torch, number: int | None, name: str, tensors: list[bytes], limit: int) -> dict[str, Any]:
    torch = sys.modules["torch"]
    if number is None:
        return {"name": name, "shape": None, "dtype": ""}
    x = server.tensors[number]
    if x.layout != torch.strided or x.device.type != "cpu" or x.is_complex() or x.is_quantized:
        raise Refused(f"{name} is not an ordinary tensor of real numbers: {x.dtype}, {x.layout}")
    if 8 * x.numel() + sum(map(len, tensors)) > limit // 2:
        raise Refused(f"{name} is too large: its shape is {tuple(x.shape)}")
    tensors.append(x.double().contiguous().numpy().tobytes())
    return {"name": name, "shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}


def _flat(names: list[Any]) -> Iterator[str]:
    for name in names:
        yield from _flat(name[1:]) if isinstance(name, list) else (name,)


def _numbers(x: dict[str, Any]) -> Iterator[int]:
    """The numbers of the tensors in a described argument."""
    if x["kind"] == "tensor":
        yield x["value"]
    elif x["kind"] != "plain":
        for item in x["value"]:
            yield from _numbers(item)


if __name__ == "__main__":
    main()

"""Compute for an answer: functions and methods of torch by their names, on tensors by their numbers.

Nothing here differentiates. The answer is in another process (answer_worker), so it cannot change what is refused, and what
it may send are names, numbers and text.
"""

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .confine import Refused
from .link import decode, encode, receive, send
from .remote_torch import OPERATORS, Forbidden

DERIVES = re.compile("backward|grad|vjp|jvp|jac|hess|dual|functorch|functional_call|^func$", re.IGNORECASE)
SPACES = ("torch", "torch.nn", "torch.nn.functional", "torch.linalg", "torch.special")
FILES = (
    "from_file",
    "from_numpy",
    "frombuffer",
)  # functions of torch that read something else than tensors and numbers


def warm_up() -> None:
    """Import what torch would import at first use, when the fork can open no files any more."""
    importlib.import_module("torch.nn.functional")
    torch.set_num_threads(1)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    repr(torch.einsum("ij,jk->ik", x, x))
    repr(x.float() @ x.float())
    x.numpy().tobytes()


def encoded(answer: dict[str, Any], data: bytes = b"") -> bytes:
    """A reply."""
    head = json.dumps(answer).encode()
    return len(head).to_bytes(4, "big") + head + data


def tensors(described: list[dict[str, Any]], data: bytes) -> Iterator[Tensor]:
    """The tensors of a request."""
    for about in described:
        dtype = getattr(torch, about["dtype"])
        part = bytearray(data[about["start"] : about["end"]])
        flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        yield flat.clone().reshape(about["shape"])


def serve(request: dict[str, Any], given: list[Tensor], pipe: int, by_kernel: bool) -> bytes:
    """Compute for the answer until it has returned, then encode what it returned and which arguments it changed."""
    with torch.inference_mode():  # there is nothing to differentiate
        server = Torch([x.clone() for x in given])
        while True:
            try:
                message = receive(pipe)
            except EOFError:
                return b"\0"
            if isinstance(message, list) and message[:1] == ["end"]:
                break
            send(pipe, server.reply(message))
        found, data = message[1], list[bytes]()
        answer: dict[str, Any] = {"printed": found["printed"], "kernel": by_kernel, "outputs": []}
        if found["problem"] is not None:
            return encoded({**answer, "problem": found["problem"]})
        try:
            for numbers, names in zip(found["outputs"], request["returns"], strict=True):
                pairs = zip(_flat(names), numbers, strict=True)
                answer["outputs"].append([_output(server, n, name, data, request["reply"]) for name, n in pairs])
        except Refused as reason:
            return encoded({**answer, "problem": {"kind": "returned", "message": str(reason)}})
        changed = {n for n, x in enumerate(given) if not torch.equal(server.given[n], x)}
        arguments = zip(*request["cases"], strict=True)
        named = zip(request["arguments"], arguments, strict=True)
        answer["changed"] = [name for name, cases in named if any(changed & set(_numbers(x)) for x in cases)]
        return encoded(answer, b"".join(data))


class Torch:
    """What an answer can use of torch: functions and methods by their names, tensors by their numbers."""

    def __init__(self, given: list[Tensor]):
        self.given = given
        self.tensors = dict(enumerate(given))
        self._count = len(given)
        self._homes = {name: importlib.import_module(name) for name in SPACES}
        self._functions = {*dir(torch._C._VariableFunctions), *torch.functional.__all__, "manual_seed"} - {*FILES}

    def reply(self, message: list[Any]) -> dict[str, Any]:
        try:
            what, space, name, *rest = message
            value = self._find(space, name)[0] if what == "look" else self._call(space, name, *rest)
            return {"value": encode(value, self._pack)}
        except Exception as reason:
            return {"error": [type(reason).__name__, str(reason)[:2000]]}

    def _find(self, space: str, name: str) -> tuple[Any, Any]:
        """What the name is there (function, method, property, module, or its value), and itself."""
        if DERIVES.search(name):
            raise Forbidden(name)
        shown = f"a tensor's {name}" if space == "Tensor" else f"{space}.{name}"
        refused = Refused(f"{shown} is refused: an answer can use torch's functions and methods on tensors")
        if space not in ("Tensor", *SPACES) or (
            name.startswith("_") and (space, name in OPERATORS) != ("Tensor", True)
        ):
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
        function = name in self._functions if space == "torch" else callable(found) and not inspect.isclass(found)
        if not function or space == "torch.nn":
            raise refused
        return "function", found

    def _call(self, space: str, name: str, arguments: Any, options: Any, freed: list[int]) -> Any:
        function = self._find(space, name)[1]
        given, named = decode(arguments, self._unpack), dict(decode(options, self._unpack))
        for number in freed:
            self.tensors.pop(number, None)
        for option in named:
            if DERIVES.search(option):
                raise Forbidden(option)
        if space == "Tensor" and not isinstance(given[0], torch.Tensor):
            raise TypeError(f"{name} is a method of tensors")
        return function(*given, **named)

    def _unpack(self, kind: str, parts: list[Any]) -> Any:
        if kind == "tensor":
            return self.tensors[parts[0]]
        found = getattr(torch, parts[0]) if kind == "dtype" else None
        if not isinstance(found, torch.dtype):
            raise TypeError(f"torch does not take a {kind} here")
        return found

    def _pack(self, x: Any) -> list[Any]:
        if isinstance(x, torch.Tensor):
            if x.is_complex():  # a step along i differentiates any function
                raise Refused("a complex result is refused: an answer computes with real numbers")
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


def _output(server: Torch, number: int | None, name: str, data: list[bytes], limit: int) -> dict[str, Any]:
    if number is None:
        return {"name": name, "shape": None, "dtype": ""}
    x = server.tensors[number]
    if x.layout != torch.strided or x.device.type != "cpu" or x.is_complex() or x.is_quantized:
        raise Refused(f"{name} is not an ordinary tensor of real numbers: {x.dtype}, {x.layout}")
    if 8 * x.numel() + sum(map(len, data)) > limit // 2:
        raise Refused(f"{name} is too large: its shape is {tuple(x.shape)}")
    data.append(x.double().contiguous().numpy().tobytes())
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

"""Run Python functions on tensors in processes with limits on time and memory, and without files and network.

The code is somebody's answer to an exercise: it may loop, exhaust memory, crash or exit. `run` reports each of these as a
Problem; nothing that the code does reaches this process. One child, started at first use, serves all requests, each in two
forks (see tensor_worker). It exits with this process, or when it has had nothing to do for some minutes.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import HandgradError, printable
from . import confine, tensor_worker
from .child import Child, ChildExited, Service

START_TIMEOUT = 300  # seconds for the child to import torch; generous, because the machine may be busy
KINDS = ("syntax", "forbidden", "refused", "missing", "unwritten", "returned", "exception", "exit", "time", "memory",
         "crash", "long")  # fmt: skip
MAX_HEAD = 4_000_000  # bytes of a reply besides its tensors
DTYPES = {str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)}
Names = list[Any]  # names of outputs; a list in it is a tuple: its name, then the names of its fields


class Limits(NamedTuple):
    cpu: float = 10.0  # seconds of processor time
    wall: float = 60.0  # seconds in all
    memory: int = 1_000_000_000  # bytes besides what torch takes
    reply: int = 400_000_000  # bytes of all outputs
    printed: int = 2000  # characters


@dataclass(frozen=True)
class Problem:
    """Why there is no result."""

    kind: str  # one of KINDS
    message: str
    line: int | None = None  # of the code, from 1


class Output(NamedTuple):
    name: str
    value: Tensor | None  # in float64; None for `...`, which stands for what is not written yet
    dtype: str  # that it was returned in


@dataclass(frozen=True)
class Run:
    """The outputs of each case, or a problem."""

    cases: list[list[Output]] = field(default_factory=list)
    problem: Problem | None = None
    printed: str = ""
    changed: tuple[str, ...] = ()  # arguments that the function changed in place
    kernel: bool = True  # whether the kernel confined the processes


def run(
    code: str,
    function: str,
    arguments: Sequence[str],
    cases: Sequence[Sequence[Any]],
    returns: Sequence[Names],
    *,
    modules: Sequence[str] = (),
    hidden: Sequence[str] = (),
    limits: Limits = Limits(),  # noqa: B008
) -> Run:
    """Execute the code and call its function once for each case.

    arguments   the names of the function's arguments
    cases       their values: tensors, numbers, text, lists, and NamedTuples of `modules`
    returns     the names of what it returns in each case
    modules     modules of handgrad, or names in them, that the code can import besides torch and math
    hidden      functions of these modules, by their full names, that the code must not find there
    """
    tensors: list[bytes] = []
    described: list[dict[str, Any]] = []
    encoded = [[_encode(x, tensors, described) for x in case] for case in cases]
    head = json.dumps(
        {
            "code": code, "function": function, "arguments": list(arguments), "cases": encoded, "tensors": described,
            "returns": list(returns), "modules": list(modules), "hidden": list(hidden), **limits._asdict(),
        },
        ensure_ascii=True,
    ).encode()  # fmt: skip
    request = b"".join([len(head).to_bytes(4, "big"), head, *tensors])
    try:
        return _decode(_service.call(request, START_TIMEOUT + limits.wall), limits, arguments, returns)
    except ChildExited as reason:
        raise HandgradError(f"the sandbox process ended (exit status {reason.args[0]})") from None


def _encode(x: Any, tensors: list[bytes], described: list[dict[str, Any]]) -> dict[str, Any]:
    if isinstance(x, Tensor):
        raw = x.detach().contiguous().numpy().tobytes()
        start = described[-1]["end"] if described else 0
        dtype = str(x.dtype).removeprefix("torch.")
        described.append({"dtype": dtype, "shape": list(x.shape), "start": start, "end": start + len(raw)})
        tensors.append(raw)
        return {"kind": "tensor", "value": len(described) - 1}
    if isinstance(x, tuple | list):
        kind = "list" if isinstance(x, list) else f"{type(x).__module__}.{type(x).__name__}"
        return {"kind": kind, "value": [_encode(item, tensors, described) for item in x]}
    return {"kind": "plain", "value": x}


def _start() -> Child:
    folders = [folder for folder in sys.path if folder and os.path.isdir(folder)]
    environment = {"OMP_NUM_THREADS": "1"}
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]  # torch may need it
    return Child(tensor_worker.__file__, folders, environment)


_service = Service(_start)


def confined_by_kernel() -> bool:
    """Whether this system can confine an answer's processes so that code written to break out stays in as well."""
    return confine.kernel_filter() is not None


def _decode(reply: bytes, limits: Limits, arguments: Sequence[str], returns: Sequence[Names]) -> Run:
    """Read a reply. It comes from a process that computed for untrusted code, so nothing about it is taken for granted."""
    try:
        length = int.from_bytes(reply[:4], "big")
        if length > MAX_HEAD:
            raise ValueError
        answer = json.loads(reply[4 : 4 + length])
        printed = printable("".join(map(str, answer.get("printed", ()))), limits.printed)
        if (problem := answer.get("problem")) is not None:
            return Run(problem=_problem(problem, limits), printed=printed)
        data, start = memoryview(reply)[4 + length :], 0
        cases: list[list[Output]] = []
        for outputs, names in zip(answer["outputs"], returns, strict=True):
            cases.append([])
            for about, name in zip(outputs, _flat(names), strict=True):
                if about["shape"] is None:
                    cases[-1].append(Output(name, None, ""))
                    continue
                shape = [int(n) for n in about["shape"]]
                end = start + 8 * int(torch.Size(shape).numel())
                raw = bytearray(data[start:end])
                flat = torch.frombuffer(raw, dtype=torch.float64) if raw else torch.empty(0, dtype=torch.float64)
                if about["dtype"] not in DTYPES:
                    raise TypeError
                cases[-1].append(Output(name, flat.reshape(shape), about["dtype"]))
                start = end
        changed = tuple(name for name in arguments if name in answer["changed"])
        return Run(cases, None, printed, changed, answer["kernel"] is True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError, OverflowError, MemoryError):
        return Run(problem=Problem("crash", "the answer's process sent a reply that cannot be read"))


def _flat(names: Names) -> Iterator[str]:
    """The names of single outputs: a list is a tuple's name, then those of its fields."""
    for name in names:
        if isinstance(name, list):
            yield from _flat(name[1:])
        else:
            yield str(name)


def _problem(given: Mapping[str, Any], limits: Limits) -> Problem:
    kind = given.get("kind") if given.get("kind") in KINDS else "crash"
    line = given.get("line")
    texts = {
        "time": f"it takes too long: more than {limits.cpu:g} s of processor time, or {limits.wall:g} s in all; is there a"
        " loop without an end?",
        "memory": f"it needs more than {limits.memory // 1_000_000:,} MB of memory",
        "exit": "it ended its process instead of returning",
        "crash": "it crashed its process",
        "long": f"it returned more than {limits.reply // 1_000_000:,} MB",
    }
    message = texts.get(str(kind)) or printable(str(given.get("message", "")), 600)
    return Problem(str(kind), message, line if isinstance(line, int) else None)

"""Messages between an answer's process and the one that computes for it: JSON, preceded by its length in four bytes.

A value is a number, text, None, or a list whose first entry says what it is: a list, a tuple, a slice …, or what the two
sides call by a name: a tensor, a dtype.
"""

import json
import os
from collections.abc import Callable
from typing import Any

LARGEST = 200_000_000  # bytes of a message


def send(pipe: int, message: Any) -> None:
    raw = json.dumps(message).encode()
    data = memoryview(len(raw).to_bytes(4, "big") + raw)
    while data:
        data = data[os.write(pipe, data) :]


def receive(pipe: int) -> Any:
    """The next message. Raises EOFError if the other side has ended."""
    size = int.from_bytes(_read(pipe, 4), "big")
    if size > LARGEST:
        raise ValueError(f"a message of {size:,} bytes")
    return json.loads(_read(pipe, size))


def _read(pipe: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(pipe, min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def encode(x: Any, pack: Callable[[Any], list[Any]]) -> Any:
    """pack   what is neither plain nor a container, as a list that begins with its kind"""
    if x is None or isinstance(x, bool | str):
        return x
    if type(x) in (int, float):
        return x
    if isinstance(x, slice):
        return ["slice", *(encode(part, pack) for part in (x.start, x.stop, x.step))]
    for kind, value in (("...", ...), ("NotImplemented", NotImplemented)):
        if x is value:
            return [kind]
    if isinstance(x, complex):
        return ["complex", x.real, x.imag]
    if type(x) in (list, tuple):
        return [type(x).__name__, *(encode(item, pack) for item in x)]
    return pack(x)


def decode(x: Any, unpack: Callable[[str, list[Any]], Any]) -> Any:
    """unpack   the value of a kind that only one side knows, from its decoded parts"""
    if not isinstance(x, list):
        return x
    kind, parts = str(x[0]), [decode(part, unpack) for part in x[1:]]
    known: dict[str, Callable[[], Any]] = {
        "list": lambda: parts, "tuple": lambda: tuple(parts), "slice": lambda: slice(*parts),
        "complex": lambda: complex(*parts), "...": lambda: ..., "NotImplemented": lambda: NotImplemented,
    }  # fmt: skip
    return known[kind]() if kind in known else unpack(kind, parts)

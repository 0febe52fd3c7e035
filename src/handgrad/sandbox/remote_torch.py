"""The module `torch` of an answer: every function and method is computed by another process, which decides what there is.

The answer's own process has no torch. So there is nothing in it that could differentiate, whatever the answer looks for.
"""

import builtins
import sys
import types
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

from .confine import Refused
from .link import decode, encode, receive, send

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
OTHERS = ("lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "abs", "invert", "getitem", "setitem", "len", "bool", "int",
          "float", "complex", "index", "contains", "repr", "format", "reversed")  # fmt: skip
OPERATORS = {f"__{form}{name}__" for name in BINARY for form in ("", "r", "i")} | {f"__{name}__" for name in OTHERS}


class Forbidden(Exception):
    """The answer used something that differentiates. Argument: its name."""


class dtype:
    """A dtype of torch, by its name."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    @property
    def is_floating_point(self) -> bool:
        return "float" in self.name


class Size(tuple[int, ...]):
    def numel(self) -> int:
        count = 1
        for n in self:
            count *= n
        return count

    def __repr__(self) -> str:
        return f"torch.Size({list(self)})"


class Tensor:
    """A tensor that the other process holds under a number."""

    __slots__ = ("__weakref__", "_number")
    _number: int

    def __getattr__(self, name: str) -> Any:
        if look("Tensor", name) == "property":
            return ask("Tensor", name, (self,), {})
        return partial(_call, "Tensor", name, self)

    def __setattr__(self, name: str, value: Any) -> None:
        look("Tensor", name)
        raise AttributeError(f"{name} of a tensor cannot be set; to change its entries, write x[...] = …")

    def __del__(self) -> None:
        freed.append(self._number)

    def __iter__(self) -> Iterator[Any]:
        return iter(ask("Tensor", "unbind", (self,), {}))

    def __hash__(self) -> int:
        return id(self)


dtypes = cache(dtype)
pipe = -1  # to the other process
freed: list[int] = []  # numbers of tensors that the answer has dropped


def ask(space: str, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Have a function of torch computed."""
    sent = ["call", space, name, encode(list(arguments), _pack), encode(list(options.items()), _pack), list(freed)]
    freed.clear()
    return _exchange(sent)


@cache
def look(space: str, name: str) -> Any:
    """What the name is there: function, method, property, module, or its value."""
    return _exchange(["look", space, name])


def _exchange(message: list[Any]) -> Any:
    send(pipe, message)
    answer = receive(pipe)
    if "error" not in answer:
        return decode(answer["value"], _unpack)
    kind, text = answer["error"]
    known = {"Forbidden": Forbidden, "Refused": Refused}.get(kind) or getattr(builtins, kind, None)
    raise (known if isinstance(known, type) and issubclass(known, Exception) else RuntimeError)(text)


def _pack(x: Any) -> list[Any]:
    if isinstance(x, Tensor):
        return ["tensor", x._number]
    if isinstance(x, dtype):
        return ["dtype", x.name]
    if isinstance(x, tuple | list | range | map | zip | Iterator):
        return encode(list(x) if not isinstance(x, tuple) else tuple(x), _pack)  # type: ignore[no-any-return]
    if isinstance(x, int | float):
        return encode(int(x) if isinstance(x, int) else float(x), _pack)  # type: ignore[no-any-return]
    raise TypeError(f"torch does not take a {type(x).__name__} here")


def _unpack(kind: str, parts: list[Any]) -> Any:
    if kind == "tensor":
        return tensor(parts[0])
    if kind == "dtype":
        return dtypes(parts[0])
    if kind == "size":
        return Size(parts)
    if kind == "fields":
        names, values = parts
        return namedtuple("result", names)(*values)
    raise ValueError(kind)


def tensor(number: int) -> Tensor:
    made = Tensor.__new__(Tensor)
    object.__setattr__(made, "_number", number)
    return made


def _call(space: str, name: str, /, *arguments: Any, **options: Any) -> Any:
    return ask(space, name, arguments, options)


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Tensor, *arguments: Any) -> Any:
        try:
            encode(list(arguments), _pack)
        except TypeError:
            if name in ("__getitem__", "__setitem__", "__contains__", "__format__"):
                raise
            return NotImplemented
        return ask("Tensor", name, (self, *arguments), {})

    return operate


for _name in OPERATORS:
    setattr(Tensor, _name, _operator(_name))


class Space(types.ModuleType):
    """A module of torch: its names are looked up in the other process."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = look(self.__name__, name)
        if found == "module":
            return space(f"{self.__name__}.{name}")
        return partial(_call, self.__name__, name) if found == "function" else found


def space(name: str) -> Space:
    if name not in sys.modules:
        made: Any = Space(name)
        made.__path__ = []
        sys.modules[name] = made
    return sys.modules[name]  # type: ignore[return-value]


def install() -> None:
    """Make `import torch` give these modules."""
    torch: Any = space("torch")
    torch.Tensor, torch.dtype, torch.Size = Tensor, dtype, Size
    torch.is_tensor = lambda x: isinstance(x, Tensor)
    torch.no_grad = torch.inference_mode = nullcontext  # nothing here has a gradient
    torch.nn = space("torch.nn")
    torch.nn.functional = space("torch.nn.functional")

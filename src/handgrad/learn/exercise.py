"""`Exercise`: one task with its texts; `Case`: the numbers on which an answer is judged."""

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ..ledger.check import RandomInputs

FUNCTION = "backward"  # the function that the reader writes
Names = list[Any]  # names of what it returns; a list in it is a tuple: its name, then the names of its fields


@dataclass(frozen=True)
class Case:
    """Arguments for the reader's function, and what is needed to know the right answer.

    f, leaves, upstream   what it must return are the gradients of upstream · f(leaves) (of f, if upstream is None), each
                          under the name of the returned value
    terms, mistakes, unsummed   by the name of a returned value, for `audit.diagnosis.diagnose`
    scales                named numbers that may be a factor too many or too few
    """

    label: str
    arguments: tuple[Any, ...]
    f: Callable[..., Tensor]
    leaves: dict[str, Tensor]
    upstream: Tensor | None
    terms: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    mistakes: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    unsummed: Mapping[str, Tensor] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    returns: Names | None = None  # if not simply the names of the leaves

    @property
    def names(self) -> Names:
        return list(self.leaves) if self.returns is None else self.returns


class Line(NamedTuple):
    """An argument or a returned value."""

    name: str
    shape: str
    meaning: str
    type: str = "Tensor"


@dataclass(frozen=True)
class Exercise:
    """A task: write `backward`."""

    name: str
    title: str
    text: str  # what the layer computes and what to write; indented lines are formulas
    arguments: tuple[Line, ...]
    returns: tuple[Line, ...]
    imports: tuple[str, ...]  # lines of the file to edit, besides those of torch
    hints: tuple[str, ...]
    quoted: tuple[Callable[..., object], ...]  # functions of `paper` that the solution consists of
    solution_body: str  # of `backward` in the solution, which calls them
    page: str  # of docs/layers that derives it
    case: Callable[..., Case]  # from the tensors of a layer
    random: Callable[[RandomInputs], Case]
    stub: str = ""  # body of `backward` in the file to edit; made from `returns` if empty

    def signature(self) -> str:
        arguments = ", ".join(f"{line.name}: {line.type}" for line in self.arguments)
        types = ", ".join(line.type for line in self.returns)
        return f"def {FUNCTION}({arguments}) -> {types if len(self.returns) == 1 else f'tuple[{types}]'}:"

    def starter(self) -> str:
        """The code to edit: imports, and `backward` with `...` for what is missing."""
        names = [line.name for line in self.returns]
        lines = [f"{name} = ...  # {line.meaning}" for name, line in zip(names, self.returns, strict=True)]
        body = self.stub or "\n".join([*lines, f"return {', '.join(names)}"])
        return f"{self._header()}\n\n\n{self.signature()}\n{textwrap.indent(body, '    ')}\n"

    def solution(self) -> str:
        """Code that is right, quoted from `paper`."""
        sources = [self._quote(function) for function in self.quoted]
        own = f"{self.signature()}\n{textwrap.indent(self.solution_body, '    ')}"
        return "\n\n\n".join([self._header(), *sources, own]) + "\n"

    def _header(self) -> str:
        ours = [line for line in self.imports if "handgrad" in line]
        others = ["import torch", "from torch import Tensor"]
        standard = [line for line in self.imports if "handgrad" not in line]
        return "\n\n".join("\n".join(group) for group in (standard, others, ours) if group)

    def _quote(self, function: Callable[..., object]) -> str:
        """The source of a function; one that has the name of the answer gets another."""
        source = inspect.getsource(function).strip()
        return source.replace(f"def {FUNCTION}(", f"def {self.name}_{FUNCTION}(", 1)

    def task(self) -> str:
        """The text with the tables of arguments and returned values, 100 characters wide."""
        tables = f"Arguments:\n{_columns(self.arguments)}", f"Return:\n{_columns(self.returns)}"
        filled = (p if p.startswith(" ") else textwrap.fill(p, 100) for p in self.paragraphs())
        return "\n\n".join([*filled, *tables])

    def paragraphs(self) -> list[str]:
        """The text, each paragraph as one line; formulas keep their lines."""
        parts = textwrap.dedent(self.text).strip().split("\n\n")
        return [part if part.startswith(" ") else " ".join(part.split()) for part in parts]

    def importable(self) -> list[str]:
        """What an answer can import: modules, and names of modules."""
        found = []
        for line in self.imports:
            if line.startswith("from handgrad."):
                module, _, names = line.removeprefix("from ").partition(" import ")
                found += [f"{module}.{name.strip()}" for name in names.split(",")]
        return found

    def hidden(self) -> list[str]:
        """The functions that are the solution, which an answer must not find in the modules that it can import."""
        return [f"{function.__module__}.{function.__name__}" for function in self.quoted]


def _columns(lines: Sequence[Line]) -> str:
    names, shapes = (
        max(len(text) for text in column) for column in ([x.name for x in lines], [x.shape for x in lines])
    )
    return "\n".join(f"  {x.name:<{names}}  {x.shape:<{shapes}}  {x.meaning}" for x in lines)

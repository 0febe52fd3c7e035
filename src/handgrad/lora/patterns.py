"""Patterns that select layers: names, ends of names, regular expressions."""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from ..families import HEADS
from ..model.names import any_block
from ..sandbox import client as sandbox

T = TypeVar("T")
CHOOSING = ("gate", "router", "shared_expert_gate")  # routers: a few outputs, in which a low rank saves nothing


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern is the name, the end of it after a dot, or a regular expression for either."""
    if _is_plain(pattern):
        begin = len(name) - len(pattern)
        end = name[begin:] if begin == 0 or (begin > 0 and name[begin - 1] == ".") else None
        return end is not None and (end == pattern or all(a in (b, ".") for a, b in zip(pattern, end, strict=True)))
    if (pattern, name) not in _matched:
        prepare_matches([pattern], [name])
    return _matched[pattern, name]


_matched: dict[tuple[str, str], bool] = {}  # results of regular expressions on names


def prepare_matches(patterns: Iterable[str], names: Iterable[str]) -> None:
    """Match all regular expressions against all names at once and cache the results for `matches`. The expressions can come
    from a file, so a child process runs them; one that takes too long raises."""
    expressions = [pattern for pattern in dict.fromkeys(patterns) if not _is_plain(pattern)]
    names = list(names)
    if not expressions or (names and all((pattern, name) in _matched for pattern in expressions for name in names)):
        return
    if len(_matched) > 1_000_000:
        _matched.clear()
    for pattern, found in zip(expressions, sandbox.match(expressions, names), strict=True):
        _matched.update({(pattern, name): name in found for name in names})


def _is_plain(pattern: str) -> bool:
    return re.fullmatch(r"[\w.-]*", pattern) is not None


def is_inside(path: str, end: str) -> bool:
    """Whether a layer is in a module whose name ends like this, as PEFT chooses modules_to_save: norm means
    model.layers.0.input_layernorm too, and mlp every layer of model.layers.0.mlp."""
    return any(outer.endswith(end) for outer in itertools.accumulate(path.split("."), "{}.{}".format))


def split_names(given: Iterable[str]) -> tuple[str, ...]:
    """Split at commas, except inside brackets, where a comma belongs to a regular expression."""
    names: dict[str, None] = {}
    for text in given:
        depth, start = 0, 0
        for i, char in enumerate(f"{text},"):
            depth += (char in "([{") - (char in ")]}")
            if char == "," and (depth <= 0 or i == len(text)):
                names[text[start:i].strip()] = None
                start = i + 1
    return tuple(name for name in names if name)


def matching(pattern: str, names: list[str]) -> list[str]:
    """The names that a pattern selects; "all-linear" selects every layer but the head and what chooses among experts."""
    if pattern == "all-linear":
        return [name for name in names if name not in HEADS and name.rpartition(".")[2] not in CHOOSING]
    return [name for name in names if matches(pattern, name)]


def alternatives(pattern: str) -> list[tuple[str, str]]:
    """Every alternative of a regular expression, with the expression reduced to it: "a|b" → ("a", "a"), ("b", "b")."""
    found = []
    starts: list[int] = [0]  # where the open groups begin, the innermost last
    bars: list[list[int]] = [[]]

    def close(end: int) -> None:
        start, inside = starts.pop(), bars.pop()
        if inside:
            for begin, stop in itertools.pairwise([start - 1, *inside, end]):
                one = pattern[begin + 1 : stop]
                found.append((one, pattern[:start] + one + pattern[end:]))

    i = 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 1
        elif char == "[":  # skip the set; a ] in first position belongs to it
            i = pattern.find("]", i + 2 + (pattern[i + 1 : i + 2] == "^"))
            if i < 0:
                return []
        elif char == "(":
            opened = re.match(r"\((\?[a-zA-Z-]*:|\?P<\w+>|\?<?[=!])?", pattern[i:])
            starts.append(i + (opened.end() if opened else 1))
            bars.append([])
        elif char == ")" and len(starts) > 1:
            close(i)
        elif char == "|":
            bars[-1].append(i)
        i += 1
    close(len(pattern))
    return found


def shortest(values: Mapping[str, T], names: Iterable[str], least: int = 1) -> dict[str, T]:
    """The shortest ends of names, of at least so many parts, with their values, such that no other of the names ends so:
    c_attn for that of every block if their values are equal, else complete names."""

    def ends(name: str) -> list[str]:
        parts = name.split(".")
        return [".".join(parts[-n:]) for n in range(least, 3)] + [name]

    found: dict[str, set[T | None]] = {}
    for name in names:
        for end in ends(name):
            found.setdefault(end, set()).add(values.get(name))
    return {next((end for end in ends(name) if len(found[end]) == 1), name): x for name, x in values.items()}


def one_block(names: list[str]) -> list[str]:
    """Replace block numbers by * and drop repetitions."""
    return list(dict.fromkeys(map(any_block, names)))

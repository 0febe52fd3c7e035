"""Which layers a user means: names, ends of names, regular expressions."""

import itertools
import re
from collections.abc import Iterable

from ..sandbox import client as sandbox


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern is the name, the end of it after a dot, or a regular expression for either."""
    if _is_plain(pattern):
        begin = len(name) - len(pattern)
        end = name[begin:] if begin == 0 or (begin > 0 and name[begin - 1] == ".") else None
        return end is not None and (end == pattern or all(a in (b, ".") for a, b in zip(pattern, end, strict=True)))
    if (pattern, name) not in _matched:
        prepare_matches([pattern], [name])
    return _matched[pattern, name]


_matched: dict[tuple[str, str], bool] = {}  # regular expressions and names that were compared


def prepare_matches(patterns: Iterable[str], names: Iterable[str]) -> None:
    """Compare all regular expressions with all names at once, for `matches` to know. They can come from a file: a child
    process runs them, and one that takes too long is an error."""
    foreign = [pattern for pattern in dict.fromkeys(patterns) if not _is_plain(pattern)]
    names = list(names)
    if not foreign or (names and all((pattern, name) in _matched for pattern in foreign for name in names)):
        return
    if len(_matched) > 1_000_000:
        _matched.clear()
    for pattern, found in zip(foreign, sandbox.match(foreign, names), strict=True):
        _matched.update({(pattern, name): name in found for name in names})


def _is_plain(pattern: str) -> bool:
    return re.fullmatch(r"[\w.-]*", pattern) is not None


def split_names(given: Iterable[str]) -> tuple[str, ...]:
    """Names given one by one or with commas; a comma inside brackets belongs to a regular expression."""
    names: dict[str, None] = {}
    for text in given:
        depth, start = 0, 0
        for at, sign in enumerate(f"{text},"):
            depth += (sign in "([{") - (sign in ")]}")
            if sign == "," and (depth <= 0 or at == len(text)):
                names[text[start:at].strip()] = None
                start = at + 1
    return tuple(name for name in names if name)


def matching(pattern: str, names: list[str]) -> list[str]:
    if pattern == "all-linear":
        return [name for name in names if name != "lm_head"]
    return [name for name in names if matches(pattern, name)]


def alternatives(pattern: str) -> list[tuple[str, str]]:
    """Every alternative of every group, and of the whole, with the pattern that has only this one in its place."""
    found = []
    starts: list[int] = [0]  # where the groups around this place begin, the innermost last
    bars: list[list[int]] = [[]]

    def close(end: int) -> None:
        start, inside = starts.pop(), bars.pop()
        if inside:
            for begin, stop in itertools.pairwise([start - 1, *inside, end]):
                one = pattern[begin + 1 : stop]
                found.append((one, pattern[:start] + one + pattern[end:]))

    at = 0
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\":
            at += 1
        elif sign == "[":  # up to its end; a ] that comes first belongs to it
            at = pattern.find("]", at + 2 + (pattern[at + 1 : at + 2] == "^"))
            if at < 0:
                return []
        elif sign == "(":
            opened = re.match(r"\((\?[a-zA-Z-]*:|\?P<\w+>|\?<?[=!])?", pattern[at:])
            starts.append(at + (opened.end() if opened else 1))
            bars.append([])
        elif sign == ")" and len(starts) > 1:
            close(at)
        elif sign == "|":
            bars[-1].append(at)
        at += 1
    close(len(pattern))
    return found


def shortened(names: list[str]) -> list[str]:
    """With one block standing for all."""
    return list(dict.fromkeys(re.sub(r"\.h\.\d+\.", ".h.*.", name) for name in names))

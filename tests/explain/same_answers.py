"""Whether two answers are the same: of the same structure, in the same words, with the same numbers up to rounding. Numbers
inside sentences and the cells of pictures are compared as numbers."""

import base64
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Path = tuple[str | int, ...]
NUMBER = re.compile(r"⟦(-?[\d.e+-]+|-?inf|nan)%?⟧")
OWN = ("id",)  # of a sentence: each side has its own
# What is compared with the size of something else: a mean with the entries, a difference of two values with these.
SIZES = {
    "mean": "most", "spread": "most", "least": "most", "sum": "value", "measured": "value", "predicted": "value",
    "gap": "value",
}  # fmt: skip
RANKED = {"gradients": ("name", "change", "before"), "neurons": ("neuron", "blame", "")}  # by their names, and by what


def differences(ours: Any, theirs: Any, tolerance: float) -> list[str]:
    """What differs, with its path; numbers by more than that, relative to the largest of their kind in the answer."""
    left, right = (dict(_leaves(_by_name(x))) for x in (ours, theirs))
    sizes: dict[Path, float] = {}
    for path, value in right.items():
        if _is_number(value):
            kind = _kind(path)
            sizes[kind] = max(sizes.get(kind, 0.0), abs(value))
    wrong = [f"{path}: only one side has it" for path in left.keys() ^ right.keys()]
    for path in left.keys() & right.keys():
        x, y = left[path], right[path]
        if path[-2:] == ("id", "words"):
            continue
        if isinstance(x, Tensor) and isinstance(y, Tensor):  # a cell may be rounded to the next of 127 steps
            allowed = (tolerance + 1.01 / 127) * sizes[_kind((*path[:-1], "scale"))]
            if x.shape != y.shape or (x - y).abs().max() > allowed:
                wrong.append(f"{path}: {x} and {y}")
        elif _is_number(x) and _is_number(y) and (isinstance(x, float) or isinstance(y, float)):
            if abs(x - y) > tolerance * max(sizes[kind] for kind in _kinds(path) if kind in sizes):
                wrong.append(f"{path}: {x} and {y}")
        elif x != y:
            wrong.append(f"{path}: {x!r} and {y!r}")
    return sorted(wrong) + _order(ours, tolerance)


def _leaves(x: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value by its path."""
    if isinstance(x, dict):
        yield (*path, "fields"), sorted(x)
        for name, value in x.items():
            if name == "q" and "pool" in x:
                yield (*path, name), _cells(x)
            else:
                yield from _leaves(value, (*path, name))
    elif isinstance(x, list):
        yield (*path, "length"), len(x)
        for i, value in enumerate(x):
            yield from _leaves(value, (*path, i))
    elif isinstance(x, str) and "digits" in path:
        yield path, float(x)
    elif isinstance(x, str):
        yield (*path, "words"), NUMBER.sub("⟦⟧", x)
        for i, found in enumerate(NUMBER.finditer(x)):
            yield (*path, i), float(found[1])
    else:
        yield path, x


def _cells(picture: dict[str, Any]) -> Tensor:
    steps = torch.frombuffer(bytearray(base64.b64decode(picture["q"])), dtype=torch.int8)
    return steps.double() * picture["scale"] / 127


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _kind(path: Path) -> Path:
    """What a number is compared with: those with the same names on their path."""
    *above, last = ["[]" if isinstance(name, int) else name for name in path]
    if "factors" not in above and (above[:1] == ["terms"] or above == ["rest"]):
        return ("value",)
    return (*above, SIZES.get(last, last))


def _kinds(path: Path) -> list[Path]:
    """The same, and of a number in a caption also what the answer is about."""
    return [_kind(path), ("value",)] if path[0] == "caption" else [_kind(path)]


def _by_name(x: Any) -> Any:
    """Rankings in the order of the names: what is equally large may be in another order."""
    if not isinstance(x, dict):
        return x
    return {
        name: sorted(value, key=lambda one: one[RANKED[name][0]])
        if name in RANKED and value and RANKED[name][0] in value[0]
        else value
        for name, value in x.items()
    }


def _order(x: Any, tolerance: float) -> list[str]:
    """Where a ranking is not in its order."""
    wrong = []
    for name, (key, large, small) in RANKED.items():
        items = x.get(name) if isinstance(x, dict) else None
        if items and key in items[0]:
            sizes = [abs(one[large]) / (one[small] or 1) if small else abs(one[large]) for one in items]
            late = [i for i in range(1, len(sizes)) if sizes[i] > sizes[i - 1] + tolerance * sizes[0]]
            wrong += [f"{name}: number {i} is larger than the one before" for i in late]
    return wrong

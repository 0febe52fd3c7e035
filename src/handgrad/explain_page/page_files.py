"""The files of the page: its HTML, its style sheet and its JavaScript modules, as the package contains them.

A file is named by its path below assets/: page.js, engine/attention.js.
"""

import posixpath
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

TYPES = {".css": "text/css", ".js": "text/javascript"}
IMPORT = re.compile(r'^import (\{[^}]*\}|\* as \w+) from "(\.[\w./]*\.js)";', re.M)


def asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


@cache
def served() -> dict[str, str]:
    """Return the media type of every file that the page loads, by its name."""
    names = sorted(_names(files(__package__) / "assets"))
    return {name: TYPES[suffix] for name in names for suffix in TYPES if name.endswith(suffix)}


def _names(folder: Traversable, above: str = "") -> Iterator[str]:
    for file in folder.iterdir():
        if file.is_dir():
            yield from _names(file, f"{above}{file.name}/")
        else:
            yield above + file.name


def imported(name: str, path: str) -> str:
    """The module that `name` imports from this path: engine/loss.js, ./matrix.js → engine/matrix.js"""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), path))


@cache
def modules(first: str = "page.js") -> tuple[str, ...]:
    """Return the JavaScript modules that page.js, or another one, needs, each after those it imports."""
    found: dict[str, None] = {}

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"modules import each other: {' → '.join((*above, name))}")
        if name not in found:
            for _, path in IMPORT.findall(asset(name)):
                add(imported(name, path), (*above, name))
            found[name] = None

    add(first, ())
    return tuple(found)

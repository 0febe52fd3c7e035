"""The files of the page: its HTML, its style sheet and its JavaScript modules, as the package contains them."""

import re
from functools import cache
from importlib.resources import files

TYPES = {".css": "text/css", ".js": "text/javascript"}
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";', re.M)


def asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


@cache
def served() -> dict[str, str]:
    """Return the media type of every file that the page loads, by its name."""
    names = sorted(file.name for file in (files(__package__) / "assets").iterdir())
    return {name: TYPES[suffix] for name in names for suffix in TYPES if name.endswith(suffix)}


@cache
def modules() -> tuple[str, ...]:
    """Return the JavaScript modules that page.js needs, each after those it imports."""
    found: dict[str, None] = {}

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"modules import each other: {' → '.join((*above, name))}")
        if name not in found:
            for other in _IMPORT.findall(asset(name)):
                add(other, (*above, name))
            found[name] = None

    add("page.js", ())
    return tuple(found)

"""Options of a run from a .toml or .yaml file."""

import tomllib
from pathlib import Path
from typing import Any, get_args

import yaml

from ..errors import HandgradError, MissingError
from ..files.reading import read_text
from .config import SHAPE, TrainOptions, is_list

MAX_BYTES = 64_000


def read_option_file(file: Path, kind: type[TrainOptions]) -> dict[str, Any]:
    """Read options by their command-line names. In the result, fields of the model's shape are gathered under "shape"."""
    hints = kind.types()
    known = set(hints) - {"shape"}
    options: dict[str, Any] = {}
    shape: dict[str, Any] = {}
    folder = None
    for key, value in _parse(file).items():
        name = str(key).replace("-", "_")
        if name == "out" and isinstance(value, str):
            folder = Path(value)
        elif name in SHAPE and "shape" in hints:
            shape[name] = value
        elif name in known and is_list(hints[name]):
            options[name] = tuple(value) if isinstance(value, list) else (value,)
        elif name in known:
            options[name] = _number(value) if float in (hints[name], *get_args(hints[name])) else value
        else:
            available = ", ".join(sorted({*known, *(SHAPE if "shape" in hints else ()), "out"} - {"clock"}))
            raise HandgradError(f"{file}: unknown option {key!r}; available: {available}")
    try:
        kind.parse(options)
    except HandgradError as mistake:
        raise HandgradError(f"{file}: {mistake.message}") from None
    return {**options, "shape": shape, **({"out": folder} if folder else {})}


def _parse(file: Path) -> dict[Any, Any]:
    if file.suffix not in (".toml", ".yaml", ".yml"):
        raise HandgradError(f"{file} must be a .toml or .yaml file")
    try:
        text = read_text(file, MAX_BYTES)
        raw = tomllib.loads(text) if file.suffix == ".toml" else yaml.load(text, _YAMLWithoutAliases) or {}
    except MissingError:
        raise HandgradError(f"there is no file {file}") from None
    except HandgradError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as reason:  # ValueError: TOML, dates, long numbers
        raise HandgradError(f"{file} cannot be read: {reason}") from None
    if not isinstance(raw, dict):
        example = "steps = 500" if file.suffix == ".toml" else "steps: 500"
        raise HandgradError(f"{file} must hold options, one per line: {example}")
    return raw


class _YAMLWithoutAliases(yaml.SafeLoader):
    """Rejects aliases, with which a small file can expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(f"line {alias.start_mark.line + 1} has an alias (*name): write its value instead")
        return super().compose_node(parent, index)


def _number(value: object) -> object:
    """YAML reads 1e-3 as text: make it a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value

"""The files that a command writes, checked before anything is measured."""

from pathlib import Path

from handgrad.errors import HandgradError
from handgrad.files.atomic import check_writable


def check_outputs(**named: str | None) -> None:
    """Raise if the file that an option names cannot be written, or if two options name the same one."""
    seen: dict[Path, str] = {}
    for option, name in named.items():
        if name is None:
            continue
        if name == "-":
            raise HandgradError(f"--{option} needs a file name, not -")
        check_writable(Path(name))
        other = seen.setdefault(Path(name).resolve(), option)
        if other != option:
            raise HandgradError(f"--{other} and --{option} name the same file, {name}: give two names")

"""Paths in the cache. Only this module knows the layout of the cache folder.

The folder is $HANDGRAD_CACHE, or `handgrad` in the user's cache folder. Everything in it can be deleted and made again.
"""

import os
from pathlib import Path
from typing import Literal

Kind = Literal["downloads", "tokens", "stdin", "demo", "kernels", "scratch"]

_SUBFOLDERS: dict[Kind, str] = {
    "downloads": "material",  # the name on disk since the first version: existing caches stay valid
    "tokens": "tokens",  # token files, named by a hash of their content
    "stdin": "stdin",  # copies of standard input, named by a hash of their content
    "demo": "explain",  # models trained for `handgrad explain`
    "kernels": "kernels",  # compiled for this machine
    "scratch": "scratch",  # files without a name, of running processes
}


def cache_folder() -> Path:
    """The folder that holds downloaded and prepared files. It may not exist yet."""
    given = os.environ.get("HANDGRAD_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "handgrad"


def cache_path(kind: Kind, name: str = "") -> Path:
    """The path of the cached file or folder `name`, or of the folder for its kind. It may not exist yet."""
    return cache_folder() / _SUBFOLDERS[kind] / name

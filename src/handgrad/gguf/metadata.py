"""The metadata of a GGUF file under its architecture's name, each checked as it is read."""

from typing import Any

from ..checks import check_integer
from ..errors import HandgradError, shown
from .file import GGUFFile


class Metadata:
    """The metadata under the architecture's name."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file = file
        self.architecture = architecture

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def integer(self, key: str, limit: str, default: int | None = None) -> int:
        """An integer within the limits of the setting `limit`."""
        name = f"{self.architecture}.{key}"
        value = self.file.integer(name, default)
        check_integer(limit, value, f"{self.file.path}: {name}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.file.number(f"{self.architecture}.{key}", default)
        return value if value > 0 else self.refuse(key, "must be above 0")

    def factor(self, key: str) -> float:
        """A number above 0; 1 if it is missing or 0, as llama.cpp reads it."""
        return self.number(key) if self.file.metadata.get(f"{self.architecture}.{key}") else 1.0

    def text(self, key: str, default: str) -> str:
        return self.file.text(f"{self.architecture}.{key}", default)

    def refuse(self, key: str, why: str) -> Any:
        name = f"{self.architecture}.{key}"
        raise HandgradError(f"{self.file.path}: {name} is {shown(self.file.metadata.get(name))}, {why}")

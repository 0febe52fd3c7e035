"""handgrad: train, fine-tune, run and inspect GPT-style transformers with every gradient derived by hand.

Names are imported when they are first used, so that `import handgrad` and `handgrad --help` do not wait for torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .machine import settle

if TYPE_CHECKING:
    from . import lora
    from .api import finetune, train
    from .checkpoint import save
    from .config import GPTConfig, preset
    from .errors import HandgradError, NonFiniteError
    from .generation import generate
    from .gpt import GPT
    from .models import load
    from .trace import Trace, trace
    from .verify import verify

__version__ = "0.1.0"
__all__ = [
    "GPT",
    "GPTConfig",
    "HandgradError",
    "NonFiniteError",
    "Trace",
    "finetune",
    "generate",
    "load",
    "lora",
    "preset",
    "save",
    "trace",
    "train",
    "verify",
]

settle()  # before torch is imported

_HOME = {
    "GPT": "gpt", "GPTConfig": "config", "HandgradError": "errors", "NonFiniteError": "errors", "Trace": "trace",
    "finetune": "api", "train": "api",
    "generate": "generation", "load": "models", "preset": "config", "save": "checkpoint",
}  # fmt: skip
_CALLABLE = ("trace", "verify")  # modules that can be called as the function of the same name


def __getattr__(name: str) -> Any:
    if name in _HOME:
        globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
        return globals()[name]
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallableModule(ModuleType):
    """`hg.trace(...)` is the function, `import handgrad.trace` the module, in whatever order they are used."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:  # where `inspect.signature` and `help` look
        return vars(self)[self.__name__.rpartition(".")[2]]


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """The import system binds a submodule to its package by this call."""
        if name in _CALLABLE and type(value) is ModuleType:
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

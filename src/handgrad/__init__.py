"""handgrad: train, fine-tune, run and inspect GPT-style transformers with every gradient derived by hand.

Names are imported when they are first used, so that `import handgrad` and `handgrad --help` do not wait for torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import adapters as lora
from .machine import configure_runtime

if TYPE_CHECKING:
    from .api import finetune, train
    from .errors import HandgradError, NonFiniteError
    from .explain.notebook import explain
    from .formats.huggingface import save
    from .formats.models import load
    from .inference.attribution import Attribution, attribute
    from .inference.generate import generate
    from .model.config import ModelConfig, preset
    from .model.gpt import GPT
    from .model.objective import LogitDifference, PositionLoss
    from .model.trace import Trace, trace
    from .proof.verify import verify

__version__ = "0.1.0"
__all__ = [
    "GPT",
    "Attribution",
    "HandgradError",
    "LogitDifference",
    "ModelConfig",
    "NonFiniteError",
    "PositionLoss",
    "Trace",
    "attribute",
    "explain",
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

configure_runtime()  # before torch is imported
sys.modules[f"{__name__}.lora"] = lora  # so that `from handgrad.lora import inject` works

_MODULE = {
    "GPT": "model.gpt", "ModelConfig": "model.config", "HandgradError": "errors", "NonFiniteError": "errors",
    "LogitDifference": "model.objective", "PositionLoss": "model.objective",
    "Trace": "model.trace", "Attribution": "inference.attribution", "attribute": "inference.attribution",
    "finetune": "api", "generate": "inference.generate", "load": "formats.models",
    "preset": "model.config", "save": "formats.huggingface", "trace": "model.trace", "train": "api",
    "verify": "proof.verify",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "explain":  # a package that can be called
        return import_module(".explain", __name__)
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f".{_MODULE[name]}", __name__), name)
    return globals()[name]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""handgrad: train, fine-tune, run and inspect GPT-style transformers with every gradient derived by hand.

Names are imported when they are first used, so that `import handgrad` and `handgrad --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import lora as lora

if TYPE_CHECKING:
    from . import nn
    from .api import finetune, train
    from .auditing.gradcheck.run import check
    from .auditing.model.run import audit
    from .errors import HandgradError, NonFiniteError
    from .explain_page.notebook import explain
    from .formats.huggingface import save
    from .formats.models import load
    from .inference.attribution import Attribution, attribute
    from .inference.generate import generate
    from .machine import configure_runtime
    from .model.config import ModelConfig, preset
    from .model.gpt import GPT
    from .model.inspect.patch import Patch, align, patch_from
    from .model.inspect.patch_map import PatchMap, patch_map
    from .model.inspect.paths import path_map
    from .model.inspect.trace import Trace, trace
    from .model.passes.objective import LogitDifference, MeanLoss, PositionLoss
    from .model.passes.preferences import DPO, GRPO, IPO, KTO, ORPO, RowLoss, SimPO
    from .per_example.measure import example_norms, example_products
    from .per_example.ranking import Influence, influence
    from .plan.thread_count import choose_threads
    from .proof.verify import verify

__version__ = "0.1.0"
__all__ = [
    "DPO",
    "GPT",
    "GRPO",
    "IPO",
    "KTO",
    "ORPO",
    "Attribution",
    "HandgradError",
    "Influence",
    "LogitDifference",
    "MeanLoss",
    "ModelConfig",
    "NonFiniteError",
    "Patch",
    "PatchMap",
    "PositionLoss",
    "RowLoss",
    "SimPO",
    "Trace",
    "align",
    "attribute",
    "audit",
    "check",
    "choose_threads",
    "configure_runtime",
    "example_norms",
    "example_products",
    "explain",
    "finetune",
    "generate",
    "influence",
    "load",
    "lora",
    "nn",
    "patch_from",
    "patch_map",
    "path_map",
    "preset",
    "save",
    "trace",
    "train",
    "verify",
]

_MODULE = {
    "GPT": "model.gpt", "ModelConfig": "model.config", "HandgradError": "errors", "NonFiniteError": "errors",
    "LogitDifference": "model.passes.objective", "MeanLoss": "model.passes.objective",
    "PositionLoss": "model.passes.objective",
    **dict.fromkeys(("DPO", "GRPO", "IPO", "KTO", "ORPO", "RowLoss", "SimPO"), "model.passes.preferences"),
    "Trace": "model.inspect.trace", "Attribution": "inference.attribution", "attribute": "inference.attribution",
    "explain": "explain_page.notebook", "finetune": "api", "generate": "inference.generate", "load": "formats.models",
    "preset": "model.config", "save": "formats.huggingface", "trace": "model.inspect.trace", "train": "api",
    "audit": "auditing.model.run", "configure_runtime": "machine", "check": "auditing.gradcheck.run",
    "verify": "proof.verify", "choose_threads": "plan.thread_count",
    "example_norms": "per_example.measure", "example_products": "per_example.measure",
    "influence": "per_example.ranking", "Influence": "per_example.ranking",
    "Patch": "model.inspect.patch", "align": "model.inspect.patch", "patch_from": "model.inspect.patch",
    "PatchMap": "model.inspect.patch_map", "patch_map": "model.inspect.patch_map", "path_map": "model.inspect.paths",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "nn":
        return import_module(".nn", __name__)
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f".{_MODULE[name]}", __name__), name)
    return globals()[name]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

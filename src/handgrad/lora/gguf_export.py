"""The adapters of a model as a GGUF file (`gguf/adapter.py` writes it): what such a file cannot hold is refused."""

from pathlib import Path

from ..errors import HandgradError
from ..gguf import adapter
from ..model.config import ModelConfig
from ..model.gpt import GPT
from . import peft
from .injection import adapters_of


def check(model: GPT) -> None:
    """Raise if the adapters of the model cannot be written as a GGUF file."""
    for name in model.adapter.modules_to_save if model.adapter is not None else ():
        raise HandgradError(f"a GGUF adapter cannot hold {name}, trained in full (modules_to_save): merge the adapter")
    if model.adapter is not None and model.adapter.bias != "none":
        raise HandgradError(f"a GGUF adapter cannot hold biases (bias={model.adapter.bias}): merge the adapter")
    adapters = adapters_of(model)
    for name, layer in adapters.items():
        if layer.magnitude is not None:
            raise HandgradError(f"a GGUF adapter cannot hold DoRA's magnitude of {name}: merge the adapter")
    adapter.check(adapters, _architecture(model.config))


def write(config: ModelConfig, folder: Path, path: Path) -> None:
    """Write the adapter in a PEFT folder, for a model of this configuration, as a GGUF file."""
    adapter.write(path, peft.read_factors(folder, config), _architecture(config), config.n_heads, config.kv_heads)


def _architecture(config: ModelConfig) -> str:
    """GGUF's name of the family."""
    return "llama" if config.family == "mistral" else config.family

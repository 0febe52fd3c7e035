"""What a server offers: a model, and adapters of it, each under a name."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..adapters.named import load_named
from ..adapters.peft import base_of, is_adapter
from ..errors import HandgradError
from ..files.gguf import is_gguf
from ..formats.models import chat_template_of, open_folder, tokenizer_folder
from ..inference.model_text import ModelText, model_text
from ..model.gpt import GPT
from ..text import tokenizer as tokenizers
from ..text.chat import ChatTemplate
from ..text.token_text import TokenText


@dataclass(frozen=True)
class Served:
    """A name that requests may give as `model`."""

    name: str
    adapter: str | None  # None: the base
    template: ChatTemplate | None


@dataclass(frozen=True)
class Models:
    """One network in memory, and the names it is served under: the base's first."""

    network: GPT
    text: ModelText
    served: dict[str, Served]
    tokens: TokenText


def open_models(folder: Path, name: str, adapters: Mapping[str, Path] | None = None) -> Models:
    """Load a model, and adapters that were trained on it, by name."""
    adapters = dict(adapters or {})
    if name in adapters:
        raise HandgradError(f"the model and an adapter are both called {name!r}: give the adapter another name")
    for adapter in adapters.values():
        if not is_adapter(adapter):
            raise HandgradError(f"{adapter} is not the folder of an adapter: it has no adapter_config.json")
        _check_base(adapter, folder)
    network = open_folder(folder)
    text = model_text(network)
    load_named(network, adapters)
    template = chat_template_of(folder)
    served = {name: Served(name, None, template)}
    for called, adapter in adapters.items():
        served[called] = Served(called, called, _template(adapter, text) or template)
    return Models(network, text, served, TokenText(text.tokenizer))


def _template(adapter: Path, text: ModelText) -> ChatTemplate | None:
    """The adapter's own chat template, if it has a tokenizer. Raises if that is not the base's."""
    own = (adapter / "tokenizer.json").exists()
    where = tokenizer_folder(adapter) if own else None
    if where is None:
        return None
    if tokenizers.read(where).fingerprint != text.tokenizer.fingerprint:
        raise HandgradError(f"{adapter} has another tokenizer than the model: serve it alone, as the model")
    return chat_template_of(adapter)


def _check_base(adapter: Path, folder: Path) -> None:
    """Raise if the adapter names another base that is found here: equal shapes do not make equal models."""
    named = base_of(adapter)
    if named is None or not os.path.exists(named) or os.path.samefile(named, folder):
        return
    if _weights(Path(named)) != _weights(folder):
        raise HandgradError(f"{adapter} is an adapter of {named}, not of {folder}: serve that model instead")


def _weights(path: Path) -> list[str]:
    """The hashes of a model's files of weights."""
    files = [path] if is_gguf(path) else sorted(path.glob("*.safetensors"))
    found = []
    for file in files:
        with file.open("rb") as opened:
            found.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return found

"""What a server offers: a model, and adapters of it, each under a name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import HandgradError
from ..formats.models import chat_template_of, chat_template_with, open_to_generate
from ..inference.model_text import ModelText, model_text
from ..lora.named import load_named
from ..lora.peft import check_base, is_adapter
from ..model.gpt import GPT
from ..text.chat_template import ChatTemplate
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


def open_models(
    folder: Path,
    name: str,
    adapters: Mapping[str, Path] | None = None,
    bits: int | None = None,
    precision: str | None = None,
) -> Models:
    """Load a model, and adapters that were trained on it, by name; `bits` and `precision` as in `hg.load`."""
    adapters = dict(adapters or {})
    if name in adapters:
        raise HandgradError(f"the model and an adapter are both called {name!r}: give the adapter another name")
    for adapter in adapters.values():
        if not is_adapter(adapter):
            raise HandgradError(f"{adapter} is not the folder of an adapter: it has no adapter_config.json")
        check_base(adapter, folder)
    network = open_to_generate(folder, bits, precision)
    text = model_text(network)
    if adapters:
        load_named(network, adapters)
    template = chat_template_of(folder)
    served = {name: Served(name, None, template)}
    for called, adapter in adapters.items():
        served[called] = Served(called, called, chat_template_with(adapter, text.tokenizer) or template)
    return Models(network, text, served, TokenText(text.tokenizer))

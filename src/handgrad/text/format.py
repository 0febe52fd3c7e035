"""Chat or raw: whether a model reads prompts through its chat template, or as they are. Every command decides it here, by
the first that applies:

1. the user's choice: --format, format=
2. what the model was fine-tuned with, which fine-tuning records beside the tokenizer
3. chat if the model has a chat template, otherwise raw

Text without roles ({"text": …}) is always read as it is.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import HandgradError, HandgradWarning, option, shown
from ..files.reading import parse_json
from . import chat_template
from .chat_template import ChatTemplate
from .tokenizer import FORMAT, Tokenizer

FORMATS = ("chat", "raw")


@dataclass(frozen=True)
class TextFormat:
    """How a model reads prompts."""

    name: str  # one of FORMATS
    template: ChatTemplate | None  # None: raw
    recorded: str | None  # what the model was fine-tuned with, if that is known

    def prompt(self, text: str) -> str:
        """A prompt as the model reads it, ready for the answer."""
        if self.template is None:
            return text
        if not text.strip():
            raise HandgradError(
                f"the prompt is empty: give a message to answer, or continue raw text with {option('format', 'raw')}"
            )
        return self.template.render(turns(text), add_generation_prompt=True)

    def disagreement(self, model: str | Path, command: str) -> str:
        """A sentence that names both sides if the model was fine-tuned with the other format; otherwise nothing."""
        if self.recorded in (None, self.name):
            return ""
        return (
            f"{model} was fine-tuned with {option('format', self.recorded)}, and {command} uses"
            f" {option('format', self.name)}: it gets prompts in a form that it has not learned"
        )

    def warn(self, model: str | Path, command: str) -> None:
        """Warn about a disagreement."""
        if found := self.disagreement(model, command):
            warnings.warn(found, HandgradWarning, stacklevel=3)


def choose(
    tokenizer: Tokenizer, given: str | None = None, *, file: Path | None = None, now: datetime | None = None
) -> TextFormat:
    """The format of a model with this tokenizer.

    given   the user's choice, if there is one
    file    the file of the tokenizer's chat template, if the user gave one, which chooses chat
    now     the time that the template sees
    """
    check(given)
    if file is not None and given == "raw":
        raise HandgradError(
            f"{option('format', 'raw')} uses no chat template: leave out {option('chat_template')}, or choose"
            f" {option('format', 'chat')}"
        )
    noted = recorded(tokenizer)
    has_template = chat_template.has_template(tokenizer.extra_files)
    name = given or ("chat" if file is not None else noted) or ("chat" if has_template else "raw")
    if name == "chat" and not has_template:
        raise HandgradError(
            f"{tokenizer.source} has no chat template, which {option('format', 'chat')} needs: choose"
            f" {option('format', 'raw')} (finetune also takes {option('chat_template', 'FILE')})"
        )
    template = chat_template.of_files(tokenizer.extra_files, tokenizer.source, file, now) if name == "chat" else None
    return TextFormat(name, template, noted)


def check(given: object) -> None:
    """Raise unless this is a format, or None."""
    if given is not None and given not in FORMATS:
        raise HandgradError(f"the format is {shown(given)}; allowed: {' or '.join(FORMATS)}")


def recorded(tokenizer: Tokenizer) -> str | None:
    """What fine-tuning has recorded beside the tokenizer."""
    if FORMAT not in tokenizer.extra_files:
        return None
    found = parse_json(tokenizer.extra_files[FORMAT], tokenizer.source / FORMAT)
    name = found.get("format") if isinstance(found, dict) else None
    if name not in FORMATS:
        raise HandgradError(
            f"{tokenizer.source / FORMAT}: the format is {shown(name)}; allowed: {' or '.join(FORMATS)}"
        )
    return str(name)


def record(tokenizer: Tokenizer, name: str) -> None:
    """Record what the model is fine-tuned with, in a file beside the tokenizer that other tools ignore."""
    tokenizer.extra_files[FORMAT] = json.dumps({"format": name}) + "\n"


def turns(prompt: str, completion: str | None = None) -> list[Mapping[str, Any]]:
    """Prompt and completion as messages. Whitespace around the prompt separates it from what follows in raw text; here the
    template does, so it is dropped."""
    asked = [{"role": "user", "content": prompt.strip()}] if prompt.strip() else []
    return [*asked, *([] if completion is None else [{"role": "assistant", "content": completion}])]

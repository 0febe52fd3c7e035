"""A conversation → the text a model reads, by the model's own chat template, and which parts of it the assistant says.

A template is a Jinja program that comes with the model, and sees what Hugging Face's templates expect to see. It runs in
a child process with limits of time and memory (`sandbox`); `sandboxed/templates.py` is what runs there.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import HandgradError, MissingError
from ..errors import shown as shown
from ..files import reading
from ..sandbox import client

ROLES = ("system", "user", "assistant", "tool", "developer")
REMEDY = "give one with --chat-template FILE"
SOURCE_BYTES = reading.MB  # of a template
LONGEST = 400  # messages of a conversation to learn from: each turn is found by rendering all before it

Message = Mapping[str, Any]


class ChatTemplate:
    """`source` is the program, `special` the special tokens it can name (bos_token, eos_token, …), `name` what errors call
    it. The clock stands still at `now`: two renderings of one conversation have to agree."""

    def __init__(
        self,
        source: str,
        special: Mapping[str, str] | None = None,
        name: str = "the chat template",
        now: datetime | None = None,
    ):
        self.source = source
        self.special = dict(special or {})
        self.name = name
        program = {"source": source, "special": self.special, "now": (now or datetime.now()).isoformat()}
        self._program = {"key": hashlib.sha256(json.dumps(program).encode()).hexdigest(), **program}
        self._prepare()

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as text; with add_generation_prompt, up to where the assistant begins to speak."""
        text: str = self._ask("render", messages, opening=add_generation_prompt)
        return text

    def segments(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """The conversation as pieces of text, True for those the assistant says, its end of turn included."""
        if len(messages) > LONGEST:
            raise HandgradError(
                f"a conversation of {len(messages):,} messages; {LONGEST} is the limit: divide it into shorter ones"
            )
        found = self._ask("segments", messages)
        if "changes" in found:
            raise HandgradError(
                f"{self.name} is not incremental: it writes what comes before message {found['changes'] + 1} in another way"
                " once more follows, so that the assistant's words cannot be told apart; give a template that only adds,"
                " with --chat-template FILE"
            )
        text, cuts = found["text"], found["cuts"]
        pieces = [(text[a:b], i % 2 == 1) for i, (a, b) in enumerate(zip([0, *cuts], cuts, strict=False))]
        return [piece for piece in pieces if piece[0]]

    def _prepare(self) -> None:
        mistake = client.ask("prepare", self.name, **self._program)
        if mistake is not None:
            raise HandgradError(f"{self.name}, line {mistake[0]}, is not a chat template: {mistake[1]}")

    def _ask(self, call: str, messages: Sequence[Message], **given: Any) -> Any:
        check(messages)
        request = {"key": self._program["key"], "messages": [_joined(m) for m in messages], **given}
        answer = client.ask(call, self.name, **request)
        if not answer:  # a new child does not know the template
            self._prepare()
            answer = client.ask(call, self.name, **request)
        if "fails" in answer:
            raise HandgradError(f"{self.name} fails for this conversation: {answer['fails']}")
        return answer["done"]


def there_is_one(folder: Path) -> bool:
    """Whether the model in `folder` has a template."""
    return os.path.lexists(folder / "chat_template.jinja") or bool(
        _settings(folder / "tokenizer_config.json").get("chat_template")
    )


def find(folder: Path, given: Path | None = None, now: datetime | None = None) -> ChatTemplate:
    """The template of the model in `folder`, or the one in the file `given`; the special tokens are the model's."""
    settings = _settings(folder / "tokenizer_config.json")
    special = _special_tokens(_settings(folder / "special_tokens_map.json") | settings)
    beside = folder / "chat_template.jinja"
    if given is not None or os.path.lexists(beside):
        file = given or beside
        return ChatTemplate(reading.read_text(file, SOURCE_BYTES), special, str(file), now)
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
        if found is None:
            names = ", ".join(map(str, named)) or "no names"
            raise HandgradError(
                f"{folder / 'tokenizer_config.json'} has chat templates called {names}, none called default: {REMEDY}"
            )
    if not isinstance(found, str):
        raise HandgradError(
            f"{folder} has no chat template, neither chat_template.jinja nor chat_template in tokenizer_config.json:"
            f" {REMEDY}, or write the data as prompt and completion"
        )
    return ChatTemplate(found, special, f"the chat template of {folder / 'tokenizer_config.json'}", now)


def check(messages: object) -> None:
    """That these are messages a template can be given."""
    if not isinstance(messages, list | tuple):
        raise HandgradError(f"messages is {shown(messages)}, not a list")
    if not messages:
        raise HandgradError("messages is empty")
    for i, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise HandgradError(f"message {i} is {shown(message)}, not an object with role and content")
        for field in ("role", "content"):
            if field not in message:
                raise HandgradError(f"message {i} has no {field}: it has {', '.join(message) or 'nothing'}")
        if message["role"] not in ROLES:
            raise HandgradError(f"message {i} has the role {shown(message['role'])}: it can be {', '.join(ROLES)}")
        content = _joined(message)["content"]
        if not isinstance(content, str):
            raise HandgradError(f"message {i}: its content is {shown(content)}, not a string or a list of text parts")
        if message["role"] == "assistant" and not content and not message.get("tool_calls"):
            raise HandgradError(f"message {i}: the assistant says nothing, its content is empty")


def _joined(message: Message) -> Message:
    """The message with its content as one string: it may be given in parts, [{"type": "text", "text": …}, …]."""
    parts = message["content"]
    if not isinstance(parts, list) or not parts:
        return message
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "".join(map(str, texts))}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Under their names, as in "bos_token": a string, or an object that holds one."""
    found = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _settings(file: Path) -> dict[str, Any]:
    try:
        return reading.read_json(file)
    except MissingError:
        return {}

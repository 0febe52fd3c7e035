"""A conversation → the text a model reads, by the model's own chat template, and which parts of it the assistant says.

A template is a Jinja program that comes with the model. It runs in a sandbox and sees what Hugging Face's templates
expect to see. What the assistant says is found by rendering twice, without any mark in the template: the conversation
up to a turn, with the opening of the answer, has to be the beginning of the conversation with that turn.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import HandgradError

ROLES = ("system", "user", "assistant", "tool", "developer")
REMEDY = "give one with --chat-template FILE"

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
        environment = _environment(now or datetime.now())
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as reason:
            raise HandgradError(f"{name}, line {reason.lineno}, is not a chat template: {reason.message}") from None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as text; with add_generation_prompt, up to where the assistant begins to speak."""
        messages = plain(messages)
        return self._render(messages, add_generation_prompt)

    def segments(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """The conversation as pieces of text, True for those the assistant says, its end of turn included."""
        messages = plain(messages)
        whole = self._render(messages, False)
        pieces = []
        at = 0
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:i], True)
                after = whole if i + 1 == len(messages) else self._render(messages[: i + 1], False)
                if not (at <= len(before) and after.startswith(before) and whole.startswith(after)):
                    raise HandgradError(
                        f"{self.name} is not incremental: it writes what comes before message {i + 1} in another way once"
                        " more follows, so that the assistant's words cannot be told apart; give a template that only adds,"
                        " with --chat-template FILE"
                    )
                pieces += [(whole[at : len(before)], False), (whole[len(before) : len(after)], True)]
                at = len(after)
        pieces.append((whole[at:], False))
        return [piece for piece in pieces if piece[0]]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        given = {"messages": list(messages), "tools": None, "documents": None}
        try:
            return self._template.render(**self.special, **given, add_generation_prompt=add_generation_prompt)
        except Exception as reason:  # a program of somebody else's: it can fail in any way
            raise HandgradError(f"{self.name} fails for this conversation: {reason}") from None


def there_is_one(folder: Path) -> bool:
    """Whether the model in `folder` has a template."""
    return (folder / "chat_template.jinja").exists() or bool(
        _settings(folder / "tokenizer_config.json").get("chat_template")
    )


def find(folder: Path, given: Path | None = None, now: datetime | None = None) -> ChatTemplate:
    """The template of the model in `folder`, or the one in the file `given`; the special tokens are the model's."""
    settings = _settings(folder / "tokenizer_config.json")
    special = _special_tokens(_settings(folder / "special_tokens_map.json") | settings)
    beside = folder / "chat_template.jinja"
    if given is not None or beside.exists():
        file = given or beside
        return ChatTemplate(_text(file), special, str(file), now)
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
        content = joined(message["content"])
        if content is None:
            raise HandgradError(
                f"message {i}: its content is {shown(message['content'])}, not a string or a list of texts"
            )
        if message["role"] == "assistant" and not content and not message.get("tool_calls"):
            raise HandgradError(f"message {i}: the assistant says nothing, its content is empty")


def joined(content: object) -> str | None:
    """The text of a message's content: a string, or a list of parts {"type": "text", "text": …}. None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return None
    texts = [part.get("text") for part in content if part.get("type", "text") == "text"]
    good = [text for text in texts if isinstance(text, str)]
    return "".join(good) if len(good) == len(content) else None


def plain(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, checked, their contents as strings."""
    check(messages)
    return [{**message, "content": joined(message["content"])} for message in messages]


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}: with this some templates mark what the assistant says. Just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment(now: datetime) -> jinja2.Environment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = now.strftime
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would write < and & for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Under their names, as in "bos_token": a string, or an object that holds one."""
    found = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _settings(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    text = _text(file)
    try:
        read = json.loads(text)
    except ValueError as reason:
        raise HandgradError(f"{file} is not JSON: {reason}") from None
    if not isinstance(read, dict):
        raise HandgradError(f"{file} must hold a JSON object, not {shown(read)}")
    return read


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as reason:
        raise HandgradError(f"{file} is not UTF-8 text (byte {reason.start})") from None
    except OSError as reason:
        raise HandgradError(f"{file} cannot be read: {reason.strerror}") from None


def shown(value: object) -> str:
    """As it stands in JSON, not more of it than a message needs."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}…"

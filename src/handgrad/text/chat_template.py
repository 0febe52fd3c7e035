"""Chat templates: render a conversation as the text a model reads, and find which parts the assistant wrote.

A template is a Jinja program that comes with the model. It gets the variables and functions that Hugging Face provides,
and runs in a child process with time and memory limits (`sandbox/templates.py`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import HandgradError, option, shown
from ..files import reading
from ..sandbox import client

CONFIG, SPECIAL, JINJA = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
ROLES = ("system", "user", "assistant", "tool", "developer")
REMEDY = f"give one with {option('chat_template', 'FILE')}"
MAX_MESSAGES = 400  # in a training conversation: each assistant turn is found by rendering all messages before it

Message = Mapping[str, Any]


class ChatTemplate:
    """`source` is the Jinja program, `special` the special tokens it can use (bos_token, eos_token, …), `name` its name in
    errors. Its clock always shows `now`, so that two renderings of one conversation agree."""

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
        self._program: dict[str, Any] = {"key": hashlib.sha256(json.dumps(program).encode()).hexdigest(), **program}
        self._prepare()

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as text. With add_generation_prompt, the header of an assistant turn follows. `tools` are
        functions that the model may call, in OpenAI's form."""
        given = {} if tools is None else {"tools": list(tools)}
        text: str = self._call("render", messages, add_generation_prompt=add_generation_prompt, **given)
        return text

    def segments(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """The conversation as pieces of text; True for those the assistant wrote, including its end of turn."""
        if len(messages) > MAX_MESSAGES:
            raise HandgradError(
                f"a conversation has {len(messages):,} messages; the maximum is {MAX_MESSAGES}: split it into shorter ones"
            )
        found = self._call("segments", messages)
        if "rewritten" in found:
            raise HandgradError(
                f"{self.name} is not incremental: it renders the text before message {found['rewritten'] + 1} differently"
                " when more messages follow, so the assistant's text cannot be located; give a template that only appends,"
                f" with {option('chat_template', 'FILE')}"
            )
        text, cuts = found["text"], found["cuts"]
        pieces = [(text[a:b], i % 2 == 1) for i, (a, b) in enumerate(zip([0, *cuts], cuts, strict=False))]
        return [piece for piece in pieces if piece[0]]

    def _prepare(self) -> None:
        program: dict[str, Any] = self._program
        syntax_error = client.call("prepare", self.name, **program)
        if syntax_error is not None:
            raise HandgradError(f"{self.name}, line {syntax_error[0]}, is not a chat template: {syntax_error[1]}")

    def _call(self, function: str, messages: Sequence[Message], **arguments: Any) -> Any:
        check(messages)
        request = {"key": self._program["key"], "messages": [_with_joined_parts(m) for m in messages], **arguments}
        reply = client.call(function, self.name, **request)
        if not reply:  # the child was restarted and has not compiled the template
            self._prepare()
            reply = client.call(function, self.name, **request)
        if "error" in reply:
            raise HandgradError(f"{self.name} fails for this conversation: {reply['error']}")
        return reply["result"]


def has_template(files: Mapping[str, str]) -> bool:
    """Whether a chat template is among these files of a tokenizer (their texts by name)."""
    return JINJA in files or bool(_settings(files, CONFIG).get("chat_template"))


def of_files(
    files: Mapping[str, str], folder: Path, given: Path | None = None, now: datetime | None = None
) -> ChatTemplate:
    """The chat template among these files of a tokenizer. Messages name `folder`, or the file `given` of the template."""
    settings = _settings(files, CONFIG, folder)
    special = special_tokens(files, folder)
    if JINJA in files:
        return ChatTemplate(files[JINJA], special, str(given or folder / JINJA), now)
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
        if found is None:
            names = ", ".join(map(str, named)) or "nothing"
            raise HandgradError(f"{folder / CONFIG} has chat templates named {names}, none named default: {REMEDY}")
    if not isinstance(found, str):
        raise HandgradError(
            f"{folder} has no chat template, neither chat_template.jinja nor chat_template in tokenizer_config.json:"
            f" {REMEDY}, or write the data as prompt and completion"
        )
    return ChatTemplate(found, special, f"the chat template of {folder / CONFIG}", now)


def check(messages: object) -> None:
    """Raise unless these are valid messages for a template."""
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
            raise HandgradError(f"message {i} has the role {shown(message['role'])}; allowed: {', '.join(ROLES)}")
        content = _with_joined_parts(message)["content"]
        if not isinstance(content, str):
            raise HandgradError(f"message {i}: its content is {shown(content)}, not a string or a list of text parts")
        if message["role"] == "assistant" and not content and not message.get("tool_calls"):
            raise HandgradError(f"message {i}: the assistant's content is empty")


def _with_joined_parts(message: Message) -> Message:
    """The message with content given as parts, [{"type": "text", "text": …}, …], joined to one string."""
    parts = message["content"]
    if not isinstance(parts, list) or not parts:
        return message
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "".join(map(str, texts))}


def special_tokens(files: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The entries named *_token in these files of a tokenizer: strings, or objects with the string under "content"."""
    found = {}
    for name, token in (_settings(files, SPECIAL, folder) | _settings(files, CONFIG, folder)).items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _settings(files: Mapping[str, str], name: str, folder: Path = Path()) -> dict[str, Any]:
    found = reading.parse_json(files.get(name, "{}"), folder / name)
    if not isinstance(found, dict):
        raise HandgradError(f"{folder / name} must contain a JSON object, not a {type(found).__name__}")
    return found

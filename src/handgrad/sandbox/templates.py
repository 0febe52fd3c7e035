"""Chat templates inside the child process: render a conversation, and locate the assistant's text in it.

An assistant turn is located by rendering the messages before it with a generation prompt, and the messages up to and
including it: the first must be a prefix of the second, and the rest is the assistant's text.
"""

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = list[dict[str, Any]]


class TemplateError(Exception):
    """The source is not a template. Arguments: line number, reason."""


class Template:
    """`special` are the special tokens the template can use; `now` is the time its clock shows."""

    def __init__(self, source: str, special: dict[str, str], now: str):
        self.source, self.special, self.now = source, special, datetime.fromisoformat(now)
        try:
            self._template = environment(self.now).from_string(source)
        except jinja2.TemplateSyntaxError as reason:
            raise TemplateError(reason.lineno, str(reason.message)[:2000]) from None
        except MemoryError:
            raise
        except Exception as reason:
            raise TemplateError(1, f"{reason}"[:2000] or type(reason).__name__) from None

    def render(self, messages: Messages, add_generation_prompt: bool, tools: list[Any] | None = None) -> str:
        return self._template.render(
            **self.special, messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt
        )

    def segments(self, messages: Messages) -> dict[str, Any]:
        """{"text": the conversation, "cuts": offsets at which the assistant's text begins or ends}, or {"rewritten": i} if
        the text before message i is not a prefix of the conversation."""
        full = self.render(messages, False)
        cuts = [0]
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:i], True)
                after = full if i + 1 == len(messages) else self.render(messages[: i + 1], False)
                if not (cuts[-1] <= len(before) and after.startswith(before) and full.startswith(after)):
                    return {"rewritten": i}
                cuts += [len(before), len(after)]
        return {"text": full, "cuts": [*cuts[1:], len(full)]}


class _Generation(Extension):
    """Render {% generation %} … {% endgeneration %}, which marks the assistant's text in some templates, as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def environment(now: datetime) -> jinja2.Environment:
    """A sandboxed Jinja environment with the filters and functions that Hugging Face's templates use."""
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    result = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    result.filters["tojson"] = _to_json
    result.globals["raise_exception"] = _raise
    result.globals["strftime_now"] = now.strftime
    return result


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face writes it; Jinja's own filter escapes < and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)

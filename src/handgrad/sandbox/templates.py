"""Chat templates inside the child process: a conversation as text, and which parts of it the assistant says.

What the assistant says is found by rendering twice, without any mark in the template: the conversation up to a turn, with
the opening of the answer, has to be the beginning of the conversation with that turn.
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


class Mistake(Exception):
    """Line and reason: the source is not a template."""


class NotIncremental(Exception):
    pass


class Template:
    """`special` are the special tokens a template can name; `now` is what its clock shows."""

    def __init__(self, source: str, special: dict[str, str], now: str):
        self.source, self.special, self.now = source, special, datetime.fromisoformat(now)
        try:
            self._template = environment(self.now).from_string(source)
        except jinja2.TemplateSyntaxError as reason:
            raise Mistake(reason.lineno, str(reason.message)[:2000]) from None
        except MemoryError:
            raise
        except Exception as reason:
            raise Mistake(1, f"{reason}"[:2000] or type(reason).__name__) from None

    def render(self, messages: Messages, opening: bool) -> str:
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": opening}
        return self._template.render(**self.special, **given)

    def segments(self, messages: Messages) -> dict[str, Any]:
        """{"text": the whole, "cuts": where the text changes between said by the assistant and not}; {"changes": i} if what
        comes before message i is not the beginning of the whole."""
        whole = self.render(messages, False)
        cuts = [0]
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:i], True)
                after = whole if i + 1 == len(messages) else self.render(messages[: i + 1], False)
                if not (cuts[-1] <= len(before) and after.startswith(before) and whole.startswith(after)):
                    return {"changes": i}
                cuts += [len(before), len(after)]
        return {"text": whole, "cuts": [*cuts[1:], len(whole)]}


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}: with this some templates mark what the assistant says. Just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def environment(now: datetime) -> jinja2.Environment:
    """What templates made for Hugging Face's tokenizers expect to see."""
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = now.strftime
    return made


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

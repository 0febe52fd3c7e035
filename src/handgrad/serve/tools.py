"""Tools: functions that a client offers to the model, and the calls of them in its answers.

The model's chat template tells it of the functions, and how it writes a call is known by a mark in the template:

    <tool_call>{"name": …, "arguments": {…}}</tool_call>    Qwen, Hermes, SmolLM
    [TOOL_CALLS][{"name": …, "arguments": {…}}]             Mistral
    {"name": …, "parameters": {…}}                          Llama 3

A call that must come (`tool_choice`) is written by a grammar. Otherwise calls are found in the text: what is not a call of
one of the functions stays text.
"""

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import HandgradError
from ..files.reading import parse_next
from ..inference.grammar import Grammar, json_grammar, json_rule, lark_grammar, literal, vocabulary
from ..text.chat_template import ChatTemplate
from ..text.streaming import overlap
from .api_errors import ApiError, invalid
from .served_models import Models, Served


class Notation(NamedTuple):
    """How a model writes calls: begin, opening, the call, closing, end; several as a whole if it `repeats`, otherwise as a
    list between opening and closing."""

    mark: str  # in its template
    begin: str
    opening: str
    closing: str
    end: str
    arguments: str  # what a call's arguments are called
    repeats: bool = False


NOTATIONS = (
    Notation("<tool_call>", "<tool_call>", "\n", "\n", "</tool_call>", "arguments", repeats=True),
    Notation("[TOOL_CALLS]", "[TOOL_CALLS]", "[", "]", "", "arguments"),
    Notation('"parameters": dictionary of argument name', "", "", "", "", "parameters"),
)


def notation_of(template: ChatTemplate) -> Notation | None:
    """None if it is not known; some templates have calls in XML between the same marks."""
    if "<function=" in template.source:
        return None
    return next((x for x in NOTATIONS if x.mark in template.source), None)


class Tools(NamedTuple):
    """The functions of a request.

    offered    what the template gets; None: nothing, as if there were no tools
    must_call  names of the functions of which the answer must call one; None: it may be text
    single     the answer has one call at most
    """

    offered: list[dict[str, Any]] | None
    must_call: list[str] | None
    notation: Notation | None
    single: bool

    def reader(self) -> "CallReader | None":
        """Finds the calls in one answer."""
        if self.offered is None or self.notation is None:
            return None
        return CallReader(self.notation, {x["function"]["name"] for x in self.offered}, self.single)

    @property
    def stop(self) -> list[str]:
        """Where an answer with one call ends."""
        return [self.notation.end] if self.offered and self.single and self.notation and self.notation.end else []


def tools_of(model: Served, asked: dict[str, Any]) -> Tools:
    """The functions that a request offers, checked."""
    given, choice = asked.get("tools", []), asked.get("tool_choice", "auto")
    names = [x["function"]["name"] for x in given]
    if choice.startswith("=") and choice[1:] not in names:
        raise invalid("tool_choice", f"tool_choice names {choice[1:]}, which is not one of tools")
    if choice == "required" and not names:
        raise invalid("tool_choice", "tool_choice is required, and there are no tools")
    if not names or choice == "none":
        return Tools(None, None, None, False)
    if model.template is None or not re.search(r"\btools\b", model.template.source):
        reason = f"the chat template of {model.name} has no tools: describe them in a message, and give response_format"
        raise ApiError(400, reason, "tools", "unsupported_parameter")
    notation = notation_of(model.template)
    must = None if choice == "auto" else names if choice == "required" else [choice[1:]]
    if must is not None and notation is None:
        reason = f"how {model.name} writes calls of tools is not known: give tool_choice auto, or response_format"
        raise ApiError(400, reason, "tool_choice", "unsupported_parameter")
    single = not asked.get("parallel_tool_calls", True) or choice.startswith("=")
    return Tools(given, must, notation, single)


def grammar_of(models: Models, asked: dict[str, Any], tools: Tools) -> Grammar | None:
    """What the answer of a request may be: of its response_format, or a call of a tool; None: any text."""
    schema: Any = asked.get("response_format")
    if schema is None and tools.must_call is None:
        return None
    if asked.get("ignore_eos"):
        raise invalid(
            "ignore_eos", "ignore_eos goes on after the end of the text, which response_format and tools need"
        )
    tokens = vocabulary(models.text, models.network.config.n_vocab)
    param = "tools" if schema is None else "response_format"
    try:
        if not tools.offered or tools.notation is None:
            return Grammar(tokens, json_grammar(schema))
        names = tools.must_call or [x["function"]["name"] for x in tools.offered]
        begin, end = (literal(tokens, models.text.tokenizer, x) for x in (tools.notation.begin, tools.notation.end))
        rules = _call_rules(tools, names, begin, end)
        rules += ["start: calls"] if tools.must_call else ["start: calls | answer", f"answer: {json_rule(schema)}"]
        return Grammar(tokens, lark_grammar("\n".join(rules)))
    except HandgradError as reason:
        raise invalid(param, f"{param}: {reason}") from None


def _call_rules(tools: Tools, names: list[str], begin: str, end: str) -> list[str]:
    """The rule `calls`. Every function has its own, so that references in its schema stay within it."""
    n = tools.notation
    assert n is not None and tools.offered is not None
    parameters = {x["function"]["name"]: x["function"]["parameters"] for x in tools.offered}
    rules = []
    for i, name in enumerate(names):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{n.arguments}": ')
        rules += [f'f{i}: {head} a{i} "}}"', f"a{i}: {json_rule(parameters[name])}"]
    rules.append("call: " + " | ".join(f"f{i}" for i in range(len(names))))
    opening, closing = (json.dumps(x) for x in (n.opening, n.closing))
    one = f"{begin} {opening} call {closing} {end}"
    several = not tools.single
    if n.repeats:
        return [*rules, r'calls: one ("\n" one)*' if several else "calls: one", f"one: {one}"]
    listed = 'call (", " call)*' if several and n.opening else "call"
    return [*rules, f"calls: {one.replace(' call ', f' {listed} ')}"]


@dataclass
class CallReader:
    """The calls in the text of one answer, as it comes."""

    notation: Notation
    names: Collection[str]
    single: bool
    _held: str = ""  # may be, or be the beginning of, a call
    _begun: bool = field(default=False)

    def add(self, text: str) -> str:
        """The text that is certain to be no call."""
        self._held += text
        if self._begun:
            return ""
        begin = self.notation.begin
        if begin:
            at = self._held.find(begin)
            self._begun = at >= 0
            certain = at if self._begun else len(self._held) - overlap(self._held, begin)
        else:  # the whole answer is a call, or none of it
            stripped = self._held.lstrip()
            self._begun = stripped.startswith("{")
            certain = len(self._held) if stripped and not self._begun else 0
        piece, self._held = self._held[:certain], self._held[certain:]
        return piece

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the text, and the calls."""
        rest, calls, text = self._held, list[dict[str, Any]](), ""
        while rest:
            begin = self.notation.begin
            before, _, after = rest.partition(begin) if begin else ("", "", rest)
            found, behind = self._calls(after)
            if not found:
                text += rest
                break
            calls += found
            text += before
            rest = behind
        if calls:
            text = text.strip()
        return text, calls[:1] if self.single else calls

    def _calls(self, text: str) -> tuple[list[dict[str, Any]], str]:
        """The calls that the text begins with, and what is behind them."""
        start = len(text) - len(text.lstrip())
        try:
            value, end = parse_next(text, start, "the call")
        except HandgradError:
            return [], text
        found = [self._call(x) for x in (value if isinstance(value, list) else [value])]
        calls = [x for x in found if x is not None]
        if len(calls) < len(found):
            return [], text
        behind = text[end:]
        stripped = behind.lstrip()
        if self.notation.end and stripped.startswith(self.notation.end):
            behind = stripped[len(self.notation.end) :]
        return calls, behind

    def _call(self, value: Any) -> dict[str, Any] | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in self.names:
            return None
        arguments = value.get(self.notation.arguments, {})
        if not isinstance(arguments, dict):
            return None
        function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}

"""Records → drafts: the pieces of text of one training example, and which of them are training targets.

A record is one of

    {"prompt": "…", "completion": "…"}                       targets: the completion and the end-of-text token
    {"messages": [{"role": "user", "content": "…"}, …]}      targets: what the assistant writes
    {"text": "…"}                                            targets: everything

or one that `records.convert` turns into these. With a chat template, prompt and completion are messages too.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from ..errors import HandgradError, LimitError, option, shown
from ..files.reading import check_unicode
from . import chat_template
from .chat_template import ChatTemplate
from .format import turns
from .records import Location, convert, system_message

KINDS = ("messages", "prompt and completion", "text")
EXPECTED = "expected prompt and completion, or messages, or text"
LossOn = Literal["answers", "all"]


class Draft(NamedTuple):
    """An example before tokenization. The piece None is the end-of-text token, if the tokenizer has one."""

    location: Location
    kind: str
    pieces: list[tuple[str | None, bool]]  # True: training target
    number: int = 0  # of the record in all files, from 1, unusable ones counted too


def draft(location: Location, record: Any, template: ChatTemplate | None, loss_on: LossOn) -> Draft:
    """The draft of one record. With loss_on="all" every piece after the first token is a target."""
    if not isinstance(record, dict):
        raise location.error(f"the record is {shown(record)}, not an object; {EXPECTED}")
    record = convert(location, record, chat=template is not None)
    has = {name for name, value in record.items() if value is not None}
    everything = loss_on == "all"
    if "messages" in has:
        if has & {"prompt", "completion"}:
            raise location.error("the record has messages as well as a prompt or completion: remove one of them")
        return Draft(location, "messages", [*_conversation(location, record["messages"], template, everything)])
    if has >= {"prompt", "completion"}:
        prompt, completion = _string(location, record, "prompt"), _string(location, record, "completion")
        if not completion:
            raise location.error("the completion is empty: there is nothing to learn")
        if template is not None:
            messages = [*system_message(record), *turns(prompt, completion)]
            return Draft(location, "prompt and completion", [*_conversation(location, messages, template, everything)])
        # Without a prompt the end-of-text token comes first, so that the first token of the completion can be a target.
        start: tuple[str | None, bool] = (prompt, everything) if prompt else (None, False)
        return Draft(location, "prompt and completion", [start, (completion, True), (None, True)])
    if "text" in has:
        text = _string(location, record, "text")
        return Draft(location, "text", [(None, False), (text, True), (None, True)] if text else [])
    found = ", ".join(name if name in has else f"{name} (null)" for name in record) or "no fields"
    names = [name for name in record if name in has and " " not in name]
    given = " ".join(
        option("field", f"{field}={name}") for field, name in zip(("prompt", "completion"), names, strict=False)
    )
    renamed = f". Name its fields, as in {given}" if names[1:] else ""
    raise location.error(f"the record has {found}; {EXPECTED}{renamed}")


def _conversation(
    location: Location, messages: Any, template: ChatTemplate | None, everything: bool
) -> Iterator[tuple[str | None, bool]]:
    if template is None:
        raise location.error(
            f"the record has messages, and no chat template is used: {chat_template.REMEDY}, or choose"
            f" {option('format', 'chat')} if the model has one"
        )
    try:
        segments = template.segments(messages)
    except LimitError:
        raise  # every other record would exceed the limit too
    except HandgradError as reason:
        raise location.error(reason.message) from None
    if not everything and not any(is_target for _, is_target in segments):
        raise location.error("the messages have no assistant text: there is nothing to learn")
    for text, is_target in segments:
        _check_unicode(location, text)
        yield text, is_target or everything


def _string(location: Location, record: dict[str, Any], name: str) -> str:
    text = record[name]
    if not isinstance(text, str):
        raise location.error(f"{name} is {shown(text)}, not a string")
    _check_unicode(location, text)
    return text


def _check_unicode(location: Location, text: str) -> None:
    try:
        check_unicode(text, "the text")
    except HandgradError as reason:
        raise location.error(reason.message) from None

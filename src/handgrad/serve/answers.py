"""Completions and chats as OpenAI's JSON: the whole answer, or the events of a stream.

A stream's events together have the text and the log-probabilities of the whole answer. A token's log-probability comes when
its text is certain; tokens of a stop string are left out, like their text. A completion's log-probabilities end with that of
the end-of-sequence token, if it came: clients that ask for one token find one. A chat's do not.
"""

import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..inference.engine import TokenLogprob
from ..inference.text_batch import Piece
from ..text.token_text import Offsets, TokenText
from .runner import Update
from .tools import CallReader

LOWEST = -9999.0  # JSON has no infinity
REASONS = {"stop": "stop", "length": "length", "context": "length"}


class Entry(NamedTuple):
    """A token of the text: its log-probability, unknown for a prompt's first, and where it begins."""

    id: int
    found: TokenLogprob | None
    offset: int


@dataclass
class Choice:
    """The text of one sequence so far."""

    tokens: TokenText
    prompt: list[int]
    echo: str | None = None  # the prompt's text, if it is repeated
    logprobs: bool = False
    list_end: bool = False  # list the end-of-sequence token, which has no text here
    reader: CallReader | None = None  # finds calls of tools in the text
    finish: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)  # of tools, known when the text has ended
    _begun: bool = False
    _certain: int = 0  # characters
    _offsets: Offsets = field(init=False)
    _pending: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._certain = len(self.echo or "")
        self._offsets = Offsets(self.tokens, self._certain)

    def add(self, update: Update) -> tuple[str, list[Entry]]:
        """The text and the tokens that have become certain."""
        text, entries = "", list[Entry]()
        if not self._begun and self.echo is not None:
            text, entries = self.echo, self._prompt(update)
        self._begun = True
        piece: Piece = update.piece
        text += piece.text if self.reader is None else self.reader.add(piece.text)
        self._certain += len(piece.text)
        if piece.id is not None and piece.logprob is not None:
            self._pending.append(Entry(piece.id, piece.logprob, self._offsets.next(piece.id)))
        if piece.finish is not None:
            self.finish = REASONS.get(piece.finish, piece.finish)
        flush = self.finish == "length"
        if self.finish is not None and self.reader is not None:
            rest, self.calls = self.reader.end()
            text += rest
            self.finish = "tool_calls" if self.calls else self.finish
        ended = self.list_end and piece.id in update.sequence.options.stop_ids
        while self._pending and (flush or ended or self._pending[0].offset < self._certain):
            entries.append(self._pending.pop(0))
        return text, entries

    def _prompt(self, update: Update) -> list[Entry]:
        """The prompt's tokens, if it is repeated: the first has no log-probability."""
        if not self.logprobs:
            return []
        offsets = Offsets(self.tokens, beginning=True).all(self.prompt)
        known = [None, *update.sequence.prompt_logprobs]
        return [Entry(*entry) for entry in zip(self.prompt, known, offsets, strict=True)]


class Form(ABC):
    """The JSON of one request's answer."""

    kind: str  # of the whole answer's object
    streamed: str  # of an event's object
    prefix: str  # of the id
    list_end = False  # whether log-probabilities end with that of the end-of-sequence token

    def __init__(self, model: str, tokens: TokenText, logprobs: int | None, usage_wanted: bool = False):
        self.tokens, self.logprobs, self.usage_wanted = tokens, logprobs, usage_wanted
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    @abstractmethod
    def choice(self, index: int, choice: Choice, text: str, entries: list[Entry]) -> dict[str, Any]:
        """A choice of the whole answer."""

    def delta(self, index: int, choice: Choice, text: str, entries: list[Entry], first: bool) -> dict[str, Any]:
        """A choice of one event."""
        return self.choice(index, choice, text, entries)

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {"object": self.kind, **self.head, "choices": choices, "usage": usage}

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        last = {"usage": usage} if self.usage_wanted else {}
        return {"object": self.streamed, **self.head, "choices": choices, **last}


class CompletionForm(Form):
    kind = streamed = "text_completion"
    prefix = "cmpl"
    list_end = True

    def choice(self, index: int, choice: Choice, text: str, entries: list[Entry]) -> dict[str, Any]:
        logprobs = None if self.logprobs is None else self._logprobs(entries)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}

    def _logprobs(self, entries: list[Entry]) -> dict[str, Any]:
        return {
            "tokens": [self.tokens.name(entry.id) for entry in entries],
            "token_logprobs": [None if e.found is None else max(e.found.logprob, LOWEST) for e in entries],
            "top_logprobs": [self._top(entry) for entry in entries] if self.logprobs else None,
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: Entry) -> dict[str, float] | None:
        """The most probable tokens and the token itself, by name; of equal names the most probable."""
        if entry.found is None:
            return None
        top: dict[str, float] = {}
        for i, logprob in [*entry.found.top, (entry.id, entry.found.logprob)]:
            top.setdefault(self.tokens.name(i), max(logprob, LOWEST))
        return top


class ChatForm(Form):
    kind, streamed = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, index: int, choice: Choice, text: str, entries: list[Entry]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message |= {"content": text or None, "tool_calls": choice.calls}
        return self._with(index, choice, entries, message=message)

    def delta(self, index: int, choice: Choice, text: str, entries: list[Entry], first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        if choice.calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(choice.calls)]
        return self._with(index, choice, entries, delta=delta)

    def _with(self, index: int, choice: Choice, entries: list[Entry], **text: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, **text, "logprobs": self._logprobs(entries), "finish_reason": choice.finish}

    def _logprobs(self, entries: list[Entry]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        content = [
            {**self._token(e.id, e.found.logprob), "top_logprobs": [self._token(*best) for best in e.found.top]}
            for e in entries
            if e.found is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, i: int, logprob: float) -> dict[str, Any]:
        return {"token": self.tokens.name(i), "logprob": max(logprob, LOWEST), "bytes": list(self.tokens.raw(i))}


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }

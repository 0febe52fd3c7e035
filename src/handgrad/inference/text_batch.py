"""Sequences in an engine with their text: `Writer` follows one, `Batch` runs several prompts to their end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..text.streaming import TextStream
from .engine import Engine, Event, Finish, Options, TokenLogprob
from .model_text import ModelText


@dataclass(frozen=True)
class Generation:
    """What was generated after one prompt.

    ids               the new ids, with the one that ended the text
    text              their text, without the end-of-text token or stop string; None without a tokenizer
    finish            "stop": an end-of-sequence id, a stop id or a stop string; "length": the wanted number of tokens;
                      "context": the context is full; "cancelled"
    prompt            the prompt's ids
    logprobs          log-probabilities of the new tokens, if wanted
    prompt_logprobs   log-probabilities of the prompt's tokens from the second on, if wanted
    """

    ids: list[int]
    text: str | None
    finish: Finish
    prompt: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]


class Piece(NamedTuple):
    """What one step adds to a sequence. `text` is what has become certain, often some tokens late; `finish` is None unless
    it is the last piece."""

    id: int | None
    text: str
    logprob: TokenLogprob | None
    finish: Finish | None


class Writer:
    """A sequence of an engine and its text. Give it every event of the sequence, in order.

    writer = Writer(engine, prompt, options, model_text(model), stop=["\\n\\n"])
    for event in engine.step():
        if event.sequence is writer.sequence:
            piece = writer.piece(event)
    writer.result()                                   when piece.finish is not None
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        options: Options,
        text: ModelText | None = None,
        stop: Sequence[str] = (),
    ):
        self.engine, self.sequence = engine, engine.add(prompt, options)
        self.stream = None if text is None else TextStream(text.tokenizer, stop, self.sequence.prompt)

    def piece(self, event: Event) -> Piece:
        """The event with its text. A stop string ends the sequence. Raises if the sequence has failed."""
        if self.sequence.error is not None:
            raise self.sequence.error
        finish, text, stream = event.finish, "", self.stream
        if stream is not None:
            if event.id is not None and event.id not in self.sequence.options.stop_ids:
                text = stream.add(event.id)
            if stream.stopped:
                self.engine.cancel(self.sequence, "stop")
                finish = self.sequence.finish = "stop"  # also if this token was the last one wanted
            elif finish is not None:
                text += stream.end()
        return Piece(event.id, text, event.logprob, finish)

    def result(self) -> Generation:
        """What was generated."""
        s, text = self.sequence, None if self.stream is None else self.stream.text
        return Generation(s.new, text, s.finish or "cancelled", s.prompt, s.logprobs, s.prompt_logprobs)


class Batch:
    """Prompts that an engine continues together. Iterate over it for (index of the prompt, piece), as they come."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        options: Sequence[Options],
        text: ModelText | None = None,
        stop: Sequence[str] = (),
    ):
        self.engine, self.writers = engine, list[Writer]()
        try:
            for prompt, option in zip(prompts, options, strict=True):
                self.writers.append(Writer(engine, prompt, option, text, stop))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[tuple[int, Piece]]:
        index = {writer.sequence: i for i, writer in enumerate(self.writers)}
        left = len(index)
        try:
            while left:
                for event in self.engine.step():
                    if event.sequence in index:
                        i = index[event.sequence]
                        piece = self.writers[i].piece(event)
                        left -= piece.finish is not None
                        yield i, piece
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what still runs."""
        for writer in self.writers:
            self.engine.cancel(writer.sequence)

    def results(self) -> list[Generation]:
        """What was generated after each prompt, when all pieces have come."""
        return [writer.result() for writer in self.writers]

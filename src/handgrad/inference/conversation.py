"""A conversation with a chat model: its history, its answers token by token, the words an answer depended on, adapters.

    chat = Chat(model, template, system="Answer briefly.")
    for piece in chat.ask("Why is the sky blue?"):     pieces of text; leaving the loop stops the answer
        print(piece, end="")
    chat.why()                                         which words the answer depended on
    chat.attach("runs/mine/adapter"); chat.detach()    switch adapters at run time

The keys and values of the conversation stay in the engine's cache, so a turn computes its own tokens only.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..errors import HandgradError
from ..lora.attachment import Attachment
from ..model.gpt import GPT
from ..text.chat_template import ChatTemplate
from ..text.words import Word, owners, pieces_of, words_of
from .attribution import attribute
from .engine import Engine, Options
from .model_text import model_text
from .sampling import Sampling
from .text_batch import Generation, Writer

SHARE_FOR_ANSWER = 4  # at least 1/4 of the context is left for an answer, if it may be that long

Message = dict[str, str]


class WordScore(NamedTuple):
    """A word, the index of its message (the answer's is the last), and how the answer's log-probability depends on it.

    strength   norm of the gradient with respect to the embeddings of the word's tokens: how much depends on them
    score      gradient · input, summed over its tokens: positive if the word made the answer more probable
    """

    word: Word
    message: int
    strength: float
    score: float


@dataclass(frozen=True)
class Why:
    """What the last answer, or one of its words, depended on.

    messages   the conversation that the model saw, the answer included
    words      every word of it with its strength and score; words of the answer count where they precede others
    rest       strength of what is in no message: the template's text and tokens
    logprob    log-probability of the explained tokens
    """

    messages: list[Message]
    words: list[WordScore]
    rest: float
    logprob: float

    def ranked(self, own: bool) -> list[WordScore]:
        """The words by strength, without signs; `own`: with those of the answer."""
        last = len(self.messages) - 1
        kept = [x for x in self.words if not x.word.is_sign and x.strength and (own or x.message < last)]
        return sorted(kept, key=lambda x: -x.strength)

    def shares(self) -> tuple[float, float, float]:
        """Shares of the squared norm of the gradient: the conversation before the answer, the answer's own words, and the
        rest."""
        last = len(self.messages) - 1
        before = sum(x.strength**2 for x in self.words if x.message < last)
        own = sum(x.strength**2 for x in self.words if x.message == last)
        total = before + own + self.rest**2 or 1.0
        return before / total, own / total, self.rest**2 / total


class Chat:
    """`messages` are the turns so far, without the system prompt: user and assistant in turn.

    system           the system prompt; None: the template's own, if it has one
    sampling         how tokens are chosen; turn i has the seed + i
    max_new_tokens   maximum length of an answer
    """

    def __init__(
        self,
        model: GPT,
        template: ChatTemplate,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int = 512,
    ):
        self.model, self.template, self.system = model, template, system
        self.sampling, self.max_new_tokens = sampling or Sampling(), max_new_tokens
        self.text = model_text(model)
        self.messages: list[Message] = []
        self.attachment: Attachment | None = None
        self.last: Generation | None = None  # the last answer
        self.seen: list[Message] = []  # the conversation it ended, as the model saw it
        self.dropped = 0  # turns that the last question has dropped from the beginning, because the context was full
        self._base_template = template
        self._engine = Engine(model, keep=1)
        self._turn = 0

    @property
    def conversation(self) -> list[Message]:
        """The messages as the template gets them, with the system prompt."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.messages]

    def reset(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self.messages, self.last, self._turn = [], None, 0

    # ── a turn ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, text: str) -> Generator[str, None, None]:
        """Pieces of the answer; an empty one after a step that completes no character. The turn joins the history when the
        answer ends or the iterator is closed; an empty answer leaves the history as it was."""
        kept, prompt = self._fit([*self.messages, {"role": "user", "content": text}])
        seed = self.sampling.seed
        sampling = replace(self.sampling, seed=None if seed is None else seed + self._turn)
        options = Options(self.max_new_tokens, sampling, self.text.ends)
        self.dropped = (len(self.messages) + 1 - len(kept)) // 2
        return self._answer(prompt, options, kept)

    def _answer(self, prompt: list[int], options: Options, messages: list[Message]) -> Generator[str, None, None]:
        engine, writer = self._engine, Writer(self._engine, prompt, options, self.text)
        sequence = writer.sequence
        try:
            while sequence.finish is None:
                pieces = [writer.piece(event).text for event in engine.step() if event.sequence is sequence]
                yield "".join(pieces)
        finally:
            engine.cancel(sequence)
            answer = writer.result()
            if answer.text and answer.text.strip():
                self.messages = [*messages, {"role": "assistant", "content": answer.text}]
                self.last, self.seen = answer, self.conversation
                self._turn += 1

    def _fit(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The newest turns that leave room for an answer, and their ids."""
        n_context = self.model.config.n_context
        most = n_context - min(self.max_new_tokens, n_context // SHARE_FOR_ANSWER)
        system = self.conversation[: self.system is not None]
        while True:
            rendered = self.template.render([*system, *messages], add_generation_prompt=True)
            ids = self.text.tokenizer.encode_prompt(rendered)
            if len(ids) <= most:
                return messages, ids
            if len(messages) < 3:
                what = "the message" if self.system is None else "the message with the system prompt"
                raise HandgradError(
                    f"{what} has {len(ids):,} tokens, and the context {n_context:,}, of which {n_context - most:,} are for"
                    " the answer: shorten it"
                )
            messages = messages[2:]

    # ── why ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def why(self, word: str | None = None) -> Why:
        """The words that the last answer depended on, or that one word of it did: by one backward pass."""
        if self.last is None:
            raise HandgradError("there is no answer to explain yet: ask something first")
        prompt, new = self.last.prompt, list(self.last.ids)
        if new[-1] in self.text.ends:
            new.pop()
        pieces = pieces_of(self.text.tokenizer, prompt + new)
        text, start = "".join(pieces), len("".join(pieces[: len(prompt)]))
        messages = self.seen
        found = [(one, i) for i, part in enumerate(_places(text, messages, start)) for one in words_of(text, *part)]
        owner = owners(pieces, [one for one, _ in found])
        targets = range(len(prompt), len(prompt) + len(new))
        if word is not None:
            wanted = {
                i
                for i, (one, message) in enumerate(found)
                if message == len(messages) - 1 and one.text.casefold() == word.casefold()
            }
            if not wanted:
                raise HandgradError(
                    f"the last answer has no word {word!r}: give one of its words, or none to explain all of them"
                )
            chosen = [t for t in targets if owner[t] in wanted]
        else:
            chosen = list(targets)
        result = attribute(self.model, prompt + new, chosen)
        scores, squares = [0.0] * (len(found) + 1), [0.0] * (len(found) + 1)  # the last is the rest
        for i, score, norm in zip(owner, result.scores.tolist(), result.norms.tolist(), strict=True):
            place = len(found) if i is None else i
            scores[place] += score
            squares[place] += norm**2
        words = [WordScore(*one, math.sqrt(squares[i]), scores[i]) for i, one in enumerate(found)]
        return Why(messages, words, math.sqrt(squares[-1]), result.logprob)

    # ── adapters ────────────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, folder: str | Path, template: ChatTemplate | None = None) -> None:
        """Use an adapter of the same base, with its own chat template if it has one, from the next answer on. If it does
        not fit, the one in use stays."""
        before, self.attachment = self.attachment, None
        if before is not None:
            before.detach()
        try:
            self.attachment = Attachment(self.model, folder)
        except BaseException:
            if before is not None:
                self.attachment = Attachment(self.model, before.folder)
            raise
        self.template = template or self._base_template
        self._forget_cache()

    def detach(self) -> None:
        """Use the base model alone."""
        if self.attachment is not None:
            self.attachment.detach()
            self.attachment, self.template = None, self._base_template
            self._forget_cache()

    def _forget_cache(self) -> None:
        """Keys, values and the last answer belong to other weights."""
        self._engine.close()
        self._engine = Engine(self.model, keep=1)
        self.last = None


def _places(text: str, messages: list[Message], answer: int) -> list[tuple[int, int]]:
    """Where the content of each message is in the text; an empty place if the template has changed it. The answer, the last
    message, begins at `answer`."""
    found, at = [], 0
    for message in messages[:-1]:
        content = message["content"].strip()
        start = text.find(content, at, answer)
        end = start + len(content)
        found.append((start, end) if start >= 0 else (at, at))
        at = max(at, end if start >= 0 else at)
    return [*found, (answer, len(text))]

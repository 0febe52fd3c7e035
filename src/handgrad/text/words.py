"""The words of a text, and the word that each token belongs to.

A word is a run of letters and digits, with apostrophes and hyphens inside; a run of other signs; or one character of a
script that is written without spaces between words.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from .streaming import TextStream
from .tokenizer import Tokenizer

_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_MARKS = "\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u0dff"  # accents and vowel signs
_LETTERS = rf"(?:[^\W{_ALONE}]|[{_MARKS}])+"
_WORD = re.compile(rf"[{_ALONE}]|{_LETTERS}(?:['’\-]{_LETTERS})*|(?:(?![{_MARKS}{_ALONE}])[^\w\s])+")


class Word(NamedTuple):
    """text[start:end] of a longer text."""

    text: str
    start: int
    end: int

    @property
    def is_sign(self) -> bool:
        """Whether it has neither letters nor digits."""
        return not any(c.isalnum() for c in self.text)


def words_of(text: str, start: int = 0, end: int | None = None) -> list[Word]:
    """The words of text[start:end]."""
    found = _WORD.finditer(text, start, len(text) if end is None else end)
    return [Word(match[0], match.start(), match.end()) for match in found]


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each id adds. Of several ids that make one character, the last adds it."""
    stream = TextStream(tokenizer)
    return [stream.add(i) for i in ids]


def owners(pieces: Sequence[str], words: Sequence[Word]) -> list[int | None]:
    """For each piece of a text, the index of the word that its first visible character belongs to; None for spaces, and for
    what is between the words. A piece without text belongs to the character that the next pieces complete."""
    by_character = {at: i for i, word in enumerate(words) for at in range(word.start, word.end)}
    found: list[int | None] = []
    start = 0
    for piece in pieces:
        skipped = len(piece) - len(piece.lstrip())
        found.append(by_character.get(start + skipped) if skipped < len(piece) or not piece else None)
        start += len(piece)
    return found

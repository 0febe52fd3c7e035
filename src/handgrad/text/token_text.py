"""The text of single tokens: their bytes, a name that tells them apart, and where each begins in a text."""

import codecs
import re
from collections.abc import Sequence

from .byte_level import byte_symbols
from .streaming import INCOMPLETE
from .tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how sentencepiece vocabularies write a byte
_SYMBOLS = {symbol: b for b, symbol in enumerate(byte_symbols())}


class TokenText:
    """A token's text inside a text: many decoders remove a space at the beginning, so it is decoded behind another one."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._before = tokenizer.encode(_first_character(tokenizer))[-1:]
        self._before_text = tokenizer.decode(self._before)
        self._known: dict[int, bytes] = {}

    def raw(self, i: int) -> bytes:
        """The UTF-8 bytes of a token, which may be part of a character."""
        if i not in self._known:
            self._known[i] = self._decode(i)
        return self._known[i]

    def _decode(self, i: int) -> bytes:
        both = self.tokenizer.decode([*self._before, i])
        if both.startswith(self._before_text):
            text = both[len(self._before_text) :]
        else:
            text = self.tokenizer.decode([i])
        if INCOMPLETE not in text:
            return text.encode()
        symbol = self.tokenizer.inner.id_to_token(i) or ""
        if found := _BYTE.fullmatch(symbol):
            return bytes([int(found[1], 16)])
        if all(c in _SYMBOLS for c in symbol):
            return bytes(_SYMBOLS[c] for c in symbol)
        return text.encode()

    def name(self, i: int) -> str:
        """The token's text; "bytes:\\xe2\\x80" for part of a character; "token_id:7" if it has none."""
        found = self.raw(i)
        try:
            return found.decode() or f"token_id:{i}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in found)

    def first(self, i: int) -> bytes:
        """The bytes of a token at the beginning of a text."""
        text = self.tokenizer.decode([i])
        return self.raw(i) if INCOMPLETE in text else text.encode()


class Offsets:
    """Where tokens begin in a text, in characters: `next` takes them in order. A token that continues a character begins
    at that character."""

    def __init__(self, tokens: TokenText, start: int = 0, beginning: bool = False):
        """beginning   the first token is the first of the text"""
        self.tokens, self.at, self.beginning = tokens, start, beginning
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, i: int) -> int:
        """The offset of this token."""
        found = self.at
        raw = self.tokens.first(i) if self.beginning else self.tokens.raw(i)
        self.beginning = False
        self.at += len(self._decoder.decode(raw))
        return found

    def all(self, ids: Sequence[int]) -> list[int]:
        return [self.next(i) for i in ids]


def _first_character(tokenizer: Tokenizer) -> str:
    """A character that the tokenizer knows."""
    if tokenizer.inner.token_to_id("a") is not None or not tokenizer.knows_few_characters:
        return "a"
    return min(tokenizer.inner.get_vocab())

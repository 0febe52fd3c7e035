"""Decode ids to text while they are being generated: never half a character, and only up to a stop string."""

from collections.abc import Sequence

from .tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # U+FFFD at the end: more bytes of this character follow
MAX_PENDING = 16  # ids without a complete character, after which they are taken as they are


class TextStream:
    """The text of ids that come one by one.

        stream = TextStream(tokenizer, stop=["\\n\\n"])
        stream.add(i)     the text that is certain now: complete characters that cannot begin a stop string
        stream.stopped    whether a stop string was found; it and what follows are left out
        stream.end()      the text that was held back in case a stop string came

    `before` are the last ids of the prompt, whose text this one continues. `text` is all of it so far. An id costs the same
    however long the text is: only the ids since the last complete character are decoded, behind those that gave that
    character, because some decoders remove a space before the first word."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()):
        self.tokenizer, self.stop = tokenizer, [s for s in stop if s]
        self.text, self.stopped = "", False
        self._before = list(before[-MAX_PENDING:])
        self._pending: list[int] = []
        self._held = ""

    def add(self, i: int) -> str:
        """The text that is certain with this id; it may be empty."""
        if self.stopped:
            return ""
        self._pending.append(i)
        return self._release(self._decode())

    def end(self) -> str:
        """The rest of the text. Bytes of an incomplete character are left out."""
        piece, self._held = self._held, ""
        self.text += piece
        return piece

    def _decode(self) -> str:
        """The text of the pending ids if it is complete."""
        before = self.tokenizer.decode(self._before) if self._before else ""
        both = self.tokenizer.decode(self._before + self._pending)
        if both.startswith(before):
            piece = both[len(before) :]
        else:  # bytes of an incomplete character spoil those before them, in some decoders
            piece = self.tokenizer.decode(self._pending)
        if piece.endswith(INCOMPLETE) and len(self._pending) < MAX_PENDING:
            return ""
        self._before, self._pending = self._pending, []
        return piece

    def _release(self, piece: str) -> str:
        if not self.stop:
            self.text += piece
            return piece
        self._held += piece
        found = [at for at in (self._held.find(s) for s in self.stop) if at >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.stopped = True
            return self.end()
        longest = max(overlap(self._held, s) for s in self.stop)
        certain = self._held[: len(self._held) - longest]
        self._held = self._held[len(certain) :]
        self.text += certain
        return certain


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

"""Decode ids to text while they are being generated."""

from collections.abc import Iterable, Iterator

from .tokenizer import Tokenizer


def decode_stream(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yield the text of each new id, as soon as its characters are complete; stop at the end-of-text id."""
    decoded, seen = "", list[int]()
    for i in ids:
        if i == tokenizer.end:
            return
        seen.append(i)
        text = tokenizer.decode(seen)
        if not text.endswith("\ufffd"):  # U+FFFD: more bytes of this character follow
            yield text[len(decoded) :]
            decoded = text

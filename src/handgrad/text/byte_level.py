"""Byte-level tokenizers, as GPT-2's: every byte of a text has a printable character."""

from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors


def byte_level(model: models.Model) -> tokenizers.Tokenizer:
    """A tokenizer that maps text to byte symbols before and after `model`, as GPT-2's does."""
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    return inner


def byte_symbols() -> list[str]:
    """The printable character for each byte in byte-level vocabularies: the byte's own character if it is printable, else
    the next code point from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others: Iterator[int] = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]

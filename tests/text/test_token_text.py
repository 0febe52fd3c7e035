"""The text of single tokens: bytes, names and offsets, for byte-level and sentencepiece-like vocabularies."""

from example_files import sentencepiece

from handgrad.text.token_text import Offsets, TokenText
from handgrad.text.tokenizer import make


def test_sentencepiece_like_tokens() -> None:
    tokenizer = sentencepiece("a", "▁a", "▁b", "c", "▁")
    tokens = TokenText(tokenizer)
    euro = [5 + b for b in "€".encode()]
    ids = [1, 3, *euro, 2]  # "ac€ b": the first space is removed
    text = tokenizer.decode(ids)
    assert text == "ac€ b"
    assert [tokens.name(i) for i in ids] == [" a", "c", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", " b"]
    assert Offsets(tokens, beginning=True).all(ids) == [0, 1, 2, 2, 2, 3]
    assert Offsets(tokens, 10).all(ids[-1:] + ids[:1]) == [10, 12]


def test_byte_level_tokens() -> None:
    tokens = TokenText(make("bytes", []))
    assert b"".join(tokens.raw(i) for i in range(256)) == bytes(range(256))
    assert len({tokens.name(i) for i in range(256)}) == 256


def test_character_tokens() -> None:
    tokenizer = make("chars", ["xyz"])
    assert [TokenText(tokenizer).name(i) for i in tokenizer.encode("zyx")] == list("zyx")

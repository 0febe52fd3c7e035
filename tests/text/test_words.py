"""Words of a text, and the tokens that belong to each."""

import pytest

from handgrad.text.tokenizer import make
from handgrad.text.words import Word, owners, pieces_of, words_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't panic, Jean-Luc!", ["Don't", "panic", ",", "Jean-Luc", "!"]),
        ("a_b 3.5%  x\n\ny", ["a_b", "3", ".", "5", "%", "x", "y"]),
        ("東京は near", ["東", "京", "は", "near"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("café cafe\u0301", ["café", "cafe\u0301"]),
        ("🙂 ok", ["🙂", "ok"]),
        (" \n", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    words = words_of(text)
    assert [word.text for word in words] == expected
    assert all(text[word.start : word.end] == word.text for word in words)


def test_every_visible_character_is_in_a_word() -> None:
    text = "".join(map(chr, [*range(33, 0x3000), *range(0x4E00, 0x4E10), *range(0x1F600, 0x1F610)]))
    inside = {at for word in words_of(text) for at in range(word.start, word.end)}
    assert [c for at, c in enumerate(text) if at not in inside and not c.isspace()] == []


def test_signs_and_parts() -> None:
    assert [word.text for word in words_of("one two, three", 4)] == ["two", ",", "three"]
    assert [word.text for word in words_of("one two, three", 4, 7)] == ["two"]
    assert Word("…", 0, 1).is_sign and not Word("x", 0, 1).is_sign


def test_tokens_belong_to_words() -> None:
    tokenizer = make("bytes", [])
    text = "né  é!"
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert pieces == ["n", "", "é", " ", " ", "", "é", "!"]
    assert owners(pieces, words_of(text)) == [0, 0, 0, None, None, 1, 1, 2]
    assert owners(["Hi", " the", "re", ".\n", "\n"], words_of("Hi there.\n\n")) == [0, 1, 1, 2, None]
    assert owners(["<s>", "Hi"], words_of("<s>Hi", 3)) == [None, 0]

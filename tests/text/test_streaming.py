"""Streaming text: whole characters, spaces as in the complete text, stop strings, constant cost per id."""

from collections.abc import Sequence

import pytest
from example_files import sentencepiece

from handgrad.text import tokenizer
from handgrad.text.streaming import MAX_PENDING, TextStream
from handgrad.text.tokenizer import Tokenizer

TEXT = "Naïve 👩‍🚀 résumé, 你好世界! 🎉🎉\n\tΔx = ∂ℓ/∂w  é́ \u200d fin"


def streamed(made: Tokenizer, ids: list[int], stop: Sequence[str] = ()) -> list[str]:
    """The pieces of text, up to a stop string."""
    stream = TextStream(made, stop)
    pieces = []
    for i in ids:
        pieces.append(stream.add(i))
        if stream.stopped:
            break
    return [piece for piece in (*pieces, stream.end()) if piece]


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe:300"])
def test_pieces_are_whole_characters(kind: str) -> None:
    made = tokenizer.make(kind, [TEXT * 3])
    ids = made.encode(TEXT)
    pieces = streamed(made, ids)
    assert "".join(pieces) == TEXT and "\ufffd" not in "".join(pieces)
    assert len(pieces) > len(TEXT) // 3, "text comes as early as possible"


def test_sentencepiece_keeps_spaces_and_joins_bytes() -> None:
    made = sentencepiece("<unk>", "▁", "▁the", "▁cat", "s", "▁sat", ",")
    ids = [2, 3, 4, 5, 6, 1, 1, *(7 + b for b in "世界🎉".encode()), 3, *(7 + b for b in "é".encode()), 4, 1]
    assert made.decode(ids) == "the cats sat,  世界🎉 catés "
    assert "".join(streamed(made, ids)) == made.decode(ids)
    # the space of the first word belongs to the text if it continues a prompt
    stream = TextStream(made, before=[2])
    assert "".join(stream.add(i) for i in ids[1:]) == " cats sat,  世界🎉 catés "
    # an incomplete character does not spoil the one before it
    broken = [*(7 + b for b in "世".encode()), 7 + 0xE4, 3]
    assert "".join(streamed(made, broken)) == "世\ufffd cat"


def test_incomplete_characters_at_the_end_are_left_out() -> None:
    made = tokenizer.make("bytes", [])
    ids = list("a🎉".encode())[:-1]
    assert streamed(made, ids) == ["a"]
    stream = TextStream(made)
    assert [stream.add(i) for i in ids] == ["a", "", "", ""] and stream.end() == "" and stream.text == "a"
    genuine = list("\ufffd!".encode())
    assert "".join(streamed(made, genuine)) == "\ufffd!"


def test_cost_of_an_id_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer.make("bytes", [])
    lengths: list[int] = []
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: lengths.append(len(ids)) or decode(self, ids))
    for ids in (list((TEXT * 20).encode()), [0x80] * 500, [0xF0] * 500):
        lengths.clear()
        streamed(made, ids)
        assert len(lengths) <= 3 * len(ids) and max(lengths) <= 2 * MAX_PENDING


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["b\n\n"], "aab\nb"), (["zz", "b\nb"], "aa"), (["ab\nb", "aab"], ""), (["\n\nc", "b\n\n"], "aab\nb"),
        (["never"], "aab\nbb\n\ncx"), (["x", "cx"], "aab\nbb\n\n"), (["cxy"], "aab\nbb\n\ncx"),
    ],
)  # fmt: skip
def test_stop_strings_are_left_out(stop: list[str], expected: str) -> None:
    made = tokenizer.make("bytes", [])
    assert "".join(streamed(made, list(b"aab\nbb\n\ncx"), stop=stop)) == expected
    stream = TextStream(made, stop)
    so_far = ""
    for i in b"aab\nbb\n\ncx":
        so_far += stream.add(i)
        assert expected.startswith(so_far), "nothing of a stop string is released"
    assert so_far + stream.end() == expected == stream.text


def test_stop_string_of_several_bytes() -> None:
    made = tokenizer.make("bytes", [])
    assert "".join(streamed(made, list("1é🎉2🎉🎉3".encode()), stop=["🎉🎉"])) == "1é🎉2"

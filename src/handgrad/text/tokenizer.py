"""Text ↔ token ids. Every tokenizer wraps one of the `tokenizers` library, so other tools can open its file.

bytes       256 ids, no training, any text
chars       one id for each character of the data
gpt2        GPT-2's vocabulary of 50,257 ids
bpe:N       byte-pair encoding with N ids, trained on the data
a path      tokenizer.json, or a folder that contains one
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from ..checks import check_added_tokens
from ..errors import HandgradError, library_errors, option, printable, shown, without_panic_report
from ..files.reading import MB, check_unicode, parse_json, read_json, read_text
from ..gguf.file import is_gguf, open_gguf
from ..gguf.tokenizer import read_tokenizer
from .byte_level import byte_level, byte_symbols
from .chat_template import Message, of_files
from .downloads import fetch
from .tokenizer_check import check

KINDS = "bytes, chars, gpt2, bpe:N or a tokenizer.json"
END = "<|endoftext|>"
FORMAT = "handgrad-format.json"  # how the model reads prompts: see `format.py`
EXTRA_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", FORMAT)
FILE_BYTES = 128 * MB  # maximum size of a tokenizer file
MAX_IDS = 1 << 24
UNKNOWN = "\0"  # unknown token of character vocabularies; text files never contain it
REFUSED = "\0\0"  # unknown token of a vocabulary without one: it is not in it, so the library raises where it is needed
MAX_PIECE = 1 << 18  # characters encoded in one call: the library needs about 400 bytes for each
MAX_WORD = 256  # characters: longer runs of one character class are cut before BPE training
MAX_RUN_TEXT = 1 << 18  # characters of such runs that BPE training uses

_LINE_START = re.compile(r"\n(?=\S)")
_SINGLE_SPACE = re.compile(r"(?<=\S) (?=\S)")
_LONG_RUN = re.compile(rf"[^\W\d_]{{{MAX_WORD},}}|\d{{{MAX_WORD},}}|(?:[^\w\s]|_){{{MAX_WORD},}}|\s{{{MAX_WORD},}}")


class _CharacterTable(NamedTuple):
    """Ids of single characters, sorted by code point."""

    code_points: np.ndarray
    ids: np.ndarray


class Tokenizer:
    """All ids are below n_vocab. `end` is the id of the end-of-text token, or None. `extra_files` maps file names to the
    content of the files next to tokenizer.json: settings, special tokens, chat template; `source` is their folder."""

    def __init__(
        self, inner: tokenizers.Tokenizer, extra_files: dict[str, str] | None = None, source: Path | None = None
    ):
        inner.no_truncation()  # a file may store the truncation and padding of earlier batches
        inner.no_padding()
        self.inner = inner
        self.extra_files = extra_files or {}
        self.source = source or Path("the tokenizer")
        vocabulary: dict[str, int] = inner.get_vocab()
        self.n_vocab: int = 1 + max(vocabulary.values(), default=-1)  # ids may have gaps
        if self.n_vocab > MAX_IDS:
            raise HandgradError(f"the tokenizer has an id of {self.n_vocab - 1:,}; the maximum is {MAX_IDS - 1:,}")
        self.end: int | None = inner.token_to_id(self._end_token())
        # Byte and character tokenizers are encoded by table look-up if their JSON equals that of the ones built here.
        self._bytes = len(vocabulary) == 256 and inner.to_str() == _byte_tokenizer().to_str()
        self._characters: _CharacterTable | None = None
        single_characters = vocabulary and UNKNOWN not in vocabulary and max(map(len, vocabulary)) == 1
        if single_characters and inner.to_str() == _character_tokenizer(vocabulary).to_str():
            in_order = sorted(vocabulary)
            code_points, ids = [ord(c) for c in in_order], [vocabulary[c] for c in in_order]
            self._characters = _CharacterTable(np.array(code_points), np.array(ids))
        if isinstance(inner.model, models.BPE) and inner.model.unk_token is None:
            inner.model.unk_token = REFUSED  # the library would leave unknown characters out, without a word

    def _end_token(self) -> str:
        """The end-of-text token named in tokenizer_config.json, or the default."""
        try:
            token = parse_json(self.extra_files.get("tokenizer_config.json", "{}"), "").get("eos_token") or END
        except (HandgradError, AttributeError):
            return END
        return str(token.get("content", END) if isinstance(token, dict) else token)

    @property
    def knows_few_characters(self) -> bool:
        """Whether it has a table of single characters and refuses all others."""
        return self._characters is not None

    @property
    def unit(self) -> str:
        """What a reader calls its tokens: byte, character or word."""
        return "byte" if self._bytes else "character" if self._characters is not None else "word"

    @property
    def id_type(self) -> "np.dtype[np.unsignedinteger]":
        """The narrowest integer type that holds every id."""
        return np.dtype("<u2" if self.n_vocab <= 1 << 16 else "<u4")

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens around it."""
        return [int(i) for i in self.encode_batch([text])[0]]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text to continue, after what the tokenizer's file puts before every text: Gemma's <bos>."""
        return self.begun(self.encode(text))

    def begun(self, ids: list[int]) -> list[int]:
        """The ids with those before every text in front, unless they are there, as after a chat template, or empty."""
        return ids if not ids or ids[: len(self.begin)] == self.begin else [*self.begin, *ids]

    @cached_property
    def begin(self) -> list[int]:
        """The ids that the tokenizer's file puts before every text."""
        for text in ("a", "0", " "):
            try:
                plain, whole = (self.inner.encode(text, add_special_tokens=x).ids for x in (False, True))
            except Exception:  # it has no token for this character
                continue
            n = len(plain)
            return next((whole[:i] for i in range(len(whole)) if n and whole[i : i + n] == plain), [])
        return []

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encode several texts on all cores. Very long texts are encoded in pieces, cut between tokens where possible."""
        for text in texts:
            if not isinstance(text, str):
                raise HandgradError(f"encode takes a text, not {shown(text)}")
            check_unicode(text, "the text")
        if self._bytes:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        if self._characters is not None:
            return [self._look_up(text, self._characters) for text in texts]
        pieces = [list(split_long_text(text)) for text in texts]
        with library_errors("the tokenizer cannot encode this text"), without_panic_report():
            try:
                encoded = iter(
                    self.inner.encode_batch([piece for group in pieces for piece in group], add_special_tokens=False)
                )
            except Exception as reason:
                if REFUSED in str(reason):
                    raise self._missing(texts) from None
                raise
        ids = [[np.array(e.ids, np.int64) for e in islice(encoded, len(group))] for group in pieces]
        return [group[0] if len(group) == 1 else np.concatenate(group) for group in ids]

    def _missing(self, texts: list[str]) -> HandgradError:
        """The error that names the first character without a token."""
        for character in dict.fromkeys(character for text in texts for character in text):
            try:
                self.inner.encode(character, add_special_tokens=False)
            except Exception:
                break
        return HandgradError(
            f"the tokenizer has no token for {character!r}, and none for unknown characters: remove it from the text, or use"
            " another tokenizer"
        )

    def _look_up(self, text: str, table: _CharacterTable) -> np.ndarray:
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        rows = np.minimum(np.searchsorted(table.code_points, code_points), len(table.code_points) - 1)
        unknown = table.code_points[rows] != code_points
        if unknown.any():
            raise HandgradError(
                f"the tokenizer knows {len(table.code_points)} characters, and {chr(code_points[unknown][0])!r} is not one"
                f" of them: use other text, or train with {option('tokenizer', 'bytes')}"
            )
        return table.ids[rows]

    def __repr__(self) -> str:
        return f"Tokenizer({self.n_vocab:,} tokens, {self.source})"

    def decode(self, ids: Any) -> str:
        """The text of token ids, special tokens included: a list, an array or a tensor of one sequence. An id without a
        token, as a padded head has them, is nothing."""
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        with library_errors("the tokenizer cannot decode these ids"), without_panic_report():
            return str(self.inner.decode(ids, skip_special_tokens=False))

    def chat(self, messages: str | Sequence[Message]) -> list[int]:
        """The ids of a conversation in the model's chat template, ready for the answer. Messages are
        {"role": "user", "content": "…"}, …; a text is one message of the user."""
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self.encode_prompt(of_files(self.extra_files, self.source).render(given, add_generation_prompt=True))

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer: equal fingerprints encode every text to the same ids."""
        other_end = "" if self.end == self.inner.token_to_id(END) else f" {self.end}"
        return hashlib.sha256(f"{self.to_json()}{other_end}".encode()).hexdigest()

    def to_json(self) -> str:
        return str(self.inner.to_str()).replace(f'"unk_token":{json.dumps(REFUSED)}', '"unk_token":null')

    def write(self, folder: Path) -> None:
        """Write tokenizer.json and the extra files; tokenizer_config.json for `transformers` if it is not among them."""
        (folder / "tokenizer.json").write_text(self.to_json(), encoding="utf-8")
        for name, text in self.extra_files.items():
            (folder / name).write_text(text, encoding="utf-8")
        if "tokenizer_config.json" in self.extra_files:
            return
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if self.end is not None:
            settings |= {"eos_token": END, "bos_token": END}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def cut_position(text: str, searched: int = 0) -> int:
    """Where to cut the beginning of a longer text, so that tokens are not cut; 0 if more text is needed first.

    After the last line break that a non-blank character follows. If there is none and the text has MAX_PIECE characters:
    before the last single space, else at its end. The first `searched` characters contain no such line break."""
    cut = 0
    for found in _LINE_START.finditer(text, max(0, searched - 1)):
        cut = found.end()
    if cut or len(text) < MAX_PIECE:
        return cut
    for found in _SINGLE_SPACE.finditer(text, len(text) // 2):
        cut = found.start()
    return cut or len(text)


def split_long_text(text: str) -> Iterator[str]:
    """Cut a text longer than 2 MAX_PIECE characters into pieces of at most MAX_PIECE, the last of at most twice that."""
    start = 0
    while len(text) - start > 2 * MAX_PIECE:
        piece = text[start : start + MAX_PIECE]
        piece = piece[: cut_position(piece)]
        yield piece
        start += len(piece)
    yield text[start:]


def make(kind: str, texts: Iterable[str]) -> Tokenizer:
    """Make a tokenizer of the given kind. `texts` are read only for kinds that are built from data."""
    if kind == "bytes":
        return Tokenizer(_byte_tokenizer())
    if kind == "chars":
        return _train_chars(texts)
    if kind == "gpt2":
        return gpt2()
    if kind.startswith("bpe:"):
        return _train_bpe(kind, texts)
    path = Path(kind)
    if path.exists():
        return read(path)
    raise HandgradError(f"unknown tokenizer {kind!r}: give {KINDS}")


def read(path: Path) -> Tokenizer:
    """Read tokenizer.json, a folder that contains it, a folder with GPT-2's vocab.json and merges.txt, or the metadata of a
    GGUF file."""
    if is_gguf(path):
        return Tokenizer(*read_tokenizer(open_gguf(path)), path)
    extra_files: dict[str, str] = {}
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        extra_files = read_extra_files(path)
        if (path / "tokenizer.json").exists():
            path = path / "tokenizer.json"
        elif (path / "vocab.json").exists() and (path / "merges.txt").exists():
            return _from_merges(path / "vocab.json", path / "merges.txt", extra_files)
        else:
            raise HandgradError(f"{path} contains no tokenizer: neither tokenizer.json nor vocab.json and merges.txt")
    text = read_text(path, FILE_BYTES)
    check(parse_json(text, path), path, len(text))
    with library_errors(f"{path} is not a tokenizer.json"):
        return Tokenizer(tokenizers.Tokenizer.from_str(text), extra_files, folder)


def read_extra_files(folder: Path) -> dict[str, str]:
    """The files next to tokenizer.json: their texts by name."""
    return {name: read_text(folder / name) for name in EXTRA_FILES if (folder / name).exists()}


def from_json(text: str) -> Tokenizer:
    """The inverse of `Tokenizer.to_json`."""
    return Tokenizer(tokenizers.Tokenizer.from_str(text))


def gpt2() -> Tokenizer:
    """GPT-2's tokenizer, downloaded at first use."""
    vocab, merges = fetch("gpt2-tokenizer")
    return _from_merges(vocab, merges)


def _from_merges(vocab: Path, merges: Path, extra_files: dict[str, str] | None = None) -> Tokenizer:
    lines = read_text(merges, FILE_BYTES).split("\n")
    pairs = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#version")]
    with library_errors(f"{vocab} and {merges} are not a vocabulary"):
        model = models.BPE(vocab=read_json(vocab, FILE_BYTES), merges=pairs)
    inner = byte_level(model)
    _add_tokens(inner, extra_files or {}, vocab.parent)
    return Tokenizer(inner, extra_files, vocab.parent)


def _add_tokens(inner: tokenizers.Tokenizer, extra_files: dict[str, str], folder: Path) -> None:
    """Add the tokens of added_tokens.json and of added_tokens_decoder in tokenizer_config.json. Their ids must follow
    those of the vocabulary, or be in it, as GPT-2's end-of-text token is."""
    added: dict[int, AddedToken] = {}
    try:
        words = parse_json(extra_files.get("added_tokens.json", "{}"), "added_tokens.json")
        check_added_tokens(list(words), folder)
        for word, i in words.items():
            added[int(i)] = AddedToken(word, special=True)
        settings = parse_json(extra_files.get("tokenizer_config.json", "{}"), "tokenizer_config.json")
        described = settings.get("added_tokens_decoder") or {}
        check_added_tokens(described, folder)
        for i, entry in described.items():
            flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
            added[int(i)] = AddedToken(entry["content"], **{f: entry.get(f) or False for f in flags})
    except HandgradError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as reason:
        raise HandgradError(f"{folder}: the added tokens cannot be read: {reason}") from None
    end = inner.token_to_id(END)
    if end is not None:
        added.setdefault(end, AddedToken(END, special=True))
    for i, token in sorted(added.items()):
        (inner.add_special_tokens if token.special else inner.add_tokens)([token])
        if inner.token_to_id(token.content) != i:
            raise HandgradError(f"{folder}: {token.content!r} should have id {i}, which does not follow the vocabulary")


def _byte_tokenizer() -> tokenizers.Tokenizer:
    """Byte-pair encoding without merges: id i is byte i."""
    vocabulary = {symbol: i for i, symbol in enumerate(byte_symbols())}
    return byte_level(models.BPE(vocab=vocabulary, merges=[]))


def _train_chars(texts: Iterable[str]) -> Tokenizer:
    seen: set[str] = set()
    for text in texts:
        seen |= set(text)
    if not seen:
        raise HandgradError(f"{option('tokenizer', 'chars')} needs text, and the data has none")
    if len(seen) > 65_535:
        raise HandgradError(
            f"the data has {len(seen):,} different characters: use {option('tokenizer', 'bytes')} or bpe:N"
        )
    check_unicode("".join(seen), "the text")
    return Tokenizer(_character_tokenizer({c: i for i, c in enumerate(sorted(seen))}))


def _character_tokenizer(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def _train_bpe(kind: str, texts: Iterable[str]) -> Tokenizer:
    size = kind.removeprefix("bpe:")
    if not (size.isascii() and size.isdigit()) or not 257 <= int(size[:20]) <= MAX_IDS:
        raise HandgradError(
            f"{option('tokenizer', printable(kind))}: give bpe:N with N of at least 257 (256 bytes and the end-of-text"
            f" token) and at most {MAX_IDS:,}"
        )
    inner = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=int(size), special_tokens=[END], initial_alphabet=byte_symbols(), show_progress=False
    )
    with library_errors("cannot train a BPE tokenizer on this text"):
        inner.train_from_iterator(_with_bounded_words(texts), trainer)
    return Tokenizer(inner)


def _with_bounded_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts with very long words cut: BPE training needs memory and time for every character of every distinct
    word. Runs of letters, digits, whitespace or other characters that are longer than MAX_WORD are cut into words of that
    length; only the first MAX_RUN_TEXT characters of such runs are used."""
    used = 0
    for text in texts:
        check_unicode(text, "the text")
        for piece in split_long_text(text):
            start = 0
            for run in _LONG_RUN.finditer(piece):
                if run.start() > start:
                    yield piece[start : run.start()]
                stop = min(run.end(), run.start() + MAX_RUN_TEXT - used)
                yield from (piece[i : min(i + MAX_WORD, stop)] for i in range(run.start(), stop, MAX_WORD))
                used += stop - run.start()
                start = run.end()
            if start < len(piece):
                yield piece[start:]

"""Text ↔ ids. Every tokenizer is one of the `tokenizers` library, so that its file opens in every other tool.

bytes       256 ids, no training, any text
chars       one id for each character of the data
gpt2        GPT-2's own 50,257
bpe:N       N ids, merged from bytes by what is frequent in the data
a file      tokenizer.json, or a folder that holds one
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

from ..errors import HandgradError, printable
from ..files.reading import MB, check_unicode, parse_json, read_json, read_text
from .downloads import get
from .tokenizer_check import check

KINDS = "bytes, chars, gpt2, bpe:N or a tokenizer.json"
END = "<|endoftext|>"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
FILE_BYTES = 128 * MB  # of a tokenizer's file
MOST_IDS = 1 << 24
UNKNOWN = "\0"  # of character vocabularies; never a character of a text file
LONGEST = 1 << 18  # characters that the library is given in one piece: it takes some 400 bytes for each
LONG_WORD = 256  # characters: longer runs of one kind are cut before pairs are counted
LONG_TEXT = 1 << 18  # characters of such runs that are counted

_LINE = re.compile(r"\n(?=\S)")
_BLANK = re.compile(r"(?<=\S) (?=\S)")
_LONG_RUN = re.compile(rf"[^\W\d_]{{{LONG_WORD},}}|\d{{{LONG_WORD},}}|(?:[^\w\s]|_){{{LONG_WORD},}}|\s{{{LONG_WORD},}}")


class _Table(NamedTuple):
    """Ids of single characters, by their code points, in order."""

    points: np.ndarray
    ids: np.ndarray


class Tokenizer:
    """Ids below n_vocab; `end` is the id between documents, if there is one. `beside` are the files that came with it:
    settings, special tokens, chat template."""

    def __init__(self, inner: tokenizers.Tokenizer, beside: dict[str, str] | None = None):
        inner.no_truncation()  # what a file remembers of somebody's batches is not part of the vocabulary
        inner.no_padding()
        self.inner = inner
        self.beside = beside or {}
        vocabulary: dict[str, int] = inner.get_vocab()
        self.n_vocab: int = 1 + max(vocabulary.values(), default=-1)  # there can be gaps
        if self.n_vocab > MOST_IDS:
            raise HandgradError(f"the tokenizer has an id of {self.n_vocab - 1:,}: {MOST_IDS - 1:,} is the limit")
        self.end: int | None = inner.token_to_id(self._end_word())
        # Two kinds are a look-up in a table. A tokenizer is one of them if it is, to the letter, what is written here.
        self._bytes = len(vocabulary) == 256 and inner.to_str() == _byte_table().to_str()
        self._characters: _Table | None = None
        short = vocabulary and UNKNOWN not in vocabulary and max(map(len, vocabulary)) == 1
        if short and inner.to_str() == _character_table(vocabulary).to_str():
            in_order = sorted(vocabulary)
            points, ids = [ord(c) for c in in_order], [vocabulary[c] for c in in_order]
            self._characters = _Table(np.array(points), np.array(ids))

    def _end_word(self) -> str:
        """What the settings call the end of a text."""
        try:
            word = parse_json(self.beside.get("tokenizer_config.json", "{}"), "").get("eos_token") or END
        except (HandgradError, AttributeError):
            return END
        return str(word.get("content", END) if isinstance(word, dict) else word)

    @property
    def id_type(self) -> "np.dtype[np.unsignedinteger]":
        """The narrowest type that every id fits into."""
        return np.dtype("<u2" if self.n_vocab <= 1 << 16 else "<u4")

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.encode_batch([text])[0]]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """On all cores. A very long text is encoded in pieces, cut where no token is cut if there is such a place."""
        for text in texts:
            check_unicode(text, "the text")
        if self._bytes:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        if self._characters is not None:
            return [self._look_up(text, self._characters) for text in texts]
        pieces = [list(pieces_of(text)) for text in texts]
        with _library("the tokenizer cannot encode this text"):
            encoded = iter(self.inner.encode_batch([p for few in pieces for p in few], add_special_tokens=False))
        ids = [[np.array(e.ids, np.int64) for e in islice(encoded, len(few))] for few in pieces]
        return [few[0] if len(few) == 1 else np.concatenate(few) for few in ids]

    def _look_up(self, text: str, known: _Table) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        at = np.minimum(np.searchsorted(known.points, points), len(known.points) - 1)
        strange = known.points[at] != points
        if strange.any():
            raise HandgradError(
                f"the tokenizer knows {len(known.points)} characters, and {chr(points[strange][0])!r} is not one of them:"
                " use other text, or train with --tokenizer bytes"
            )
        return known.ids[at]

    def decode(self, ids: list[int]) -> str:
        with _library("the tokenizer cannot decode these ids"):
            return str(self.inner.decode(ids, skip_special_tokens=False))

    @property
    def fingerprint(self) -> str:
        """The same for the same ids: of its whole content."""
        other_end = "" if self.end == self.inner.token_to_id(END) else f" {self.end}"
        return hashlib.sha256(f"{self.to_json()}{other_end}".encode()).hexdigest()

    def to_json(self) -> str:
        return str(self.inner.to_str())

    def write(self, folder: Path) -> None:
        """tokenizer.json, and what came with it, or what `transformers` wants beside it."""
        (folder / "tokenizer.json").write_text(self.to_json(), encoding="utf-8")
        for name, text in self.beside.items():
            (folder / name).write_text(text, encoding="utf-8")
        if "tokenizer_config.json" in self.beside:
            return
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if self.end is not None:
            settings |= {"eos_token": END, "bos_token": END}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


@contextmanager
def _library(what: str) -> Iterator[None]:
    """The library raises plain Exception, and PanicException, which is none, where its Rust code panics."""
    try:
        yield
    except HandgradError:
        raise
    except BaseException as reason:
        if not isinstance(reason, Exception) and type(reason).__name__ != "PanicException":
            raise
        raise HandgradError(f"{what}: {printable((str(reason).splitlines() or ['it fails'])[0])}") from None


def cut_place(text: str, since: int = 0) -> int:
    """Where a text that goes on can be cut: after the last line break that something other than a blank follows; if there
    is none and the text is LONGEST, before the last single blank; else at its end. 0: read on. The first `since`
    characters are known to hold no such line break."""
    cut = 0
    for found in _LINE.finditer(text, max(0, since - 1)):
        cut = found.end()
    if cut or len(text) < LONGEST:
        return cut
    for found in _BLANK.finditer(text, len(text) // 2):
        cut = found.start()
    return cut or len(text)


def pieces_of(text: str) -> Iterator[str]:
    """The text, in pieces of at most LONGEST characters, if it is longer than twice that."""
    at = 0
    while len(text) - at > 2 * LONGEST:
        piece = text[at : at + LONGEST]
        piece = piece[: cut_place(piece)]
        yield piece
        at += len(piece)
    yield text[at:]


def make(kind: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer named `kind`; `texts` are read only by those that are made from the data."""
    if kind == "bytes":
        return _bytes()
    if kind == "chars":
        return _chars(texts)
    if kind == "gpt2":
        return gpt2()
    if kind.startswith("bpe:"):
        return _bpe(kind, texts)
    path = Path(kind)
    if path.exists():
        return read(path)
    raise HandgradError(f"no tokenizer is called {kind!r}: give {KINDS}")


def read(path: Path) -> Tokenizer:
    """From tokenizer.json, or from a folder with it, or with GPT-2's vocab.json and merges.txt."""
    beside: dict[str, str] = {}
    if path.is_dir():
        beside = {n: read_text(path / n) for n in BESIDE if (path / n).exists()}
        if (path / "tokenizer.json").exists():
            path = path / "tokenizer.json"
        elif (path / "vocab.json").exists() and (path / "merges.txt").exists():
            return _from_merges(path / "vocab.json", path / "merges.txt", beside)
        else:
            raise HandgradError(f"{path} holds no tokenizer: neither tokenizer.json nor vocab.json and merges.txt")
    text = read_text(path, FILE_BYTES)
    check(parse_json(text, path), path)
    with _library(f"{path} is not a tokenizer.json"):
        return Tokenizer(tokenizers.Tokenizer.from_str(text), beside)


def from_json(text: str) -> Tokenizer:
    """The reverse of `to_json`."""
    return Tokenizer(tokenizers.Tokenizer.from_str(text))


def gpt2() -> Tokenizer:
    vocab, merges = get("gpt2-tokenizer")
    return _from_merges(vocab, merges)


def _from_merges(vocab: Path, merges: Path, beside: dict[str, str] | None = None) -> Tokenizer:
    lines = read_text(merges, FILE_BYTES).split("\n")
    pairs = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#version")]
    with _library(f"{vocab} and {merges} are not a vocabulary"):
        model = models.BPE(vocab=read_json(vocab, FILE_BYTES), merges=pairs)
    return Tokenizer(_with_added(_byte_level(model, special=False), beside or {}, vocab.parent), beside)


def _with_added(inner: tokenizers.Tokenizer, beside: dict[str, str], folder: Path) -> tokenizers.Tokenizer:
    """With the tokens that stand outside the vocabulary: added_tokens.json, and the settings' added_tokens_decoder. Their
    ids have to follow on the vocabulary's; GPT-2's own end of a text is inside it."""
    added: dict[int, AddedToken] = {}
    try:
        for word, i in parse_json(beside.get("added_tokens.json", "{}"), "added_tokens.json").items():
            added[int(i)] = AddedToken(word, special=True)
        settings = parse_json(beside.get("tokenizer_config.json", "{}"), "tokenizer_config.json")
        described = settings.get("added_tokens_decoder") or {}
        for i, what in described.items():
            flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
            added[int(i)] = AddedToken(what["content"], **{f: bool(what.get(f)) for f in flags})
    except (ValueError, TypeError, KeyError, AttributeError) as reason:
        raise HandgradError(f"{folder}: the added tokens cannot be read: {reason}") from None
    end = inner.token_to_id(END)
    if end is not None:
        added.setdefault(end, AddedToken(END, special=True))
    for i, token in sorted(added.items()):
        (inner.add_special_tokens if token.special else inner.add_tokens)([token])
        if inner.token_to_id(token.content) != i:
            raise HandgradError(
                f"{folder}: {token.content!r} should be id {i}, which does not follow on the vocabulary"
            )
    return inner


def _bytes() -> Tokenizer:
    return Tokenizer(_byte_table())


def _byte_table() -> tokenizers.Tokenizer:
    """A byte pair encoding without pairs: id i is byte i."""
    signs = _signs_of_bytes()
    return _byte_level(models.BPE(vocab={sign: i for i, sign in enumerate(signs)}, merges=[]), special=False)


def _chars(texts: Iterable[str]) -> Tokenizer:
    seen: set[str] = set()
    for text in texts:
        seen |= set(text)
    if not seen:
        raise HandgradError("there is no text to take characters from")
    if len(seen) > 65_535:
        raise HandgradError(f"the data has {len(seen):,} different characters: use --tokenizer bytes or bpe:N")
    check_unicode("".join(seen), "the text")
    return Tokenizer(_character_table({c: i for i, c in enumerate(sorted(seen))}))


def _character_table(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def _bpe(kind: str, texts: Iterable[str]) -> Tokenizer:
    size = kind.removeprefix("bpe:")
    if not (size.isascii() and size.isdigit()) or not 257 <= int(size[:20]) <= MOST_IDS:
        raise HandgradError(
            f"--tokenizer {printable(kind)}: give bpe:N with N of at least 257, 256 bytes and the end of a text, and at"
            f" most {MOST_IDS:,}"
        )
    inner = _byte_level(models.BPE(), special=False)
    trainer = trainers.BpeTrainer(
        vocab_size=int(size), special_tokens=[END], initial_alphabet=_signs_of_bytes(), show_progress=False
    )
    with _library("no pairs can be merged from this text"):
        inner.train_from_iterator(_countable(texts), trainer)
    return Tokenizer(inner)


def _countable(texts: Iterable[str]) -> Iterator[str]:
    """The texts without words that never end. Counting pairs takes memory and time for every character of every different
    word: of runs of letters, digits, other signs or blanks longer than LONG_WORD, LONG_TEXT characters are counted, cut
    into words of that length, and the rest is left out."""
    counted = 0
    for text in texts:
        check_unicode(text, "the text")
        for piece in pieces_of(text):
            at = 0
            for run in _LONG_RUN.finditer(piece):
                if run.start() > at:
                    yield piece[at : run.start()]
                room = min(run.end(), run.start() + LONG_TEXT - counted)
                yield from (piece[i : min(i + LONG_WORD, room)] for i in range(run.start(), room, LONG_WORD))
                counted += room - run.start()
                at = run.end()
            if at < len(piece):
                yield piece[at:]


def _byte_level(model: models.Model, special: bool = True) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    if special:
        inner.add_special_tokens([AddedToken(END, special=True)])
    return inner


def _signs_of_bytes() -> list[str]:
    """The printable sign that stands for each byte in such vocabularies: itself where it is printable, and the signs from
    256 on, in order, where it is not."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others: Iterator[int] = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]

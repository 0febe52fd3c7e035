"""Text ↔ ids. Every tokenizer is one of the `tokenizers` library, so that its file opens in every other tool.

bytes       256 ids, no training, any text
chars       one id for each character of the data
gpt2        GPT-2's own 50,257
bpe:N       N ids, merged from bytes by what is frequent in the data
a file      tokenizer.json, or a folder that holds one
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

from .errors import HandgradError
from .material import get

KINDS = "bytes, chars, gpt2, bpe:N or a tokenizer.json"
END = "<|endoftext|>"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


class Tokenizer:
    """n_vocab ids; `end` is the id between documents, if there is one. `beside` are the files that came with it: settings,
    special tokens, chat template."""

    def __init__(self, inner: tokenizers.Tokenizer, beside: dict[str, str] | None = None):
        inner.no_truncation()  # what a file remembers of somebody's batches is not part of the vocabulary
        inner.no_padding()
        self.inner = inner
        self.beside = beside or {}
        self.n_vocab: int = inner.get_vocab_size()
        self.end: int | None = inner.token_to_id(self._end_word())
        vocabulary = inner.get_vocab()
        # Two kinds are a table look-up, and are looked up in a table: id i is byte i, or the i-th of the known characters.
        self._bytes = vocabulary == {sign: i for i, sign in enumerate(_signs_of_bytes())}
        in_order = sorted(vocabulary, key=vocabulary.__getitem__)
        self._characters: np.ndarray | None = None
        if isinstance(inner.model, models.WordLevel) and in_order == sorted(in_order) and max(map(len, in_order)) == 1:
            self._characters = np.array([ord(c) for c in in_order])

    def _end_word(self) -> str:
        """What the settings call the end of a text."""
        try:
            word = json.loads(self.beside.get("tokenizer_config.json", "{}")).get("eos_token") or END
        except (ValueError, AttributeError):
            return END
        return str(word.get("content", END) if isinstance(word, dict) else word)

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.encode_batch([text])[0]]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """On all cores."""
        if self._bytes:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        if self._characters is not None:
            return [self._look_up(text, self._characters) for text in texts]
        return [np.array(e.ids, np.int64) for e in self.inner.encode_batch(texts, add_special_tokens=False)]

    def _look_up(self, text: str, known: np.ndarray) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = np.searchsorted(known, points)
        strange = known[np.minimum(ids, len(known) - 1)] != points
        if strange.any():
            raise HandgradError(
                f"the tokenizer knows {self.n_vocab} characters, and {chr(points[strange][0])!r} is not one of them: use"
                " other text, or train with --tokenizer bytes"
            )
        return ids

    def decode(self, ids: list[int]) -> str:
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
        try:
            beside = {n: (path / n).read_text(encoding="utf-8") for n in BESIDE if (path / n).exists()}
        except UnicodeDecodeError as reason:
            raise HandgradError(f"{path}: the tokenizer's files are not UTF-8 text: {reason}") from None
        if (path / "tokenizer.json").exists():
            path = path / "tokenizer.json"
        elif (path / "vocab.json").exists() and (path / "merges.txt").exists():
            return _from_merges(path / "vocab.json", path / "merges.txt", beside)
        else:
            raise HandgradError(f"{path} holds no tokenizer: neither tokenizer.json nor vocab.json and merges.txt")
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)), beside)
    except Exception as reason:  # the library raises plain Exception
        raise HandgradError(f"{path} is not a tokenizer.json: {str(reason).splitlines()[0]}") from None


def from_json(text: str) -> Tokenizer:
    """The reverse of `to_json`."""
    return Tokenizer(tokenizers.Tokenizer.from_str(text))


def gpt2() -> Tokenizer:
    vocab, merges = get("gpt2-tokenizer")
    return _from_merges(vocab, merges)


def _from_merges(vocab: Path, merges: Path, beside: dict[str, str] | None = None) -> Tokenizer:
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as reason:
        raise HandgradError(f"{vocab} and {merges} are not a vocabulary: {str(reason).splitlines()[0]}") from None
    return Tokenizer(_with_added(_byte_level(model, special=False), beside or {}, vocab.parent), beside)


def _with_added(inner: tokenizers.Tokenizer, beside: dict[str, str], folder: Path) -> tokenizers.Tokenizer:
    """With the tokens that stand outside the vocabulary: added_tokens.json, and the settings' added_tokens_decoder. Their
    ids have to follow on the vocabulary's; GPT-2's own end of a text is inside it."""
    added: dict[int, AddedToken] = {}
    try:
        for word, i in json.loads(beside.get("added_tokens.json", "{}")).items():
            added[int(i)] = AddedToken(word, special=True)
        described = json.loads(beside.get("tokenizer_config.json", "{}")).get("added_tokens_decoder") or {}
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
    """A byte pair encoding without pairs: id i is byte i."""
    signs = _signs_of_bytes()
    inner = _byte_level(models.BPE(vocab={sign: i for i, sign in enumerate(signs)}, merges=[]), special=False)
    return Tokenizer(inner)


def _chars(texts: Iterable[str]) -> Tokenizer:
    seen: set[str] = set()
    for text in texts:
        seen |= set(text)
    if not seen:
        raise HandgradError("there is no text to take characters from")
    if len(seen) > 65_535:
        raise HandgradError(f"the data has {len(seen):,} different characters: use --tokenizer bytes or bpe:N")
    inner = tokenizers.Tokenizer(models.WordLevel(vocab={c: i for i, c in enumerate(sorted(seen))}, unk_token="\0"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return Tokenizer(inner)


def _bpe(kind: str, texts: Iterable[str]) -> Tokenizer:
    size = kind.removeprefix("bpe:")
    if not size.isdigit() or int(size) < 257:
        raise HandgradError(f"--tokenizer {kind}: give bpe:N with N of at least 257, 256 bytes and the end of a text")
    inner = _byte_level(models.BPE(), special=False)
    trainer = trainers.BpeTrainer(
        vocab_size=int(size), special_tokens=[END], initial_alphabet=_signs_of_bytes(), show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)


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

"""Text → a file of token ids → batches, in an order that depends on nothing but the seed.

Texts are read, and tokens written, piece by piece: neither has to fit into memory. The file of tokens begins with a
header (how many, of which vocabulary, a checksum), is cached under a name made from the content it came from, and is
mapped into memory, not read. Where a batch lies in it is computed from its number alone, so that a resumed run sees what
an uninterrupted one would.
"""

import glob
import hashlib
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .errors import HandgradError
from .files import sync
from .material import cache_folder
from .tokenizer import Tokenizer

CHUNK = 1 << 18  # characters read at once
HEADER = 4096  # bytes
MAGIC = "handgrad tokens 1"
LEAVE_OUT = "leave it out by naming files or a pattern, as in --data 'folder/*.txt'"


class Text(NamedTuple):
    """A piece of a document."""

    text: str
    last: bool  # the document ends here


# ── reading texts ───────────────────────────────────────────────────────────────────────────────────────────────────


def find(sources: Iterable[str]) -> list[Path]:
    """Files, folders and patterns → the files, in a fixed order. What stands for nothing is an error."""
    files: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            inside = [f for f in sorted(path.rglob("*")) if f.is_file() and not _hidden(f, path)]
            if not inside:
                raise HandgradError(f"the folder {path} holds no files")
            files += inside
        elif path.exists():
            files.append(path)
        else:
            matching = [Path(f) for f in sorted(glob.glob(str(path), recursive=True)) if Path(f).is_file()]
            if not matching:
                raise HandgradError(f"no file, folder or pattern {source!r} exists")
            files += matching
    return list(dict.fromkeys(files))


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def from_stdin() -> Path:
    """What comes on standard input, put into the cache: it has to be read more than once."""
    folder = cache_folder() / "stdin"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
        while piece := sys.stdin.buffer.read(CHUNK):
            digest.update(piece)
            file.write(piece)
    if not Path(file.name).stat().st_size:
        Path(file.name).unlink()
        raise HandgradError("standard input was empty")
    target = folder / f"{digest.hexdigest()[:32]}.txt"
    os.replace(file.name, target)
    return target


def texts(files: Iterable[Path], field: str = "text") -> Iterator[Text]:
    """The documents, in pieces: a text file is one, each line of a .jsonl file is one."""
    for file in files:
        yield from _lines(file, field) if file.suffix == ".jsonl" else _pieces(file)


def _pieces(file: Path) -> Iterator[Text]:
    """About CHUNK characters each, cut where a line begins, so that no word and no run of blanks is cut."""
    rest = ""
    try:
        with open(file, encoding="utf-8", newline="") as opened:
            while new := opened.read(CHUNK):
                if "\0" in new:
                    raise HandgradError(f"{file} is not a text file, it holds zero bytes: {LEAVE_OUT}")
                rest += new
                cut = _line_begin(rest)
                if cut:
                    yield Text(rest[:cut], False)
                    rest = rest[cut:]
    except UnicodeDecodeError as reason:
        raise HandgradError(f"{file} is not UTF-8 text (byte {reason.start}): convert it, or {LEAVE_OUT}") from None
    yield Text(rest, True)


def _line_begin(text: str) -> int:
    """The last place after a line break where something other than a blank follows; 0 if there is none."""
    cut = text.rfind("\n", 0, len(text) - 1)
    while cut > 0 and text[cut + 1].isspace():
        cut = text.rfind("\n", 0, cut)
    return cut + 1


def _lines(file: Path, field: str) -> Iterator[Text]:
    with open(file, encoding="utf-8") as opened:
        number = 0
        try:
            for number, line in enumerate(opened, 1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict) or not isinstance(record.get(field), str):
                    has = f"it has {', '.join(record)}" if isinstance(record, dict) else "it is no object"
                    if isinstance(record, dict) and field in record:
                        has = f"there is {record[field]!r}"
                    raise HandgradError(f"{file}, line {number}: no text under {field!r}: {has} (--text-field)")
                yield Text(record[field], True)
        except json.JSONDecodeError as reason:
            raise HandgradError(f"{file}, line {number} is not JSON: {reason}") from None
        except UnicodeDecodeError:
            raise HandgradError(f"{file}, line {number + 1} is not UTF-8 text: convert it") from None


# ── the file of tokens ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Tokens:
    """Ids in a file, mapped into memory."""

    path: Path
    ids: "np.memmap[tuple[int], np.dtype[np.unsignedinteger]]"
    vocabulary: str  # fingerprint of the tokenizer

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> Tensor:
        return torch.from_numpy(self.ids[rows].astype(np.int64))


def prepare(
    files: list[Path],
    tokenizer: Tokenizer,
    field: str = "text",
    progress: Callable[[int], None] = lambda characters: None,
) -> Tokens:
    """The tokens of these files, from the cache if the same content has been there before."""
    key = hashlib.sha256(f"{MAGIC} {tokenizer.fingerprint} {field}".encode())
    for file in files:
        with open(file, "rb") as opened:
            key.update(f"{file.suffix == '.jsonl'} {hashlib.file_digest(opened, 'sha256').hexdigest()}".encode())
    path = cache_folder() / "tokens" / f"{key.hexdigest()[:32]}.tokens"
    if path.exists():
        try:
            return read(path)
        except HandgradError:
            path.unlink()  # a cache can be made again
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            _write(out, texts(files, field), tokenizer, progress)
        sync(Path(partial))
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return read(path)


def _write(out: BinaryIO, pieces: Iterator[Text], tokenizer: Tokenizer, progress: Callable[[int], None]) -> None:
    kind = np.dtype("<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4")
    count = checksum = 0
    out.write(b"\0" * HEADER)
    for group in _groups(pieces):
        encoded = tokenizer.encode_batch([piece.text for piece in group])
        for piece, ids in zip(group, encoded, strict=True):
            raw = ids.astype(kind).tobytes()
            if piece.last and tokenizer.end is not None:
                raw += np.array(tokenizer.end, kind).tobytes()
            checksum = zlib.crc32(raw, checksum)
            count += len(raw) // kind.itemsize
            out.write(raw)
        progress(sum(len(piece.text) for piece in group))
    header = {"magic": MAGIC, "dtype": kind.str, "count": count, "vocabulary": tokenizer.fingerprint, "crc32": checksum}
    out.seek(0)
    out.write(json.dumps(header).encode())


def _groups(pieces: Iterator[Text]) -> Iterator[list[Text]]:
    """Some pieces at a time, so that every core has one; not more than a few CHUNKs of text in memory."""
    group: list[Text] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= CHUNK * (os.cpu_count() or 1):
            yield group
            group, size = [], 0
    yield group


def read(path: Path) -> Tokens:
    """A file of tokens, checked against its header."""
    try:
        with open(path, "rb") as opened:
            header = json.loads(opened.read(HEADER).rstrip(b"\0"))
            kind = np.dtype(header["dtype"])
            whole = header["magic"] == MAGIC and path.stat().st_size == HEADER + header["count"] * kind.itemsize
            checksum = 0
            while whole and (piece := opened.read(1 << 22)):
                checksum = zlib.crc32(piece, checksum)
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole or checksum != header["crc32"]:
        raise HandgradError(f"{path} is damaged or no file of tokens: delete it, and it will be made again")
    if header["count"] == 0:
        return Tokens(path, np.zeros(0, kind), header["vocabulary"])  # type: ignore[arg-type]
    return Tokens(path, np.memmap(path, kind, "r", HEADER, (header["count"],)), header["vocabulary"])


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Batches(Protocol):
    """Things to learn from, in an order that is computed from their numbers. They are counted over all epochs."""

    @property
    def per_epoch(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """The same for the same content."""

    def batch(self, first: int, count: int, shuffle: bool = True) -> tuple[Tensor, Tensor, list[int] | None]:
        """Ids, targets, and lengths if the sequences are uneven and lie end to end."""

    def size(self, first: int, count: int, shuffle: bool = True) -> tuple[int, int]:
        """How many tokens and targets such a batch has."""

    def opening(self) -> Tensor:
        """The beginning of the first one, (1, t), for a model to write on from."""


@dataclass(frozen=True)
class Windows:
    """Stretches of `context` tokens, each with the tokens that follow as its targets. Every epoch cuts the text anew, from
    another beginning, and shuffles the stretches."""

    tokens: Tokens
    start: int
    stop: int
    context: int
    seed: int = 0

    @property
    def per_epoch(self) -> int:
        return (self.stop - self.start - 1) // self.context

    @property
    def fingerprint(self) -> str:
        return self.tokens.path.stem  # made from the texts' content and the vocabulary

    def size(self, first: int, count: int, shuffle: bool = True) -> tuple[int, int]:
        return count * self.context, count * self.context

    def opening(self) -> Tensor:
        return self.batch(0, 1, shuffle=False)[0][:, :8]

    def batch(self, first: int, count: int, shuffle: bool = True) -> tuple[Tensor, Tensor, None]:
        """Windows number `first` and following, counted over all epochs. (count, context) ids and targets"""
        rows = []
        for i in range(first, first + count):
            at = self._place(i) if shuffle else self.start + i * self.context
            rows.append(self.tokens[slice(at, at + self.context + 1)])
        both = torch.stack(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous(), None

    def _place(self, i: int) -> int:
        epoch, i = divmod(i, self.per_epoch)
        spare = (self.stop - self.start - 1) - self.per_epoch * self.context
        offset = noise(self.seed, epoch, 0) % (spare + 1)
        return self.start + offset + self.context * shuffled(i, self.per_epoch, self.seed, epoch)


def split(tokens: Tokens, context: int, share: float, seed: int) -> tuple[Windows, Windows | None]:
    """The last `share` of the text is kept for validation, if it is long enough for one window."""
    n = len(tokens)
    if n <= context:
        raise HandgradError(f"the data has {n:,} tokens, too few for a context of {context}: give more, or --n-context")
    held = round(n * share)
    if share and (held <= context or n - held <= context):
        raise HandgradError(
            f"{n:,} tokens are too few to keep {share:g} of them for validation with a context of {context}: give more"
            " data, or --val-share 0"
        )
    training = Windows(tokens, 0, n - held, context, seed)
    return training, Windows(tokens, n - held, n, context, seed) if held else None


def shuffled(i: int, n: int, seed: int, epoch: int) -> int:
    """The i-th of the numbers 0 … n−1 in an order drawn from seed and epoch, without writing the order down: a Feistel
    network permutes the next power of four, and what falls outside is permuted again."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for turn in range(4):
            left, right = right, left ^ (noise(seed, epoch, turn << 32 | right) & mask)
        i = left << half | right
        if i < n:
            return i


def noise(seed: int, epoch: int, x: int) -> int:
    """A number that looks random and is always the same."""
    text = f"{seed} {epoch} {x}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

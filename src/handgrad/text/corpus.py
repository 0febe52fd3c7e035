"""Text files → a cached file of token ids.

Texts are read and tokens written in pieces, so neither has to fit into memory. A token file starts with a header (number
of ids, tokenizer, checksums of the ids and of the header), is cached under a hash of the content it was made from, and is
memory-mapped.
"""

import contextlib
import glob
import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import HandgradError, option, shown
from ..files.atomic import new_file, rename_onto
from ..files.cache import cache_path
from ..files.reading import MB, check_regular, check_unicode, open_regular, parse_json
from .tokenizer import Tokenizer, cut_position

CHUNK = 1 << 18  # characters read at once
MAX_LINE = 64 * MB  # bytes of a line of .jsonl
MAX_STDIN = 20_000 * MB  # bytes of standard input, which may be endless; a file may have any size
TOO_LONG = f"is longer than {MAX_LINE // MB} MB, the maximum for a line: split it"
HEADER = 4096  # bytes; the last 32 are the SHA-256 of the others
DIGEST = hashlib.sha256().digest_size
MAGIC = "handgrad tokens 2"
EXCLUDE = f"exclude it by naming files or a pattern, as in {option('data', 'folder/*.txt')}"

T = TypeVar("T")


class TextPiece(NamedTuple):
    """A piece of a document."""

    text: str
    last: bool  # the document ends here


# ── reading texts ───────────────────────────────────────────────────────────────────────────────────────────────────


def find(sources: Iterable[str]) -> list[Path]:
    """List the files that the given files, folders and patterns name, in a fixed order. Raises if one matches no file."""
    files: list[Path] = []
    for source in sources:
        check_unicode(source, "the file name")
        if "\0" in source:
            raise HandgradError(f"no file, folder or pattern matches {source!r}")
        path = Path(source).expanduser()
        if path.is_dir():
            inside = [f for f in sorted(path.rglob("*")) if f.is_file() and not _is_hidden(f, path)]
            if not inside:
                raise HandgradError(f"the folder {path} contains no files")
            files += inside
        elif path.exists():
            check_regular(path)
            files.append(path)
        else:
            matching = [Path(f) for f in sorted(glob.glob(str(path), recursive=True)) if Path(f).is_file()]
            if not matching:
                raise HandgradError(f"no file, folder or pattern matches {source!r}")
            files += matching
    for file in files:
        check_unicode(str(file), f"the name of {file}")
    return list(dict.fromkeys(files))


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def from_stdin() -> Path:
    """Copy standard input to a file in the cache, because it is read more than once."""
    folder = cache_path("stdin")
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with new_file(folder) as file:
        while piece := sys.stdin.buffer.read(CHUNK):
            if b"\0" in piece:
                raise HandgradError("standard input is not text: it contains zero bytes")
            digest.update(piece)
            file.write(piece)
            if file.tell() > MAX_STDIN:
                raise HandgradError(
                    f"standard input has more than {MAX_STDIN // MB:,} MB: write it to a file, and name that with"
                    f" {option('data')}"
                )
        if not file.tell():
            raise HandgradError("standard input is empty")
        target = folder / f"{digest.hexdigest()[:32]}.txt"
        rename_onto(file, target)
    return target


def texts(files: Iterable[Path], field: str = "text") -> Iterator[TextPiece]:
    """Yield the documents in pieces. A text file is one document; in a .jsonl file each line is one."""
    for file in files:
        yield from _lines(file, field) if file.suffix == ".jsonl" else _pieces(file)


def _pieces(file: Path) -> Iterator[TextPiece]:
    """Yield a text file in pieces of about CHUNK characters, cut at `cut_position`: at the start of a line if possible, so
    that no word and no run of blanks is cut."""
    rest = ""
    try:
        with io.TextIOWrapper(open_regular(file), encoding="utf-8", newline="") as opened:
            while new := opened.read(CHUNK):
                if "\0" in new:
                    raise HandgradError(f"{file} is not a text file: it contains zero bytes; {EXCLUDE}")
                searched, rest = len(rest), rest + new
                cut = cut_position(rest, searched)
                if cut:
                    yield TextPiece(rest[:cut], False)
                    rest = rest[cut:]
    except UnicodeDecodeError as reason:
        raise HandgradError(f"{file} is not UTF-8 text (byte {reason.start}): convert it, or {EXCLUDE}") from None
    yield TextPiece(rest, True)


def _lines(file: Path, field: str) -> Iterator[TextPiece]:
    for number, raw in read_lines(file):
        where = f"{file}, line {number}"
        if raw is None:
            raise HandgradError(f"{where} {TOO_LONG}")
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            raise HandgradError(f"{where} is not UTF-8 text: convert it") from None
        if not line.strip():
            continue
        record = parse_json(line, where)
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            found = f"its fields are {', '.join(record)}" if isinstance(record, dict) else "it is not an object"
            if isinstance(record, dict) and field in record:
                found = f"the value is {shown(record[field])}"
            raise HandgradError(f"{where}: no text in the field {field!r} ({option('text_field')}): {found}")
        yield TextPiece(record[field], True)


def read_lines(file: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines of a file with their numbers, from 1; None for a line longer than MAX_LINE."""
    with open_regular(file) as opened:
        number = 0
        while raw := opened.readline(MAX_LINE):
            number += 1
            if len(raw) < MAX_LINE or raw.endswith(b"\n"):
                yield number, raw
                continue
            while raw and not raw.endswith(b"\n"):
                raw = opened.readline(MAX_LINE)
            yield number, None


# ── token files ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Tokens:
    """The ids of a token file, memory-mapped."""

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
    """Tokenize files, or return the cached result for the same content. `progress` gets the number of characters read."""
    key = hashlib.sha256(f"{MAGIC} {tokenizer.fingerprint} {field}".encode())
    for file in files:
        digest = hashlib.sha256()
        with open_regular(file) as opened:
            while piece := opened.read(1 << 20):
                digest.update(piece)
        key.update(f"{file.suffix == '.jsonl'} {digest.hexdigest()}".encode())
    path = cache_path("tokens", f"{key.hexdigest()[:32]}.tokens")
    if path.exists():
        with contextlib.suppress(HandgradError):
            tokens = read(path)
            if tokens.vocabulary == tokenizer.fingerprint:
                return tokens
        path.unlink()  # it is made again below
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path.parent) as out:
        _write(out, path.stem, texts(files, field), tokenizer, progress)
        rename_onto(out, path)
    return read(path)


def _write(
    out: BinaryIO, key: str, pieces: Iterator[TextPiece], tokenizer: Tokenizer, progress: Callable[[int], None]
) -> None:
    """Write a token file: space for the header, the ids, then the header."""
    dtype = tokenizer.id_type
    count = checksum = 0
    out.write(b"\0" * HEADER)
    for group in grouped(pieces, lambda piece: len(piece.text)):
        encoded = tokenizer.encode_batch([piece.text for piece in group])
        for piece, ids in zip(group, encoded, strict=True):
            raw = ids.astype(dtype).tobytes()
            if piece.last and tokenizer.end is not None:
                raw += np.array(tokenizer.end, dtype).tobytes()
            checksum = zlib.crc32(raw, checksum)
            count += len(raw) // dtype.itemsize
            out.write(raw)
        progress(sum(len(piece.text) for piece in group))
    header = {
        "magic": MAGIC, "key": key, "dtype": dtype.str, "count": count, "vocabulary": tokenizer.fingerprint,
        "crc32": checksum,
    }  # fmt: skip
    raw = json.dumps(header).encode().ljust(HEADER - DIGEST, b"\0")
    out.seek(0)
    out.write(raw + hashlib.sha256(raw).digest())


def grouped(items: Iterable[T], characters: Callable[[T], int]) -> Iterator[list[T]]:
    """Group items so that every core has text to encode, with at most a few CHUNKs of characters in memory. The last group
    may be empty."""
    limit = CHUNK * (os.cpu_count() or 1)
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += characters(item)
        if size >= limit:
            yield group
            group, size = [], 0
    yield group


def read(path: Path) -> Tokens:
    """Open a token file; raise unless its ids, header, digest and name agree."""
    with open_regular(path) as opened:
        raw = opened.read(HEADER)
        header = _header(raw) if len(raw) == HEADER else None
        valid = header is not None and header["key"] == path.stem
        checksum = size = 0
        while valid and (piece := opened.read(1 << 22)):
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    if header is None or not valid or (checksum, size) != (header["crc32"], header["count"] * header["dtype"].itemsize):
        raise HandgradError(f"{path} is damaged or not a token file: delete it, and it will be made again")
    dtype, count = header["dtype"], header["count"]
    if count == 0:
        return Tokens(path, np.zeros(0, dtype), header["vocabulary"])  # type: ignore[arg-type]
    return Tokens(path, np.memmap(path, dtype, "r", HEADER, (count,)), header["vocabulary"])


def _header(raw: bytes) -> dict[str, Any] | None:
    """Parse the header; None if it is damaged."""
    content, digest = raw[:-DIGEST], raw[-DIGEST:]
    if hashlib.sha256(content).digest() != digest:
        return None
    try:
        header: dict[str, Any] = parse_json(content.rstrip(b"\0").decode(), "the header")
        known = header["magic"] == MAGIC and header["dtype"] in ("<u2", "<u4")
        types = {"key": str, "vocabulary": str, "count": int, "crc32": int}
        if not known or header["count"] < 0 or not all(type(header[name]) is t for name, t in types.items()):
            return None
    except (ValueError, KeyError, TypeError):
        return None
    return header | {"dtype": np.dtype(header["dtype"])}

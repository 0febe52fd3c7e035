"""Text → a file of token ids → batches, in an order that depends on nothing but the seed.

Texts are read, and tokens written, piece by piece: neither has to fit into memory. The file of tokens begins with a
header (how many, of which vocabulary, checksums of the ids and of itself), is cached under a name made from the content
it came from, and is mapped into memory, not read. Where a batch lies in it is computed from its number alone, so that a
resumed run sees what an uninterrupted one would.
"""

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
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import HandgradError, shown
from ..files.atomic import new_file, rename_onto
from ..files.reading import MB, check_regular, check_unicode, open_regular, parse_json
from .downloads import cache_folder
from .tokenizer import Tokenizer, cut_place

CHUNK = 1 << 18  # characters read at once
LONGEST_LINE = 64 * MB  # bytes of a line of .jsonl
HEADER = 4096  # bytes; the last 32 are a digest of the others
DIGEST = hashlib.sha256().digest_size
MAGIC = "handgrad tokens 2"
LEAVE_OUT = "leave it out by naming files or a pattern, as in --data 'folder/*.txt'"


class Text(NamedTuple):
    """A piece of a document."""

    text: str
    last: bool  # the document ends here


# ── reading texts ───────────────────────────────────────────────────────────────────────────────────────────────────


def find(sources: Iterable[str]) -> list[Path]:
    """Files, folders and patterns → the files, in a fixed order. Raises if a source matches nothing."""
    files: list[Path] = []
    for source in sources:
        check_unicode(source, "the name of a file")
        if "\0" in source:
            raise HandgradError(f"no file, folder or pattern {source!r} exists")
        path = Path(source).expanduser()
        if path.is_dir():
            inside = [f for f in sorted(path.rglob("*")) if f.is_file() and not _hidden(f, path)]
            if not inside:
                raise HandgradError(f"the folder {path} holds no files")
            files += inside
        elif path.exists():
            check_regular(path)
            files.append(path)
        else:
            matching = [Path(f) for f in sorted(glob.glob(str(path), recursive=True)) if Path(f).is_file()]
            if not matching:
                raise HandgradError(f"no file, folder or pattern {source!r} exists")
            files += matching
    for file in files:
        check_unicode(str(file), f"the name of {file}")
    return list(dict.fromkeys(files))


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def from_stdin() -> Path:
    """What comes on standard input, put into the cache: it has to be read more than once."""
    folder = cache_folder() / "stdin"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with new_file(folder) as file:
        while piece := sys.stdin.buffer.read(CHUNK):
            if b"\0" in piece:
                raise HandgradError("standard input is not text, it holds zero bytes")
            digest.update(piece)
            file.write(piece)
        if not file.tell():
            raise HandgradError("standard input was empty")
        target = folder / f"{digest.hexdigest()[:32]}.txt"
        rename_onto(file, target)
    return target


def texts(files: Iterable[Path], field: str = "text") -> Iterator[Text]:
    """The documents, in pieces: a text file is one, each line of a .jsonl file is one."""
    for file in files:
        yield from _lines(file, field) if file.suffix == ".jsonl" else _pieces(file)


def _pieces(file: Path) -> Iterator[Text]:
    """About CHUNK characters each, cut where a line begins, so that no word and no run of blanks is cut, or, of a text
    without such places, at a bounded distance: see `cut_place`."""
    rest = ""
    try:
        with io.TextIOWrapper(open_regular(file), encoding="utf-8", newline="") as opened:
            while new := opened.read(CHUNK):
                if "\0" in new:
                    raise HandgradError(f"{file} is not a text file, it holds zero bytes: {LEAVE_OUT}")
                seen, rest = len(rest), rest + new
                cut = cut_place(rest, seen)
                if cut:
                    yield Text(rest[:cut], False)
                    rest = rest[cut:]
    except UnicodeDecodeError as reason:
        raise HandgradError(f"{file} is not UTF-8 text (byte {reason.start}): convert it, or {LEAVE_OUT}") from None
    yield Text(rest, True)


def _lines(file: Path, field: str) -> Iterator[Text]:
    for number, raw in lines_of(file):
        here = f"{file}, line {number}"
        if raw is None:
            raise HandgradError(f"{here} {TOO_LONG}")
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            raise HandgradError(f"{here} is not UTF-8 text: convert it") from None
        if not line.strip():
            continue
        record = parse_json(line, here)
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            has = f"it has {', '.join(record)}" if isinstance(record, dict) else "it is no object"
            if isinstance(record, dict) and field in record:
                has = f"there is {shown(record[field])}"
            raise HandgradError(f"{here}: no text under {field!r}: {has} (--text-field)")
        yield Text(record[field], True)


TOO_LONG = f"is longer than the {LONGEST_LINE // MB} MB that a line may have: divide it"


def lines_of(file: Path) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a file with their numbers, from 1; None in place of one that is longer than LONGEST_LINE."""
    with open_regular(file) as opened:
        number = 0
        while raw := opened.readline(LONGEST_LINE):
            number += 1
            if len(raw) < LONGEST_LINE or raw.endswith(b"\n"):
                yield number, raw
                continue
            while raw and not raw.endswith(b"\n"):
                raw = opened.readline(LONGEST_LINE)
            yield number, None


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
        digest = hashlib.sha256()
        with open_regular(file) as opened:
            while piece := opened.read(1 << 20):
                digest.update(piece)
        key.update(f"{file.suffix == '.jsonl'} {digest.hexdigest()}".encode())
    path = cache_folder() / "tokens" / f"{key.hexdigest()[:32]}.tokens"
    if path.exists():
        try:
            return _belonging(read(path), tokenizer)
        except HandgradError:
            path.unlink()  # a cache can be made again
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path.parent) as out:
        _write(out, path.stem, texts(files, field), tokenizer, progress)
        rename_onto(out, path)
    return read(path)


def _belonging(tokens: Tokens, tokenizer: Tokenizer) -> Tokens:
    """The tokens, if they are of this tokenizer."""
    if tokens.vocabulary != tokenizer.fingerprint:
        raise HandgradError(f"{tokens.path} was made with another tokenizer")
    return tokens


def _write(
    out: BinaryIO, key: str, pieces: Iterator[Text], tokenizer: Tokenizer, progress: Callable[[int], None]
) -> None:
    kind = tokenizer.id_type
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
    header = {
        "magic": MAGIC, "key": key, "dtype": kind.str, "count": count, "vocabulary": tokenizer.fingerprint,
        "crc32": checksum,
    }  # fmt: skip
    raw = json.dumps(header).encode().ljust(HEADER - DIGEST, b"\0")
    out.seek(0)
    out.write(raw + hashlib.sha256(raw).digest())


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
    """A file of tokens, compared with its header, the header with its digest, and both with the file's name."""
    with open_regular(path) as opened:
        raw = opened.read(HEADER)
        header = _header(raw) if len(raw) == HEADER else None
        whole = header is not None and header["key"] == path.stem
        checksum = size = 0
        while whole and (piece := opened.read(1 << 22)):
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    if header is None or not whole or (checksum, size) != (header["crc32"], header["count"] * header["dtype"].itemsize):
        raise HandgradError(f"{path} is damaged or no file of tokens: delete it, and it will be made again")
    kind, count = header["dtype"], header["count"]
    if count == 0:
        return Tokens(path, np.zeros(0, kind), header["vocabulary"])  # type: ignore[arg-type]
    return Tokens(path, np.memmap(path, kind, "r", HEADER, (count,)), header["vocabulary"])


def _header(raw: bytes) -> dict[str, Any] | None:
    """What the header says, if it is whole."""
    said, digest = raw[:-DIGEST], raw[-DIGEST:]
    if hashlib.sha256(said).digest() != digest:
        return None
    try:
        header: dict[str, Any] = parse_json(said.rstrip(b"\0").decode(), "the header")
        known = header["magic"] == MAGIC and header["dtype"] in ("<u2", "<u4")
        kinds = {"key": str, "vocabulary": str, "count": int, "crc32": int}
        if not known or header["count"] < 0 or not all(type(header[name]) is kind for name, kind in kinds.items()):
            return None
    except (ValueError, KeyError, TypeError):
        return None
    return header | {"dtype": np.dtype(header["dtype"])}


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────

"""Lines of JSON → examples to fine-tune on: ids, and for each id whether it is to be learned.

A line is one of

    {"prompt": "…", "completion": "…"}                       the completion is learned, and the end after it
    {"messages": [{"role": "user", "content": "…"}, …]}      what the assistant says is learned
    {"text": "…"}                                            everything is learned

and a .txt file is one text.
An example of L ids is read as ids[:-1], and its targets are ids[1:] where they are to be learned: the first id is never a
target. Lines are read one by one and encoded a few at a time. Which examples a batch holds is computed from its number
alone, as in `data`.
"""

import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from . import chat, data
from .chat import ChatTemplate
from .errors import HandgradError
from .tokenizer import Tokenizer

KINDS = ("messages", "prompt and completion", "text")
WANTED = "wanted is prompt and completion, or messages, or text"
LossOn = Literal["answers", "all"]
TooLong = Literal["cut", "drop"]
SUFFIXES = (".jsonl", ".json", ".txt")
MARK = b"\xef\xbb\xbf"  # some editors put it before UTF-8 text
BLANKS = re.compile(r"[ \t\r\n]*")


class Place(NamedTuple):
    """Where something was read; lines are counted from 1."""

    file: Path
    line: int

    def mistake(self, what: object) -> HandgradError:
        return HandgradError(f"{self.file}, line {self.line}: {what}")


class Draft(NamedTuple):
    """An example before its text is encoded. The piece None is the tokenizer's end of a text, if it has one."""

    place: Place
    kind: str
    pieces: list[tuple[str | None, bool]]  # True: to be learned


# ── reading lines ───────────────────────────────────────────────────────────────────────────────────────────────────


def find(sources: Iterable[str]) -> list[Path]:
    """Files, folders, patterns, and "-" for standard input → the files; of a folder, those that may hold examples."""
    files: list[Path] = []
    for source in sources:
        found = data.find([str(data.from_stdin()) if source == "-" else source])
        if Path(source).expanduser().is_dir():
            found = [file for file in found if file.suffix in SUFFIXES]
            if not found:
                raise HandgradError(f"the folder {source} holds no file called {', '.join(f'*{s}' for s in SUFFIXES)}")
        files += found
    return list(dict.fromkeys(files))


def records(files: Iterable[Path], progress: Callable[[int], None] = lambda count: None) -> Iterator[tuple[Place, Any]]:
    """What the lines hold, or the items of the list that a whole file is; a .txt file that does not begin
    like JSON is one text. `progress` is told how many bytes were read."""
    for file in files:
        with open(file, "rb") as opened:
            if opened.peek(1).removeprefix(MARK).lstrip().startswith(b"["):
                raw = opened.read()
                yield from _items(file, _decoded(raw, file, 1))
                progress(len(raw))
                continue
            if file.suffix == ".txt" and not opened.peek(1).removeprefix(MARK).lstrip().startswith(b"{"):
                raw = opened.read()
                yield Place(file, 1), {"text": _decoded(raw, file, 1)}
                progress(len(raw))
                continue
            for number, raw in enumerate(opened, 1):
                line = _decoded(raw, file, number)
                if line.strip():
                    try:
                        record = json.loads(line.rstrip())
                    except (ValueError, RecursionError) as reason:
                        raise _no_json(file, number, reason) from None
                    yield Place(file, number), record
                progress(len(raw))


def _items(file: Path, text: str) -> Iterator[tuple[Place, Any]]:
    """One after the other, so that the text of the list is in memory, and not all it stands for."""
    decoder = json.JSONDecoder()
    at, line, counted = text.index("[") + 1, 1, 0
    while True:
        at = _after_blanks(text, at)
        line, counted = line + text.count("\n", counted, at), at
        if text[at : at + 1] == "]":
            break
        try:
            item, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as reason:
            raise _no_json(file, getattr(reason, "lineno", line), reason) from None
        yield Place(file, line), item
        at = _after_blanks(text, at)
        if text[at : at + 1] == ",":
            at += 1
        elif text[at : at + 1] != "]":
            raise Place(file, line + text.count("\n", counted, at)).mistake("the list needs , or ] here")
    at = _after_blanks(text, at + 1)
    if at < len(text):
        raise Place(file, line + text.count("\n", counted, at)).mistake("something follows the list")


def _after_blanks(text: str, at: int) -> int:
    found = BLANKS.match(text, at)
    assert found is not None
    return found.end()


def _decoded(raw: bytes, file: Path, line: int) -> str:
    try:
        return (raw.removeprefix(MARK) if line == 1 else raw).decode()
    except UnicodeDecodeError as reason:
        line += reason.object.count(b"\n", 0, reason.start)
        raise HandgradError(f"{file}, line {line} is not UTF-8 text: convert it") from None


def _no_json(file: Path, line: int, reason: Exception) -> HandgradError:
    what = f"{reason.msg}, column {reason.colno}" if isinstance(reason, json.JSONDecodeError) else str(reason)
    hint = "" if file.suffix in (".jsonl", ".json") else "; leave out what is not, as in --data 'folder/*.jsonl'"
    return HandgradError(f"{file}, line {line} is not JSON: {what}{hint}")


# ── what a line means ───────────────────────────────────────────────────────────────────────────────────────────────


def draft(place: Place, record: Any, template: ChatTemplate | None, loss_on: LossOn) -> Draft:
    """The pieces of text of one line, and which are to be learned."""
    if not isinstance(record, dict):
        raise place.mistake(f"it holds {chat.shown(record)}, not an object; {WANTED}")
    has = {name for name, value in record.items() if value is not None}
    everything = loss_on == "all"
    if "messages" in has:
        if has & {"prompt", "completion"}:
            raise place.mistake("it has messages, and a prompt or completion as well: leave one of them out")
        return Draft(place, "messages", [*_conversation(place, record["messages"], template, everything)])
    if has >= {"prompt", "completion"}:
        prompt, completion = _string(place, record, "prompt"), _string(place, record, "completion")
        if not completion:
            raise place.mistake("the completion is empty: there is nothing to learn")
        # Without a prompt it begins as a text does, so that its first token can be a target.
        begin: tuple[str | None, bool] = (prompt, everything) if prompt else (None, False)
        return Draft(place, "prompt and completion", [begin, (completion, True), (None, True)])
    if "text" in has:
        text = _string(place, record, "text")
        return Draft(place, "text", [(None, False), (text, True), (None, True)] if text else [])
    found = ", ".join(name if name in has else f"{name} (null)" for name in record) or "nothing"
    raise place.mistake(f"it has {found}; {WANTED}")


def _conversation(
    place: Place, messages: Any, template: ChatTemplate | None, everything: bool
) -> Iterator[tuple[str | None, bool]]:
    if template is None:
        raise place.mistake(f"it has messages, and there is no chat template to write them with: {chat.REMEDY}")
    try:
        segments = template.segments(messages)
    except HandgradError as reason:
        raise place.mistake(reason) from None
    if not everything and not any(learn for _, learn in segments):
        raise place.mistake("the assistant says nothing in these messages: there is nothing to learn")
    for text, learn in segments:
        _check_unicode(place, text)
        yield text, learn or everything


def _string(place: Place, record: dict[str, Any], name: str) -> str:
    text = record[name]
    if not isinstance(text, str):
        raise place.mistake(f"{name} is {chat.shown(text)}, not a string")
    _check_unicode(place, text)
    return text


def _check_unicode(place: Place, text: str) -> None:
    """JSON can spell halves of characters, \\ud83d alone, which no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError as reason:
        half = f"\\u{ord(text[reason.start]):04x}"
        raise place.mistake(f"it holds {half}, half of a character: write the whole, or leave it out") from None


# ── examples ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Examples:
    """All examples in a row. Number i is ids[offsets[i] : offsets[i + 1]]."""

    ids: np.ndarray  # uint16 or uint32
    learn: np.ndarray  # bool, for each id; never the first of an example
    offsets: np.ndarray  # int64, one more than there are examples
    lines: np.ndarray  # int64, for each example the number of the line it came from
    seed: int = 0

    @property
    def per_epoch(self) -> int:
        return len(self.offsets) - 1

    def example(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Example number i, in the order of the files: ids, and whether each is to be learned."""
        rows = slice(self.offsets[i], self.offsets[i + 1])
        return self.ids[rows], self.learn[rows]

    def batch(self, first: int, count: int, shuffle: bool = True) -> tuple[Tensor, Tensor, list[int]]:
        """Examples number `first` and following, counted over all epochs, one behind the other without padding.
        (n) ids, (n) targets, −100 where nothing is learned, and the length of each example"""
        parts = [self.example(self._place(i, shuffle)) for i in range(first, first + count)]
        ids = np.concatenate([ids[:-1] for ids, _ in parts]).astype(np.int64)
        targets = np.concatenate([np.where(learn[1:], ids[1:].astype(np.int64), -100) for ids, learn in parts])
        return torch.from_numpy(ids), torch.from_numpy(targets), [len(ids) - 1 for ids, _ in parts]

    def size(self, first: int, count: int, shuffle: bool = True) -> tuple[int, int]:
        """How many tokens and how many targets that batch has."""
        parts = [self.example(self._place(i, shuffle)) for i in range(first, first + count)]
        return sum(len(ids) - 1 for ids, _ in parts), sum(int(np.count_nonzero(learn)) for _, learn in parts)

    def opening(self) -> Tensor:
        """The first example up to where something is to be learned, for a model to write on from. (1, t)"""
        ids, learn = self.example(0)
        return torch.from_numpy(ids[: int(np.argmax(learn))].astype(np.int64))[None]

    def _place(self, i: int, shuffle: bool) -> int:
        epoch, i = divmod(i, self.per_epoch)
        return data.shuffled(i, self.per_epoch, self.seed, epoch) if shuffle else i

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same examples in the same order."""
        digest = hashlib.sha256()
        for part in (self.ids.astype("<u4", copy=False), self.learn, self.offsets.astype("<i8", copy=False)):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()[:32]


def split(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples | None]:
    """About `share` of the examples are kept for validation; at least one, if any. Whole lines are drawn by the seed, so
    that no text lies on both sides; of too few lines for that, the end of the data is kept."""
    if not 0 <= share < 1:
        raise HandgradError(f"a share of {share:g} cannot be kept for validation: give --val-share from 0 to below 1")
    n = examples.per_epoch
    if not share:
        return examples, None
    if n < 2:
        raise HandgradError(f"{n} example cannot be divided for training and validation: give more, or --val-share 0")
    kept, numbers = np.unique(examples.lines, return_inverse=True)
    lines = len(kept)
    if lines * share < 1 and n > lines:
        chosen = np.arange(n) >= n - max(1, round(n * share))
    else:
        held = min(max(1, round(lines * share)), lines - 1)
        drawn = np.zeros(lines, bool)
        drawn[[data.shuffled(i, lines, seed, -1) for i in range(held)]] = True  # epoch −1: no epoch's own order
        chosen = drawn[numbers]
    return _some(examples, ~chosen), _some(examples, chosen)


def _some(examples: Examples, chosen: np.ndarray) -> Examples:
    lengths = np.diff(examples.offsets)
    tokens = np.repeat(chosen, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths[chosen])]).astype(np.int64)
    return Examples(examples.ids[tokens], examples.learn[tokens], offsets, examples.lines[chosen], examples.seed)


# ── lines → examples ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Dropped:
    count: int
    first: Place


@dataclass
class Summary:
    """What became of the lines. The length of an example is the number of tokens the model reads, one less than its ids."""

    n_context: int
    kinds: dict[str, int]  # lines of each kind
    examples: int = 0
    tokens: int = 0
    targets: int = 0
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # [n] examples have length n
    cut: int = 0  # lost their end
    cut_tokens: int = 0  # lost so
    split: int = 0  # texts that became several examples
    dropped: dict[str, Dropped] = field(default_factory=dict)  # by reason


def read(
    files: Iterable[Path],
    tokenizer: Tokenizer,
    n_context: int,
    *,
    template: ChatTemplate | None = None,
    loss_on: LossOn = "answers",
    too_long: TooLong = "cut",
    seed: int = 0,
    progress: Callable[[int], None] = lambda count: None,
) -> tuple[Examples, Summary]:
    """The examples in these files, none longer than the context, and what became of every line.

    Of what is too long, a text is divided and loses nothing, other examples lose their end; or with too_long="drop" all of
    it is left out. loss_on="all" learns prompts and every role's words as well. `progress` counts bytes.
    """
    for name, value, choices in (("loss_on", loss_on, LossOn), ("too_long", too_long, TooLong)):
        if value not in get_args(choices):
            raise HandgradError(f"{name} is {value!r}: it can be {' or '.join(get_args(choices))}")
    all_ids = array("H" if tokenizer.n_vocab <= 1 << 16 else "I")
    all_learn = bytearray()
    offsets, lines = array("q", [0]), array("q")
    summary = Summary(n_context, dict.fromkeys(KINDS, 0))
    drafts = (draft(place, record, template, loss_on) for place, record in records(files, progress))
    for drafted, ids, learn in _encoded(drafts, tokenizer):
        summary.kinds[drafted.kind] += 1
        for stretch in _fitting(drafted, ids, learn, summary, too_long):
            all_ids.frombytes(ids[stretch].astype(all_ids.typecode).tobytes())
            all_learn += b"\0" + learn[stretch][1:].tobytes()
            offsets.append(len(all_ids))
            lines.append(sum(summary.kinds.values()))
    if len(offsets) == 1:
        reasons = [
            f"{d.count:,} {reason}, the first {d.first.file}:{d.first.line}" for reason, d in summary.dropped.items()
        ]
        raise HandgradError(f"there is no example to learn from ({'; '.join(reasons) or 'the files are empty'})")
    examples = Examples(
        np.frombuffer(all_ids, all_ids.typecode),
        np.frombuffer(all_learn, bool),
        np.frombuffer(offsets, np.int64),
        np.frombuffer(lines, np.int64),
        seed,
    )
    lengths = np.diff(examples.offsets) - 1
    summary.examples, summary.tokens = examples.per_epoch, int(lengths.sum())
    summary.targets, summary.lengths = int(np.count_nonzero(examples.learn)), np.bincount(lengths)
    return examples, summary


def _encoded(drafts: Iterator[Draft], tokenizer: Tokenizer) -> Iterator[tuple[Draft, np.ndarray, np.ndarray]]:
    """Each draft with its ids and whether each is to be learned. Pieces are encoded alone: no token spans two."""
    for group in _groups(drafts):
        texts = [text for drafted in group for text, _ in drafted.pieces if text]
        try:
            encoded = iter(tokenizer.encode_batch(texts))
        except HandgradError:
            for drafted in group:  # which it was
                try:
                    tokenizer.encode_batch([text for text, _ in drafted.pieces if text])
                except HandgradError as reason:
                    raise drafted.place.mistake(reason) from None
            raise
        none = np.zeros(0, np.int64)
        end = none if tokenizer.end is None else np.array([tokenizer.end])
        for drafted in group:
            parts = [next(encoded) if text else end if text is None else none for text, _ in drafted.pieces]
            learn = [np.full(len(ids), learn) for ids, (_, learn) in zip(parts, drafted.pieces, strict=True)]
            yield drafted, np.concatenate([none, *parts]), np.concatenate([none.astype(bool), *learn])


def _groups(drafts: Iterator[Draft]) -> Iterator[list[Draft]]:
    """Some at a time, so that every core has its share, and not more than a few pieces of text are in memory."""
    room = data.CHUNK * (os.cpu_count() or 1)
    group: list[Draft] = []
    size = 0
    for drafted in drafts:
        group.append(drafted)
        size += sum(len(text or "") for text, _ in drafted.pieces)
        if size >= room:
            yield group
            group, size = [], 0
    yield group


def _fitting(
    drafted: Draft, ids: np.ndarray, learn: np.ndarray, summary: Summary, too_long: TooLong
) -> Iterator[slice]:
    """The stretches of an example that fit into the context and hold something to learn; what does not is counted."""
    context, length = summary.n_context, len(ids) - 1
    if length > context and too_long == "drop":
        _drop(summary, f"longer than the context of {context:,} tokens", drafted.place)
        return
    cut = length > context and drafted.kind != "text"
    # The last id of a stretch is the first of the next: there it is read, here it is a target.
    starts = range(1) if cut else range(0, max(length, 1), context)
    stretches = [slice(at, at + context + 1) for at in starts]
    stretches = [stretch for stretch in stretches if learn[stretch][1:].any()]
    if not stretches:
        _drop(summary, "with nothing to learn inside the context" if cut else "with nothing to learn", drafted.place)
    elif cut:
        summary.cut += 1
        summary.cut_tokens += length - context
    elif len(stretches) > 1:
        summary.split += 1
    yield from stretches


def _drop(summary: Summary, reason: str, place: Place) -> None:
    summary.dropped.setdefault(reason, Dropped(0, place)).count += 1

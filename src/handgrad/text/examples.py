"""Records → examples to fine-tune on: ids, and for each id whether it is to be learned.

A record is one of

    {"prompt": "…", "completion": "…"}                       the completion is learned, and the end after it
    {"messages": [{"role": "user", "content": "…"}, …]}      what the assistant says is learned
    {"text": "…"}                                            everything is learned

or what `records` turns into these.
An example of L ids is read as ids[:-1], and its targets are ids[1:] where they are to be learned: the first id is never a
target. Lines are read one by one and encoded a few at a time. Which examples a batch holds is computed from its number
alone, as in `data`.
"""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from ..errors import HandgradError, LimitError, printable, shown
from ..files.reading import check_unicode
from ..formatting import plural
from . import batches, chat, corpus
from .chat import ChatTemplate
from .records import Place, Read, field_names, find, ours, records, renamed
from .tokenizer import Tokenizer

__all__ = ["Draft", "Examples", "Place", "Summary", "draft", "find", "read", "records", "shared", "split"]

KINDS = ("messages", "prompt and completion", "text")
WANTED = "wanted is prompt and completion, or messages, or text"
LossOn = Literal["answers", "all"]
TooLong = Literal["cut", "drop"]
LISTED = 10  # bad lines that are named


class Draft(NamedTuple):
    """An example before its text is encoded. The piece None is the tokenizer's end of a text, if it has one."""

    place: Place
    kind: str
    pieces: list[tuple[str | None, bool]]  # True: to be learned


# ── what a line means ───────────────────────────────────────────────────────────────────────────────────────────────


def draft(place: Place, record: Any, template: ChatTemplate | None, loss_on: LossOn) -> Draft:
    """The pieces of text of one line, and which are to be learned."""
    if not isinstance(record, dict):
        raise place.mistake(f"it holds {shown(record)}, not an object; {WANTED}")
    record = ours(place, record, chat=template is not None)
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
    except LimitError:
        raise  # every line would take as long
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
        raise place.mistake(f"{name} is {shown(text)}, not a string")
    _check_unicode(place, text)
    return text


def _check_unicode(place: Place, text: str) -> None:
    try:
        check_unicode(text, "it")
    except HandgradError as reason:
        raise place.mistake(reason) from None


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

    def amount(self, count: int) -> str:
        return plural(count, "example")

    def _place(self, i: int, shuffle: bool) -> int:
        epoch, i = divmod(i, self.per_epoch)
        return batches.shuffled(i, self.per_epoch, self.seed, epoch) if shuffle else i

    @cached_property
    def marks(self) -> np.ndarray:
        """For each example a number that equal examples share, counted from 0 in the order they first appear."""
        numbers: dict[bytes, int] = {}
        marks = np.zeros(self.per_epoch, np.int64)
        for i, digest in enumerate(self.digests()):
            marks[i] = numbers.setdefault(digest, len(numbers))
        return marks

    def digests(self) -> Iterator[bytes]:
        for i in range(self.per_epoch):
            ids, learn = self.example(i)
            yield hashlib.blake2b(ids.astype("<u4").tobytes() + learn.tobytes(), digest_size=16).digest()

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same examples in the same order."""
        digest = hashlib.sha256()
        for part in (self.ids.astype("<u4", copy=False), self.learn, self.offsets.astype("<i8", copy=False)):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()[:32]


def split(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples | None]:
    """About `share` of the lines are kept for validation; at least one, if any. Lines that have an example in common stay
    together, and such groups are drawn by the seed, so that nothing lies on both sides; of too few lines for that, the end
    of the data is kept. None is kept of lines that all have examples in common."""
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
        group = _together(numbers, examples.marks, lines)
        sizes = np.bincount(group)
        if len(sizes) == 1:
            return examples, None
        chosen = _drawn(sizes, min(max(1, round(lines * share)), lines - 1), seed)[group][numbers]
    return _some(examples, ~chosen), _some(examples, chosen)


def _together(numbers: np.ndarray, marks: np.ndarray, lines: int) -> np.ndarray:
    """For each line its group, counted from 0 in the order of the lines: lines with an equal example are in one."""
    leader = list(range(lines))

    def of(line: int) -> int:
        while leader[line] != line:
            leader[line] = line = leader[leader[line]]
        return line

    first: dict[int, int] = {}
    for line, mark in zip(numbers.tolist(), marks.tolist(), strict=True):
        a, b = of(first.setdefault(mark, line)), of(line)
        leader[max(a, b)] = min(a, b)
    return np.unique([of(line) for line in range(lines)], return_inverse=True)[1]


def _drawn(sizes: np.ndarray, held: int, seed: int) -> np.ndarray:
    """Which groups are held: in an order drawn by the seed, all that still fit into `held` lines; else a smallest one."""
    n = len(sizes)
    order = [batches.shuffled(i, n, seed, -1) for i in range(n)]  # epoch −1: no epoch's own order
    drawn = np.zeros(n, bool)
    for group in order:
        if sizes[group] <= held:
            drawn[group], held = True, held - sizes[group]
        if not held:
            break
    if not drawn.any():
        drawn[min(order, key=sizes.__getitem__)] = True
    return drawn


def shared(training: Examples, validation: Examples) -> int:
    """How many examples of the validation are in the training as well."""
    known = set(training.digests())
    return sum(digest in known for digest in validation.digests())


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
    distinct: int = 0  # examples that differ from all before
    shared: int = 0  # examples of --val-data that are among these
    bad: int = 0  # lines that could not be used
    mistakes: list[str] = field(default_factory=list)  # of the first of them


def read(
    files: Iterable[Path],
    tokenizer: Tokenizer,
    n_context: int,
    *,
    template: ChatTemplate | None = None,
    loss_on: LossOn = "answers",
    too_long: TooLong = "cut",
    fields: Iterable[str] = (),
    skip_bad: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] = lambda count: None,
) -> tuple[Examples, Summary]:
    """The examples in these files, none longer than the context, and what became of every line.

    Of what is too long, a text is divided and loses nothing, other examples lose their end; or with too_long="drop" all of
    it is left out. loss_on="all" learns prompts and every role's words as well. `fields` are other names of the data's, as
    "prompt=question". Lines that cannot be used are an error that lists them, or with skip_bad are left out and counted.
    `progress` counts bytes.
    """
    for name, value, choices in (("loss_on", loss_on, LossOn), ("too_long", too_long, TooLong)):
        if value not in get_args(choices):
            raise HandgradError(f"{name} is {value!r}: it can be {' or '.join(get_args(choices))}")
    names = field_names(fields)
    all_ids = array("H" if tokenizer.id_type.itemsize == 2 else "I")
    all_learn = bytearray()
    offsets, lines = array("q", [0]), array("q")
    summary = Summary(n_context, dict.fromkeys(KINDS, 0))

    def note(mistake: HandgradError) -> None:
        summary.bad += 1
        if len(summary.mistakes) < LISTED:
            summary.mistakes.append(printable(str(mistake)))

    drafts = _drafts(records(files, progress), names, template, loss_on, note)
    for drafted, ids, learn in _encoded(drafts, tokenizer, note):
        summary.kinds[drafted.kind] += 1
        for stretch in _fitting(drafted, ids, learn, summary, too_long):
            all_ids.frombytes(ids[stretch].astype(all_ids.typecode).tobytes())
            all_learn += b"\0" + learn[stretch][1:].tobytes()
            offsets.append(len(all_ids))
            lines.append(sum(summary.kinds.values()))
    if summary.bad and not skip_bad:
        raise BadLinesError(summary)
    if len(offsets) == 1:
        reasons = [f"{summary.bad:,} that cannot be used"] if summary.bad else []
        reasons += [
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
    summary.distinct = 1 + int(examples.marks.max())
    summary.targets, summary.lengths = int(np.count_nonzero(examples.learn)), np.bincount(lengths)
    return examples, summary


class BadLinesError(HandgradError):
    """The first lines that cannot be used, each with its reason, and how many there are."""

    def __init__(self, summary: Summary):
        lines = summary.mistakes
        if summary.bad > 1:
            more = [f"and {summary.bad - len(lines):,} more"] if summary.bad > len(lines) else []
            title = f"{summary.bad:,} lines cannot be used (--skip-bad goes on without them):"
            lines = ["\n  ".join([title, *lines, *more])]
        ValueError.__init__(self, lines[0])  # as long as its lines, each of which is cut


def _drafts(
    found: Iterator[Read],
    names: dict[str, str],
    template: ChatTemplate | None,
    loss_on: LossOn,
    note: Callable[[HandgradError], None],
) -> Iterator[Draft]:
    for place, record in found:
        try:
            if isinstance(record, HandgradError):
                raise record
            yield draft(place, renamed(place, record, names), template, loss_on)
        except LimitError:
            raise
        except HandgradError as mistake:
            note(mistake)


def _encoded(
    drafts: Iterator[Draft], tokenizer: Tokenizer, note: Callable[[HandgradError], None]
) -> Iterator[tuple[Draft, np.ndarray, np.ndarray]]:
    """Each draft with its ids and whether each is to be learned. Pieces are encoded alone: no token spans two."""
    none = np.zeros(0, np.int64)
    end = none if tokenizer.end is None else np.array([tokenizer.end])
    for group in _groups(drafts):
        try:
            encoded = iter(tokenizer.encode_batch([text for drafted in group for text in _texts(drafted)]))
        except HandgradError:  # which it was
            group = [drafted for drafted in group if _can_be_encoded(drafted, tokenizer, note)]
            encoded = iter(tokenizer.encode_batch([text for drafted in group for text in _texts(drafted)]))
        for drafted in group:
            parts = [next(encoded) if text else end if text is None else none for text, _ in drafted.pieces]
            learn = [np.full(len(ids), learn) for ids, (_, learn) in zip(parts, drafted.pieces, strict=True)]
            yield drafted, np.concatenate([none, *parts]), np.concatenate([none.astype(bool), *learn])


def _texts(drafted: Draft) -> list[str]:
    return [text for text, _ in drafted.pieces if text]


def _can_be_encoded(drafted: Draft, tokenizer: Tokenizer, note: Callable[[HandgradError], None]) -> bool:
    try:
        tokenizer.encode_batch(_texts(drafted))
    except HandgradError as reason:
        note(drafted.place.mistake(reason))
        return False
    return True


def _groups(drafts: Iterator[Draft]) -> Iterator[list[Draft]]:
    """Some at a time, so that every core has its share, and not more than a few pieces of text are in memory."""
    room = corpus.CHUNK * (os.cpu_count() or 1)
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

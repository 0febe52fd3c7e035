"""Fine-tuning examples: token ids, and for each id whether it is a training target.

An example of L ids is read as ids[:-1]; its targets are ids[1:] where they are to be learned, so the first id is never a
target. Files are read one record at a time and tokenized in small groups. Which examples a batch contains is computed from
its number alone, as in `batches`.
"""

import hashlib
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..errors import HandgradError, LimitError, option, printable
from ..formatting import plural
from . import corpus
from .batches import shuffled_index
from .chat_template import ChatTemplate
from .drafts import KINDS, Draft, LossOn, draft
from .records import Entry, Location, field_names, find, records, rename_fields
from .tokenizer import Tokenizer

__all__ = ["Examples", "Summary", "find", "read"]

TooLong = Literal["cut", "drop"]
MAX_LISTED = 10  # reasons that an error lists
MAX_LINE = 300  # characters of one of them


@dataclass(frozen=True, eq=False)
class Examples:
    """All examples end to end. Example i is ids[offsets[i] : offsets[i + 1]]."""

    ids: np.ndarray  # uint16 or uint32
    is_target: np.ndarray  # bool, for each id: whether it is a target; False for the first id of an example
    offsets: np.ndarray  # int64, number of examples + 1
    record_numbers: np.ndarray  # int64, for each example the number of the record it came from, in all files from 1
    seed: int = 0

    @property
    def per_epoch(self) -> int:
        return len(self.offsets) - 1

    def example(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Example i in the order of the files: its ids, and whether each is a target."""
        rows = slice(self.offsets[i], self.offsets[i + 1])
        return self.ids[rows], self.is_target[rows]

    def part(self, chosen: Iterable[int]) -> "Examples":
        """Some of the examples, by their numbers."""
        numbers = list(chosen)
        found = [self.example(i) for i in numbers]
        offsets = np.cumsum([0, *(len(ids) for ids, _ in found)]).astype(np.int64)
        ids, is_target = (np.concatenate(x) for x in zip(*found, strict=True))
        return Examples(ids, is_target, offsets, self.record_numbers[numbers], self.seed)

    def batch(self, first: int, count: int, shuffle: bool = True) -> tuple[Tensor, Tensor, list[int]]:
        """`count` examples from number `first` on, counted over all epochs, packed end to end without padding: (n) ids,
        (n) targets, −100 where a token is not a target, and the length of each example."""
        return self.select([self.index(i, shuffle) for i in range(first, first + count)])

    def select(self, chosen: Iterable[int]) -> tuple[Tensor, Tensor, list[int]]:
        """These examples, numbered in the order of the files, as a batch."""
        parts = [self.example(i) for i in chosen]
        ids = np.concatenate([ids[:-1] for ids, _ in parts]).astype(np.int64)
        targets = np.concatenate([np.where(is_target[1:], ids[1:].astype(np.int64), -100) for ids, is_target in parts])
        return torch.from_numpy(ids), torch.from_numpy(targets), [len(ids) - 1 for ids, _ in parts]

    def size(self, first: int, count: int, shuffle: bool = True) -> tuple[int, int]:
        """The number of tokens and of targets in that batch."""
        parts = [self.example(self.index(i, shuffle)) for i in range(first, first + count)]
        return sum(len(ids) - 1 for ids, _ in parts), sum(int(np.count_nonzero(is_target)) for _, is_target in parts)

    def sample_prompt(self) -> Tensor:
        """The first example up to its first target, (1, t), as a prompt for sample generation."""
        ids, is_target = self.example(0)
        return torch.from_numpy(ids[: int(np.argmax(is_target))].astype(np.int64))[None]

    def describe_size(self, count: int) -> str:
        return plural(count, "example")

    def index(self, i: int, shuffle: bool) -> int:
        """The example at position i, counted over all epochs."""
        epoch, i = divmod(i, self.per_epoch)
        return shuffled_index(i, self.per_epoch, self.seed, epoch) if shuffle else i

    @cached_property
    def content_ids(self) -> np.ndarray:
        """A number for each example, equal for equal examples, counted from 0 in the order of first appearance."""
        numbers: dict[bytes, int] = {}
        content_ids = np.zeros(self.per_epoch, np.int64)
        for i, digest in enumerate(self.digests()):
            content_ids[i] = numbers.setdefault(digest, len(numbers))
        return content_ids

    def digests(self) -> Iterator[bytes]:
        """Yield a hash of the ids and targets of each example."""
        for i in range(self.per_epoch):
            ids, is_target = self.example(i)
            yield hashlib.blake2b(ids.astype("<u4").tobytes() + is_target.tobytes(), digest_size=16).digest()

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the examples and their order."""
        digest = hashlib.sha256()
        for part in (self.ids.astype("<u4", copy=False), self.is_target, self.offsets.astype("<i8", copy=False)):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()[:32]


# ── files → examples ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Dropped:
    count: int
    first: Location


@dataclass
class Summary:
    """Statistics of `read`. The length of an example is the number of tokens the model reads, one less than its ids."""

    n_context: int
    kinds: dict[str, int]  # records of each kind
    examples: int = 0
    tokens: int = 0
    targets: int = 0
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # [n] examples have length n
    cut: int = 0  # examples cut at the end of the context
    cut_tokens: int = 0  # tokens lost by that
    split: int = 0  # texts split into several examples
    dropped: dict[str, Dropped] = field(default_factory=dict)  # by reason
    distinct: int = 0  # number of different examples
    shared: int = 0  # examples of --val-data that are also here
    bad: int = 0  # records that cannot be used
    format: str = "raw"  # "chat": a chat template has formatted records; texts alone are raw
    first_bad: dict[str, str] = field(
        default_factory=dict
    )  # for each of the first MAX_LISTED reasons, its first message
    more_bad: dict[str, int] = field(default_factory=dict)  # and the number of further records with that reason

    def add_bad(self, message: str) -> None:
        """Count a record that cannot be used. Messages that differ in the line alone have one reason."""
        self.bad += 1
        reason = re.sub(r", line \d+", "", message)
        if reason in self.first_bad:
            self.more_bad[reason] = self.more_bad.get(reason, 0) + 1
        elif len(self.first_bad) < MAX_LISTED:
            self.first_bad[reason] = printable(message, MAX_LINE)

    @property
    def mistakes(self) -> list[str]:
        """A line for each reason, and one for what is not listed."""
        more = {reason: f" (and {plural(n, 'more line')} like it)" for reason, n in self.more_bad.items()}
        unlisted = self.bad - len(self.first_bad) - sum(self.more_bad.values())
        listed = [message + more.get(reason, "") for reason, message in self.first_bad.items()]
        return [*listed, *([f"and {unlisted:,} more"] if unlisted else [])]


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
    entries: Iterator[Entry] | None = None,
) -> tuple[Examples, Summary]:
    """Read the examples of fine-tuning files, none longer than the context, and statistics.

    template    formats messages, prompts and completions; None: raw
    loss_on     "answers": targets are completions and assistant messages; "all": prompts and other messages too
    too_long    "cut": a text is split into several examples, other examples are cut at the end; "drop": both are left out
    fields      names of fields in the data, as "prompt=question"
    skip_bad    leave out and count records that cannot be used; otherwise they raise BadLinesError
    progress    called with the number of bytes read
    entries     records to read instead of files
    """
    for name, value, choices in (("loss_on", loss_on, LossOn), ("too_long", too_long, TooLong)):
        if value not in get_args(choices):
            raise HandgradError(f"{name} is {value!r}; allowed: {' or '.join(get_args(choices))}")
    names = field_names(fields)
    all_ids = array("H" if tokenizer.id_type.itemsize == 2 else "I")
    all_targets = bytearray()
    offsets, record_numbers = array("q", [0]), array("q")
    summary = Summary(n_context, dict.fromkeys(KINDS, 0))

    def report_bad(error: HandgradError) -> None:
        summary.add_bad(error.message)

    drafts = _drafts(records(files, progress) if entries is None else entries, names, template, loss_on, report_bad)
    for drafted, ids, is_target in _encode(drafts, tokenizer, report_bad):
        summary.kinds[drafted.kind] += 1
        for window in _fit_to_context(drafted, ids, is_target, summary, too_long):
            all_ids.frombytes(ids[window].astype(all_ids.typecode).tobytes())
            all_targets += b"\0" + is_target[window][1:].tobytes()
            offsets.append(len(all_ids))
            record_numbers.append(drafted.number)
    if summary.bad and not skip_bad:
        raise BadLinesError(summary)
    if len(offsets) == 1:
        reasons = [f"{summary.bad:,} that cannot be used"] if summary.bad else []
        reasons += [
            f"{d.count:,} {reason}, the first {d.first.file}:{d.first.line}" for reason, d in summary.dropped.items()
        ]
        raise HandgradError(f"the data has no usable example ({'; '.join(reasons) or 'the files are empty'})")
    examples = Examples(
        np.frombuffer(all_ids, all_ids.typecode),
        np.frombuffer(all_targets, bool),
        np.frombuffer(offsets, np.int64),
        np.frombuffer(record_numbers, np.int64),
        seed,
    )
    lengths = np.diff(examples.offsets) - 1
    summary.examples, summary.tokens = examples.per_epoch, int(lengths.sum())
    summary.format = "chat" if template is not None and sum(summary.kinds.values()) > summary.kinds["text"] else "raw"
    summary.distinct = 1 + int(examples.content_ids.max())
    summary.targets, summary.lengths = int(np.count_nonzero(examples.is_target)), np.bincount(lengths)
    return examples, summary


class BadLinesError(HandgradError):
    """Lists the first records that cannot be used, each with its reason, and their number."""

    limit = sys.maxsize  # its lines are shortened, one by one

    def __init__(self, summary: Summary):
        lines = summary.mistakes
        if summary.bad > 1:
            lines = [
                "\n  ".join(
                    [f"{summary.bad:,} lines cannot be used ({option('skip_bad', True)} leaves them out):", *lines]
                )
            ]
        super().__init__(lines[0])


def _drafts(
    entries: Iterator[Entry],
    names: dict[str, str],
    template: ChatTemplate | None,
    loss_on: LossOn,
    report_bad: Callable[[HandgradError], None],
) -> Iterator[Draft]:
    for number, (location, record) in enumerate(entries, 1):
        try:
            if isinstance(record, HandgradError):
                raise record
            yield draft(location, rename_fields(location, record, names), template, loss_on)._replace(number=number)
        except LimitError:
            raise
        except HandgradError as error:
            report_bad(error)


def _encode(
    drafts: Iterator[Draft], tokenizer: Tokenizer, report_bad: Callable[[HandgradError], None]
) -> Iterator[tuple[Draft, np.ndarray, np.ndarray]]:
    """Yield each draft with its ids and whether each is a target. Pieces are encoded separately: no token spans two."""
    empty, known = np.zeros(0, np.int64), tokenizer.begin
    end = empty if tokenizer.end is None else np.array([tokenizer.end])
    for group in corpus.grouped(drafts, lambda drafted: sum(map(len, _texts(drafted)))):
        try:
            encoded = iter(tokenizer.encode_batch([text for drafted in group for text in _texts(drafted)]))
        except HandgradError:  # find out which draft caused it
            group = [drafted for drafted in group if _can_be_encoded(drafted, tokenizer, report_bad)]
            encoded = iter(tokenizer.encode_batch([text for drafted in group for text in _texts(drafted)]))
        for drafted in group:
            parts = [next(encoded) if text else end if text is None else empty for text, _ in drafted.pieces]
            is_target = [
                np.full(len(ids), is_target) for ids, (_, is_target) in zip(parts, drafted.pieces, strict=True)
            ]
            if known and drafted.pieces and drafted.pieces[0][0] is None:  # an end of text begins others
                parts, is_target = parts[1:], is_target[1:]
            ids = np.concatenate([empty, *parts])
            begin = np.array([] if ids[: len(known)].tolist() == known else known, np.int64)
            yield drafted, np.concatenate([begin, ids]), np.concatenate([np.zeros(len(begin), bool), *is_target])


def _texts(drafted: Draft) -> list[str]:
    return [text for text, _ in drafted.pieces if text]


def _can_be_encoded(drafted: Draft, tokenizer: Tokenizer, report_bad: Callable[[HandgradError], None]) -> bool:
    try:
        tokenizer.encode_batch(_texts(drafted))
    except HandgradError as reason:
        report_bad(drafted.location.error(reason.message))
        return False
    return True


def _fit_to_context(
    drafted: Draft, ids: np.ndarray, is_target: np.ndarray, summary: Summary, too_long: TooLong
) -> Iterator[slice]:
    """Yield the windows of an example that fit the context and contain a target; count the rest in `summary`."""
    context, length = summary.n_context, len(ids) - 1
    if length > context and too_long == "drop":
        _drop(summary, f"longer than the context of {context:,} tokens", drafted.location)
        return
    cut = length > context and drafted.kind != "text"
    # The last id of a window is the first of the next: a target here, an input there.
    starts = range(1) if cut else range(0, max(length, 1), context)
    windows = [slice(start, start + context + 1) for start in starts]
    windows = [window for window in windows if is_target[window][1:].any()]
    if not windows:
        _drop(summary, "with nothing to learn inside the context" if cut else "with nothing to learn", drafted.location)
    elif cut:
        summary.cut += 1
        summary.cut_tokens += length - context
    elif len(windows) > 1:
        summary.split += 1
    yield from windows


def _drop(summary: Summary, reason: str, location: Location) -> None:
    summary.dropped.setdefault(reason, Dropped(0, location)).count += 1

"""Examples as users give them: files, records, or examples that have been read already."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import HandgradError, shown
from ..inference.model_text import model_text
from ..model.gpt import GPT
from ..text import examples
from ..text import format as text_format
from ..text.examples import Examples
from ..text.records import Location
from ..text.tokenizer import Tokenizer

Record = Mapping[str, Any]
Given = Examples | str | Path | Record | Iterable[str | Path | Record]


def as_examples(model: GPT, given: Given, tokenizer: Tokenizer | None = None, format: str | None = None) -> Examples:
    """Read what was given as fine-tuning does: with the model's tokenizer, in its format; targets are the answers."""
    text_format.check(format)
    if isinstance(given, Examples):
        return given
    items: list[Any] = [given] if isinstance(given, str | Path | Mapping) else _listed(given)
    tokenizer = model_text(model, tokenizer).tokenizer
    how = text_format.choose(tokenizer, format)
    how.warn(tokenizer.source, "this call")
    if all(isinstance(item, str | Path) for item in items):
        files = examples.find([str(item) for item in items])
        return examples.read(files, tokenizer, model.config.n_context, template=how.template)[0]
    for item in items:
        if not isinstance(item, Mapping):
            raise HandgradError(
                f"an example is {shown(item)}: give records such as {{'prompt': …, 'completion': …}}, or paths of files"
            )
    entries = ((Location(Path("examples"), i), dict(item)) for i, item in enumerate(items, 1))
    return examples.read([], tokenizer, model.config.n_context, template=how.template, entries=entries)[0]


def _listed(given: object) -> list[Any]:
    if not isinstance(given, Iterable):
        raise HandgradError(f"examples are {shown(given)}: give records in a list, or the path of a file")
    items = list(given)
    if not items:
        raise HandgradError("no examples were given")
    return items


class Shown(NamedTuple):
    """An example as text."""

    record: int  # the number of the record in all files, from 1
    prompt: str  # up to the first target; of a conversation the last turn
    answer: str  # the targets
    targets: int  # how many


def as_text(found: Examples, tokenizer: Tokenizer, i: int) -> Shown:
    """Example i for people."""
    ids, is_target = found.example(i)
    begin = int(np.argmax(is_target))
    prompt, answer = _last_turn(ids[:begin].tolist(), tokenizer), tokenizer.decode(ids[is_target].tolist())
    return Shown(int(found.record_numbers[i]), prompt.strip(), answer.strip(), int(np.count_nonzero(is_target)))


def _last_turn(ids: list[int], tokenizer: Tokenizer) -> str:
    """The text of a prompt. If special tokens divide it, as in a chat template, the part before the last, which opens the
    answer: all examples begin with the same system prompt."""
    special = {i for i, token in tokenizer.inner.get_added_tokens_decoder().items() if token.special}
    parts = [tokenizer.decode(list(part)) for divides, part in groupby(ids, special.__contains__) if not divides]
    parts = [part for part in parts if part.strip()]
    if not parts or special.isdisjoint(ids):
        return tokenizer.decode(ids)
    return parts[-2] if len(parts) > 1 else parts[0]


def groups(found: Examples, most: int) -> Iterable[Sequence[int]]:
    """The examples in order, in groups of about `most` tokens."""
    lengths = np.diff(found.offsets) - 1
    first, total = 0, 0
    for i, length in enumerate(lengths.tolist()):
        if total and total + length > most:
            yield range(first, i)
            first, total = i, 0
        total += length
    yield range(first, len(lengths))

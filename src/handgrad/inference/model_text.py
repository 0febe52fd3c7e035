"""A model's tokenizer and its end-of-sequence ids, read from where the model was loaded when text is first needed."""

from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..errors import HandgradError
from ..model.gpt import GPT
from ..text import tokenizer as tokenizers
from ..text.endings import end_ids
from ..text.tokenizer import Tokenizer


class ModelText(NamedTuple):
    """How a model reads and writes text."""

    tokenizer: Tokenizer
    ends: frozenset[int]  # the ids that end a text


_read: WeakKeyDictionary[GPT, ModelText] = WeakKeyDictionary()


def model_text(model: GPT, tokenizer: Tokenizer | None = None) -> ModelText:
    """The model's own, or the given tokenizer with its end-of-text id."""
    found = tokenizer or model.tokenizer
    if found is None and not model.text_source:
        raise HandgradError(
            "this model has no tokenizer, because it was not loaded from a folder: give token ids, or a tokenizer, as in"
            ' model.tokenizer = handgrad.text.tokenizer.make("bytes", [])'
        )
    if tokenizer is not None or not model.text_source:
        return ModelText(found, _within(model, [] if found.end is None else [found.end]))
    if model not in _read or _read[model].tokenizer is not found:
        path = Path(model.text_source)
        found = found or tokenizers.read(path)
        ends = end_ids(path, found)
        if model.source and model.source != model.text_source:  # an adapter has a tokenizer, and its base the settings
            ends |= end_ids(Path(model.source), found)
        _read[model] = ModelText(found, _within(model, ends))
    return _read[model]


def _within(model: GPT, ids: frozenset[int] | list[int]) -> frozenset[int]:
    return frozenset(i for i in ids if i < model.config.n_vocab)

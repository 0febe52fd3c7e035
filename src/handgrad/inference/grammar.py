"""Texts that a sequence may be: JSON values of a schema, or those of a grammar. `llguidance` finds the tokens that may
follow.

    grammar = Grammar(vocabulary(text, n_vocab), json_grammar({"type": "object"}))
    matcher = grammar.matcher()       one for each sequence
    matcher.mask(logits)              −∞ for every id with which the text could not go on
    matcher.add(i)                    the id that was chosen
    matcher.finished                  whether the text is complete, and nothing can follow

Ids that end a text are allowed where it is complete. Schemas come from clients: the library bounds their size, the states
they need and the work of every step, runs no regular expression that backtracks, and fetches nothing.
"""

import json
import re
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import llguidance
import numpy as np
import torch
from torch import Tensor

from ..errors import HandgradError
from ..text.token_text import TokenText
from ..text.tokenizer import Tokenizer
from .model_text import ModelText

# White space in JSON is a space, or a line break and an indent: a model could otherwise write nothing else.
JSON = {"whitespace_pattern": r" |\n[ \t]{0,20}"}


class _Tokens:
    """The vocabulary as `llguidance` wants it. The last token is not the model's: a text ends with it if the model has no
    token for that."""

    bos_token_id = None

    def __init__(self, text: ModelText, n_vocab: int):
        self.tokenizer = ref(text.tokenizer)  # the library holds this object: the tokenizer must not live as long
        of = TokenText(text.tokenizer)
        known = min(n_vocab, text.tokenizer.n_vocab)
        self.tokens = [*(of.raw(i) for i in range(known)), *[b""] * (n_vocab - known), b"<end>"]
        added = text.tokenizer.inner.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special and i < n_vocab}
        self.special_token_ids = sorted({*special, *text.ends, n_vocab})
        self.eos_token_id = n_vocab
        plain = set(range(known)).difference(self.special_token_ids)
        self.by_bytes = {self.tokens[i]: i for i in sorted(plain, reverse=True)}
        self.most = max(map(len, self.by_bytes), default=0)

    def __call__(self, given: str) -> list[int]:
        """The ids of a text that must follow: the tokenizer's own, or, if it would write something else, such as a space
        before it, or does not know it, the longest tokens."""
        tokenizer = self.tokenizer()
        try:
            ids = [] if tokenizer is None else tokenizer.encode(given)
        except HandgradError:
            ids = []
        raw = given.encode()
        return ids if b"".join(self.tokens[i] for i in ids) == raw else self._longest(raw)

    def _longest(self, raw: bytes) -> list[int]:
        ids = []
        while raw:
            n = next((n for n in range(min(len(raw), self.most), 0, -1) if raw[:n] in self.by_bytes), 0)
            if not n:  # no token begins like this: the sequence will fail
                break
            ids.append(self.by_bytes[raw[:n]])
            raw = raw[n:]
        return ids


_vocabularies: WeakKeyDictionary[Tokenizer, llguidance.LLTokenizer] = WeakKeyDictionary()


def vocabulary(text: ModelText, n_vocab: int) -> llguidance.LLTokenizer:
    """The bytes of every token of a model, prepared at first use, which takes about a second."""
    if text.tokenizer not in _vocabularies:
        wrapped = llguidance.TokenizerWrapper(_Tokens(text, n_vocab))
        _vocabularies[text.tokenizer] = llguidance.LLTokenizer(wrapped, eos_token=[*sorted(text.ends), n_vocab])
    return _vocabularies[text.tokenizer]


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The source of a grammar of the JSON values that satisfy a schema."""
    return lark_grammar(f"start: {json_rule(schema)}")


def json_rule(schema: Mapping[str, Any]) -> str:
    """The right side of a grammar's rule for such values."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON})


def lark_grammar(rules: str) -> str:
    """The source of a grammar in Lark's notation."""
    return str(llguidance.LLMatcher.grammar_from_lark(rules))


class Grammar:
    """A grammar for one vocabulary. Raises if it is wrong, or has what the library does not support."""

    def __init__(self, tokens: llguidance.LLTokenizer, source: str):
        limits = llguidance.LLParserLimits(verbose_errors=False)
        self._start = llguidance.LLMatcher(tokens, source, log_level=0, limits=limits)
        self._start.compute_bitmask()  # some rules, such as one that is only itself, fail at the first token
        if self._start.is_error():
            raise HandgradError(_reason(self._start.get_error()))

    def matcher(self) -> "Matcher":
        return Matcher(self._start.deep_copy())


class Matcher:
    """Where one sequence is in its grammar."""

    def __init__(self, inner: llguidance.LLMatcher):
        self._inner = inner

    def mask(self, logits: Tensor) -> None:
        """(V) logits, changed in place. Raises if no token can follow."""
        bits = np.unpackbits(np.frombuffer(self._inner.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits[: len(logits)]).to(logits.device, torch.bool)
        if self._inner.is_error() or not allowed.any():
            reason = _reason(self._inner.get_error()) or "no token of the vocabulary continues the text"
            raise HandgradError(f"the answer's format cannot be kept: {reason}")
        logits.masked_fill_(~allowed, -torch.inf)

    def add(self, i: int) -> None:
        self._inner.consume_token(i)

    @property
    def finished(self) -> bool:
        return bool(self._inner.is_stopped() and not self._inner.is_error())


def literal(tokens: llguidance.LLTokenizer, tokenizer: Tokenizer, text: str) -> str:
    """A text in a grammar's source: as its own special token, if it is one."""
    i = tokenizer.inner.token_to_id(text)
    return f"<[{i}]>" if i is not None and tokens.is_special_token(i) else json.dumps(text)


def _reason(message: str) -> str:
    """The first line of the library's message, without the place in a source that the user has not written."""
    return re.sub(r"^at \d+\(\d+\): ", "", message.partition("\n")[0])[:300]

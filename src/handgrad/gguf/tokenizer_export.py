"""A tokenizer as the metadata of a GGUF file: the reverse of `tokenizer.py`.

Only what llama.cpp computes equally is written. Byte-level BPE needs a way of splitting text that `SPLITTINGS` names.
SentencePiece BPE needs merges that follow from scores: all ways to make a token, the tokens in one order.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers

from ..errors import HandgradError, shown
from .tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    SPECIAL,
    SPLITTINGS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    sentencepiece_spaces,
    split_words,
)
from .writing import REMEDY, Value, typed

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_AFTER_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


class TokenizerMetadata(NamedTuple):
    metadata: dict[str, Value]
    notes: list[str]  # what llama.cpp does differently


def tokenizer_metadata(
    inner: tokenizers.Tokenizer,
    n_vocab: int,
    special: Mapping[str, str],
    ends: frozenset[int],
    template: str | None,
) -> TokenizerMetadata:
    """The metadata for a model with `n_vocab` rows. `special` has the texts of bos_token, eos_token, …; `ends` are all ids
    at which the model ends a text."""
    content = json.loads(inner.to_str())
    added = content["added_tokens"]
    model = content["model"]
    if model["type"] != "BPE":
        raise HandgradError(
            f"llama.cpp has no tokenizer of the kind {shown(model['type'])} with this vocabulary: {REMEDY}"
        )
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            raise HandgradError(f"llama.cpp has no tokenizer with {name} {shown(model[name])}: {REMEDY}")
    notes = _check_added(added)
    vocabulary: dict[str, int] = inner.get_vocab()
    if max(vocabulary.values()) >= n_vocab:
        raise HandgradError(
            f"the tokenizer has {max(vocabulary.values()) + 1:,} ids, and the model {n_vocab:,}: use its own"
        )
    tokens, types = _tokens(vocabulary, n_vocab)
    for token in added:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = [pair if isinstance(pair, list) else pair.split(" ", 1) for pair in model["merges"]]
    if model.get("byte_fallback"):
        found = _of_scores(content, vocabulary, tokens, types, merges)
    else:
        found = _of_byte_pairs(content, merges)
    found |= _special_ids(inner, special, ends, found["tokenizer.ggml.model"] == "gpt2", notes)
    found |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if template is not None:
        found["tokenizer.chat_template"] = template
    return TokenizerMetadata({key: typed(value) for key, value in found.items()}, notes)


def _check_added(added: list[dict[str, Any]]) -> list[str]:
    """What llama.cpp does differently with added tokens."""
    for token in added:
        if token["single_word"]:
            raise HandgradError(f"llama.cpp finds {shown(token['content'])} inside of words (single_word): {REMEDY}")
    stripping = [token["content"] for token in added if token["lstrip"] or token["rstrip"]]
    if not stripping:
        return []
    return [
        f"llama.cpp keeps the spaces beside {', '.join(stripping[:3])}, which this tokenizer drops (lstrip, rstrip)"
    ]


def _tokens(vocabulary: Mapping[str, int], n_vocab: int) -> tuple[list[str], list[int]]:
    """A text and a type for every row of the embedding; rows without a token get a text that is none."""
    text_of = {i: token for token, i in vocabulary.items()}
    tokens = []
    for i in range(n_vocab):
        token = text_of.get(i, f"[PAD{i}]")
        while i not in text_of and token in vocabulary:
            token = f"[{token}]"
        tokens.append(token)
    return tokens, [NORMAL if i in text_of else UNUSED for i in range(n_vocab)]


def _special_ids(
    inner: tokenizers.Tokenizer, special: Mapping[str, str], ends: frozenset[int], byte_level: bool, notes: list[str]
) -> dict[str, Any]:
    """Ids of the tokens with a meaning, and which of them surround a text."""
    found: dict[str, Any] = {}
    for name, key in SPECIAL.items():
        i = inner.token_to_id(special.get(f"{name}_token", ""))
        if i is not None:
            found[f"tokenizer.ggml.{key}"] = i
    own_end = found.get("tokenizer.ggml.eos_token_id")
    others = sorted(ends - {own_end})
    if own_end is None and others:
        found["tokenizer.ggml.eos_token_id"] = others.pop(0)
    found |= {f"tokenizer.ggml.{key}": i for key, i in zip(("eot_token_id", "eom_token_id"), others, strict=False)}
    if len(others) > 2:
        notes.append(f"a GGUF file has three ids that end a text; {', '.join(map(str, others[2:]))} are left out")
    if "tokenizer.ggml.eos_token_id" not in found:
        default = inner.id_to_token(11 if byte_level else 2)
        notes.append(f"the tokenizer names no end of text: llama.cpp takes {shown(default)} for it")
    around = inner.encode("").ids  # what a text of nothing gets
    add_bos = around[:1] == [found.get("tokenizer.ggml.bos_token_id")]
    if around[add_bos:] not in ([], [found.get("tokenizer.ggml.eos_token_id")]):
        raise HandgradError(
            f"the tokenizer puts the ids {around} around a text, and llama.cpp only its begin and end: {REMEDY}"
        )
    found |= {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": bool(around[add_bos:])}
    return found


# ── byte-level BPE ──────────────────────────────────────────────────────────────────────────────────────────────────


def _of_byte_pairs(content: dict[str, Any], merges: list[list[str]]) -> dict[str, Any]:
    given = content["normalizer"], _flat(content["pre_tokenizer"]), bool(content["model"].get("ignore_merges"))
    for pre, splitting in SPLITTINGS.items():
        if pre == "default":  # llama.cpp means another one by it
            continue
        known = tokenizers.Tokenizer(tokenizers.models.BPE())
        split_words(known, splitting)
        as_json = json.loads(known.to_str())
        if given == (as_json["normalizer"], _flat(as_json["pre_tokenizer"]), splitting.whole_words):
            break
    else:
        raise HandgradError(
            f"the tokenizer splits text by {shown(given[1], 200)} after {shown(given[0])}, and GGUF has no known name for"
            f" this (tokenizer.ggml.pre): {REMEDY}"
        )
    if any(" " in part for pair in merges for part in pair):
        raise HandgradError(
            f"the tokenizer merges tokens with a space in them, which a GGUF file cannot hold: {REMEDY}"
        )
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }


def _flat(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Pre-tokenizers in order, without what changes no id."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [inner for each in part["pretokenizers"] for inner in _flat(each)]
    return [{key: value for key, value in part.items() if key != "trim_offsets"}]


# ── SentencePiece ───────────────────────────────────────────────────────────────────────────────────────────────────


def _of_scores(
    content: dict[str, Any],
    vocabulary: Mapping[str, int],
    tokens: list[str],
    types: list[int],
    merges: list[list[str]],
) -> dict[str, Any]:
    prefix = _prefix(content)
    for i, token in enumerate(tokens):
        if types[i] == NORMAL and _BYTE_TOKEN.fullmatch(token):
            types[i] = BYTE
    if types.count(BYTE) != 256:
        raise HandgradError(
            f"the vocabulary has {types.count(BYTE)} tokens of bytes, and llama.cpp needs 256: {REMEDY}"
        )
    unknown = vocabulary.get(content["model"].get("unk_token") or "")
    if unknown is not None:
        types[unknown] = UNKNOWN
    made = list(dict.fromkeys(left + right for left, right in merges))
    rank = {token: i for i, token in enumerate(made)}
    _check_merges(merges, rank, {token for token, i in vocabulary.items() if types[i] == NORMAL})
    scores = [-float(rank.get(token, len(made))) for token in tokens]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [0.0 if kind != NORMAL else score for kind, score in zip(types, scores, strict=True)],
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def _prefix(content: dict[str, Any]) -> bool:
    """Whether a space is put before every text."""
    pre = content["pre_tokenizer"]
    for prefix in (True, False):
        known = tokenizers.Tokenizer(tokenizers.models.BPE())
        known.normalizer = sentencepiece_spaces(prefix)
        if content["normalizer"] == json.loads(known.to_str())["normalizer"] and pre in (None, _AFTER_SPACES):
            return prefix
    without = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False}
    if content["normalizer"] is None and pre == without:
        return False
    raise HandgradError(
        f"the tokenizer treats spaces by {shown(content['normalizer'], 100)} and {shown(pre, 100)}, which llama.cpp does"
        f" not: {REMEDY}"
    )


def _check_merges(merges: list[list[str]], rank: Mapping[str, int], normal: set[str]) -> None:
    """Raise unless llama.cpp, which knows only scores of tokens, merges the same pairs in the same order."""
    ranks = [rank[left + right] for left, right in merges]
    pairs = {(left, right) for left, right in merges}
    possible = {
        (token[:i], token[i:])
        for token in normal
        for i in range(1, len(token))
        if token[:i] in normal and token[i:] in normal
    }
    if ranks != sorted(ranks) or pairs != possible:
        raise HandgradError(
            f"the merges of the tokenizer do not follow from scores of its tokens, as llama.cpp's do: {REMEDY}"
        )

"""Reject a tokenizer.json that could exhaust memory, hang or crash the process.

Its normalizers, pre-tokenizers, decoders and post-processors are programs: they can multiply a text, and regular expressions
can hang. Their number and growth are checked before the library loads them. Then they are tried on long runs of characters
in the sandbox, unless they are of kinds that cannot do harm; so is the complete tokenizer if its file is small.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from ..checks import check_added_tokens
from ..errors import HandgradError, LimitError, printable, shown
from ..sandbox import client

MAX_PARTS = 64  # nested normalizers, pre-tokenizers and decoders
MAX_GROWTH = 32  # factor by which all parts together may lengthen a text
MAX_WORD = 10_000  # characters that WordPiece compares with every entry
MAX_ENTRY = 1_000  # characters of a token of Unigram, which are compared at every position of a text
MAX_PATTERN = 10_000  # characters
HARMLESS = ("Sequence", "ByteLevel", "Digits", "Split", "Fuse", "NFC")
KNOWN_SAFE = ("[\\s\\S]",)
RUN_LENGTH = 4_000  # characters of each trial text
MAX_CHARACTERS, MAX_WORDS = 80, 20  # of patterns, of which trial texts are made
SMALL = 1_000_000  # bytes of a file that is tried as a whole
WORK = 200_000  # bytes of a file whose time the trial may take

_ESCAPE = re.compile(r"\\x\{([0-9a-fA-F]{1,6})\}|\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})")
_KEYS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")


def check(content: Any, name: str | Path, size: int) -> None:
    """Raise if the tokenizer described by `content`, a file of `size` bytes, could exhaust memory, hang or panic. `name` is
    for messages."""
    if not isinstance(content, dict):
        raise HandgradError(f"{name} is not a tokenizer.json: it contains {shown(content)}, not an object")
    check_added_tokens(content.get("added_tokens"), name)
    parts = {key: content.get(key) for key in _KEYS}
    nested = [inner for part in parts.values() for inner in _flatten(part)]
    if len(nested) > MAX_PARTS:
        raise HandgradError(
            f"{name}: {len(nested):,} normalizers, pre-tokenizers and decoders; the maximum is {MAX_PARTS}"
        )
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        factor = prod(_growth(inner, name) for inner in _flatten(parts[key]))
        if factor > MAX_GROWTH:
            raise HandgradError(f"{name}: it makes a text up to {factor:,} times as long; the maximum is {MAX_GROWTH}")
    for inner in _flatten(parts["decoder"]):
        _check_strip(inner, name)
    model = content.get("model")
    if isinstance(model, dict):
        _check_model(model, name)
    patterns = [pattern for part in nested for pattern in _patterns(part)]
    kinds = [part["type"] for part in nested]
    bytes_twice = [part["type"] for key in _KEYS[:2] for part in _flatten(parts[key])].count("ByteLevel") > 1
    if bytes_twice or not all(kind in HARMLESS for kind in kinds) or any(p not in KNOWN_SAFE for p in patterns):
        _try(parts, patterns, [json.dumps(content)] if size <= SMALL else [], name)


def _flatten(part: Any) -> Iterator[dict[str, Any]]:
    """Yield a part and all parts nested in it. Recursion is safe: `parse_json` bounds the depth."""
    if isinstance(part, list):
        for inner in part:
            yield from _flatten(inner)
    elif isinstance(part, dict):
        if "type" in part:
            yield part
        for key in ("normalizers", "pretokenizers", "decoders", "processors"):
            yield from _flatten(part.get(key))


def _growth(part: dict[str, Any], name: str | Path) -> int:
    """The maximum number of characters that one input character can become."""
    if part["type"] == "Precompiled":
        return _longest_precompiled(part.get("precompiled_charsmap"))
    for key, value in part.items():
        if key != "content" and isinstance(value, str) and len(value) > MAX_GROWTH:
            raise HandgradError(
                f"{name}: {shown(part['type'])} has a {shown(key)} of {len(value):,} characters; the maximum is"
                f" {MAX_GROWTH}"
            )
    content = part.get("content")
    if not isinstance(content, str):
        return 1
    # a pattern that matches the empty string is also replaced between characters
    empty = part.get("pattern") == {"String": ""} or bool(list(_patterns(part)))
    return max(1, len(content) + empty)


def _longest_precompiled(encoded: Any) -> int:
    """The longest replacement in a precompiled map: 4 bytes trie size, the trie, then zero-terminated replacements."""
    try:
        raw = base64.b64decode(encoded or "")
    except (TypeError, binascii.Error):
        return 1  # the library rejects it
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


def _check_strip(part: dict[str, Any], name: str | Path) -> None:
    """The library counts beyond the beginning of a token that is `content` alone, and panics."""
    start, stop = part.get("start"), part.get("stop")
    if part["type"] == "Strip" and isinstance(start, int) and isinstance(stop, int) and stop > (0 if start else 1):
        raise HandgradError(
            f"{name}: the decoder Strip takes up to {start:,} characters from the beginning of a token and {stop:,} from its"
            " end, which fails on a token of one character; from the end it may take 1, or 0 if it takes any from the"
            " beginning"
        )


def _check_model(model: dict[str, Any], name: str | Path) -> None:
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        value = model.get(key)
        if isinstance(value, str) and len(value) > MAX_GROWTH:
            raise HandgradError(f"{name}: the {key} has {len(value):,} characters; the maximum is {MAX_GROWTH}")
    entries = model.get("vocab") if model.get("type") == "Unigram" else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, list) and entry and isinstance(entry[0], str) and len(entry[0]) > MAX_ENTRY:
            raise HandgradError(f"{name}: a token has {len(entry[0]):,} characters; the maximum is {MAX_ENTRY:,}")
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > MAX_WORD:
        raise HandgradError(f"{name}: max_input_chars_per_word is {longest:,}; the maximum is {MAX_WORD:,}")


def _patterns(part: dict[str, Any]) -> Iterator[str]:
    pattern = part.get("pattern")
    if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        yield pattern["Regex"]


def _plain(pattern: str) -> str:
    """A pattern with the characters that its escapes stand for."""

    def character(found: re.Match[str]) -> str:
        code = int(next(filter(None, found.groups())), 16)
        return chr(code) if code < 0xD800 or 0xDFFF < code < 0x110000 else ""

    return _ESCAPE.sub(character, pattern)


def _try(parts: dict[str, Any], patterns: list[str], others: list[str], name: str | Path) -> None:
    """Encode long runs of each character and word in the patterns, and of some other characters, in the sandbox: with a
    vocabulary that makes every character a token, and with the tokenizers `others`."""
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN:
            raise HandgradError(
                f"{name}: a regular expression has {len(pattern):,} characters; the maximum is {MAX_PATTERN:,}"
            )
    trial = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], **parts,
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "a", "fuse_unk": False},
    }  # fmt: skip
    by = f"splitting by {', '.join(shown(pattern) for pattern in patterns[:3])}" if patterns else "its tokenizer"
    plain = [_plain(pattern) for pattern in patterns]
    characters = "".join(sorted({*"aZ1 \n.'_é東", *"".join(plain)})[:MAX_CHARACTERS])
    words = list(dict.fromkeys(word for pattern in plain for word in re.findall(r"\w{2,}", pattern)))[:MAX_WORDS]
    try:
        found = client.call(
            "tokenize", by, WORK, tokenizers=[json.dumps(trial), *others], characters=characters, words=words,
            length=RUN_LENGTH, growth=MAX_GROWTH,
        )  # fmt: skip
    except LimitError as reason:
        raise LimitError(f"{name} cannot be used as a tokenizer: {reason}") from None
    if "error" in found:
        raise HandgradError(f"{name} cannot be used as a tokenizer: {by} {printable(found['error'].splitlines()[0])}")

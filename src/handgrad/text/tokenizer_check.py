"""Reject a tokenizer.json that could exhaust memory, hang or crash the process.

Its normalizers, pre-tokenizers and decoders are programs: replacements can multiply a text, regular expressions can hang.
Their number and growth are checked before the library loads them; regular expressions are tried on long runs of characters
in a child process with time and memory limits.
"""

import base64
import binascii
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from ..errors import HandgradError, printable, shown

MAX_PARTS = 64  # nested normalizers, pre-tokenizers and decoders
MAX_GROWTH = 32  # factor by which all replacements together may lengthen a text
MAX_WORD = 10_000  # characters that WordPiece compares with every entry
MAX_PATTERN = 10_000  # characters
KNOWN_SAFE = ("[\\s\\S]",)
RUN_LENGTH = 4_000  # characters of each trial text
SECONDS, BYTES = 2, 1 << 30  # limits of the child process

TRIAL_PROGRAM = """
import json, os, resource, sys
import tokenizers
def limit(kind, maximum):
    resource.setrlimit(kind, (maximum, maximum))
parts, texts, seconds, size = json.loads(sys.stdin.buffer.read())
limit(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + seconds)
limit(resource.RLIMIT_AS, size)
made = tokenizers.Tokenizer.from_str(json.dumps(parts))
for text in texts:
    made.encode(text)
    if made.decoder is not None:
        made.decoder.decode([text])
"""


def check(content: Any, name: str | Path) -> None:
    """Raise if the tokenizer described by `content` could exhaust memory, hang or panic. `name` is for messages."""
    if not isinstance(content, dict):
        raise HandgradError(f"{name} is not a tokenizer.json: it contains {shown(content)}, not an object")
    parts = [content.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
    nested = [inner for part in parts for inner in _flatten(part)]
    if len(nested) > MAX_PARTS:
        raise HandgradError(
            f"{name}: {len(nested):,} normalizers, pre-tokenizers and decoders; the maximum is {MAX_PARTS}"
        )
    for part in parts:
        factor = prod(_growth(inner, name) for inner in _flatten(part))
        if factor > MAX_GROWTH:
            raise HandgradError(f"{name}: it makes a text up to {factor:,} times as long; the maximum is {MAX_GROWTH}")
    model = content.get("model")
    if isinstance(model, dict):
        _check_model(model, name)
    patterns = [pattern for part in nested for pattern in _patterns(part)]
    if any(pattern not in KNOWN_SAFE for pattern in patterns):
        _try_patterns(parts, patterns, name)


def _flatten(part: Any) -> Iterator[dict[str, Any]]:
    """Yield a part and all parts nested in it. Recursion is safe: `parse_json` bounds the depth."""
    if isinstance(part, list):
        for inner in part:
            yield from _flatten(inner)
    elif isinstance(part, dict):
        if "type" in part:
            yield part
        for key in ("normalizers", "pretokenizers", "decoders"):
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


def _check_model(model: dict[str, Any], name: str | Path) -> None:
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        value = model.get(key)
        if isinstance(value, str) and len(value) > MAX_GROWTH:
            raise HandgradError(f"{name}: the {key} has {len(value):,} characters; the maximum is {MAX_GROWTH}")
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > MAX_WORD:
        raise HandgradError(f"{name}: max_input_chars_per_word is {longest:,}; the maximum is {MAX_WORD:,}")


def _patterns(part: dict[str, Any]) -> Iterator[str]:
    pattern = part.get("pattern")
    if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        yield pattern["Regex"]


def _try_patterns(parts: list[Any], patterns: list[str], name: str | Path) -> None:
    """Encode long runs of each character in the patterns and of some others, in a child process with limits."""
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN:
            raise HandgradError(
                f"{name}: a regular expression has {len(pattern):,} characters; the maximum is {MAX_PATTERN:,}"
            )
    characters = sorted({*"aZ1 \n.'_é東", *"".join(patterns)})[:80]
    every = "".join(characters)
    texts = [every, *(f"{c * RUN_LENGTH}\x01{every}" for c in characters), " a1.\n" * (RUN_LENGTH // 5)]
    trial = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None,
        "normalizer": parts[0], "pre_tokenizer": parts[1], "decoder": parts[2],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }  # fmt: skip
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    request = json.dumps([trial, texts, SECONDS, BYTES]).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL_PROGRAM],
            input=request, capture_output=True, env=environment, timeout=60, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise HandgradError(_unusable(name, patterns, "takes too long")) from None
    if done.returncode < 0:
        raise HandgradError(_unusable(name, patterns, "takes too long or too much memory"))
    if done.returncode:
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise HandgradError(_unusable(name, patterns, f"fails: {printable(reason.rpartition('Exception: ')[2])}"))


def _unusable(name: str | Path, patterns: list[str], why: str) -> str:
    shown_patterns = ", ".join(shown(pattern) for pattern in patterns[:3])
    return f"{name} cannot be used as a tokenizer: splitting by {shown_patterns} {why}"

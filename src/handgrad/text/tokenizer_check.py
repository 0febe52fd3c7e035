"""Is a tokenizer.json fit for use? It can hold programs: replacements that multiply a text, regular expressions that hang.

The parts are read before the library sees them: how many there are, how much each can lengthen a text. Regular expressions
are tried on long runs in a child process with limits of time and memory.
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

PARTS = 64  # normalizers, pre-tokenizers and decoders in one another
GROWTH = 32  # times that the replacements of one file may lengthen a text
LONGEST_WORD = 10_000  # characters that WordPiece compares with every entry
LONGEST_PATTERN = 10_000
HARMLESS = ("[\\s\\S]",)
RUN = 4_000  # characters of each trial
SECONDS, BYTES = 2, 1 << 30

TRIAL = """
import json, os, resource, sys
import tokenizers
def limit(kind, most):
    resource.setrlimit(kind, (most, most))
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
    """Raise if the tokenizer that `content` describes could fill the memory, hang or panic."""
    if not isinstance(content, dict):
        raise HandgradError(f"{name} is not a tokenizer.json: it holds {shown(content)}, not an object")
    parts = [content.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
    inside = [part for one in parts for part in _walk(one)]
    if len(inside) > PARTS:
        raise HandgradError(f"{name}: {len(inside):,} normalizers, pre-tokenizers and decoders, more than {PARTS}")
    for part in parts:
        factor = prod(_growth(one, name) for one in _walk(part))
        if factor > GROWTH:
            raise HandgradError(f"{name}: it makes a text up to {factor:,} times as long; {GROWTH} times is the limit")
    model = content.get("model")
    if isinstance(model, dict):
        _check_model(model, name)
    patterns = [pattern for part in inside for pattern in _patterns(part)]
    if any(pattern not in HARMLESS for pattern in patterns):
        _try_out(parts, patterns, name)


def _walk(part: Any) -> Iterator[dict[str, Any]]:
    """A part and all inside it. JSON from `parse_json` is not deep."""
    if isinstance(part, list):
        for one in part:
            yield from _walk(one)
    elif isinstance(part, dict):
        if "type" in part:
            yield part
        for key in ("normalizers", "pretokenizers", "decoders"):
            yield from _walk(part.get(key))


def _growth(part: dict[str, Any], name: str | Path) -> int:
    """How many characters can come of one."""
    if part["type"] == "Precompiled":
        return _longest_precompiled(part.get("precompiled_charsmap"))
    for key, value in part.items():
        if key != "content" and isinstance(value, str) and len(value) > GROWTH:
            raise HandgradError(f"{name}: {shown(part['type'])} has a {shown(key)} of {len(value):,} characters")
    content = part.get("content")
    if not isinstance(content, str):
        return 1
    # what matches the empty text is replaced between all characters as well
    empty = part.get("pattern") == {"String": ""} or bool(list(_patterns(part)))
    return max(1, len(content) + empty)


def _longest_precompiled(encoded: Any) -> int:
    """A trie, its size before it, and the texts it leads to, each ended by a zero byte."""
    try:
        raw = base64.b64decode(encoded or "")
    except (TypeError, binascii.Error):
        return 1  # the library refuses it
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


def _check_model(model: dict[str, Any], name: str | Path) -> None:
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        value = model.get(key)
        if isinstance(value, str) and len(value) > GROWTH:
            raise HandgradError(f"{name}: the {key} has {len(value):,} characters, more than {GROWTH}")
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > LONGEST_WORD:
        raise HandgradError(f"{name}: max_input_chars_per_word is {longest:,}, more than {LONGEST_WORD:,}")


def _patterns(part: dict[str, Any]) -> Iterator[str]:
    pattern = part.get("pattern")
    if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        yield pattern["Regex"]


def _try_out(parts: list[Any], patterns: list[str], name: str | Path) -> None:
    """Encode long runs of each character the patterns name, and of some others."""
    for pattern in patterns:
        if len(pattern) > LONGEST_PATTERN:
            raise HandgradError(f"{name}: a regular expression of {len(pattern):,} characters")
    signs = sorted({*"aZ1 \n.'_é東", *"".join(patterns)})[:80]
    texts = ["".join(signs), *(f"{sign * RUN}\x01{''.join(signs)}" for sign in signs), " a1.\n" * (RUN // 5)]
    small = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None,
        "normalizer": parts[0], "pre_tokenizer": parts[1], "decoder": parts[2],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }  # fmt: skip
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    asked = json.dumps([small, texts, SECONDS, BYTES]).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL], input=asked, capture_output=True, env=environment, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        raise HandgradError(_useless(name, patterns, "takes too long")) from None
    if done.returncode < 0:
        raise HandgradError(_useless(name, patterns, "takes too long or too much memory"))
    if done.returncode:
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or ["it fails"])[-1]
        raise HandgradError(_useless(name, patterns, f"fails: {printable(reason.rpartition('Exception: ')[2])}"))


def _useless(name: str | Path, patterns: list[str], why: str) -> str:
    shown_patterns = ", ".join(shown(pattern) for pattern in patterns[:3])
    return f"{name} cannot be used as a tokenizer: splitting by {shown_patterns} {why}"

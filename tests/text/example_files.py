"""Helpers for tests of fine-tuning examples: a small chat tokenizer, files of records, examples as text."""

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from rich.console import Console
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from handgrad.display.data_summary import report
from handgrad.errors import for_command_line
from handgrad.text import examples, tokenizer
from handgrad.text.chat_template import ChatTemplate
from handgrad.text.examples import Examples, Summary
from handgrad.text.tokenizer import END, Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Whither so fast? 東京 🙂"},
    {"role": "assistant", "content": "To the naïve façade.\n"},
    {"role": "user", "content": "Oh"},
    {"role": "assistant", "content": "Indeed"},
]


def chat_tokenizer() -> Tokenizer:
    """A small BPE tokenizer with an end-of-text token and the markers of CHATML."""
    inner = tokenizer.make("bpe:300", [str(TALK)] * 3).inner
    inner.add_special_tokens([AddedToken(marker, special=True) for marker in ("<|im_start|>", "<|im_end|>")])
    return Tokenizer(inner)


def sentencepiece(*words: str) -> Tokenizer:
    """Words with a sign for the space before them, and bytes for everything else, as in Llama 2. The decoder removes a
    text's first space."""
    known = [*words, *(f"<0x{b:02X}>" for b in range(256))]
    inner = tokenizers.Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(known)}, merges=[], byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return Tokenizer(inner)


CHAT = chat_tokenizer()
END_ID = CHAT.inner.token_to_id(END)
BYTES = tokenizer.make("bytes", [])


def lines(tmp_path: Path, *records: object, name: str = "d.jsonl") -> list[Path]:
    (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in records))
    return [tmp_path / name]


def read(files: list[Path], n_context: int = 1000, made: Tokenizer = CHAT, **more: Any) -> tuple[Examples, Summary]:
    return examples.read(files, made, n_context, **{"template": ChatTemplate(CHATML), **more})


def learned(found: Examples, i: int, made: Tokenizer = CHAT) -> list[tuple[str, bool]]:
    """Example i as text, in runs of targets (True) and other tokens."""
    ids, learn = found.example(i)
    cuts = [0, *(np.flatnonzero(np.diff(learn)) + 1).tolist(), len(ids)]
    return [(made.decode(ids[a:b].tolist()), bool(learn[a])) for a, b in pairwise(cuts)]


def numbered(n: int, seed: int = 0) -> Examples:
    """Example i consists of i+2 times the id i; all but the first are targets."""
    ids = np.concatenate([np.full(i + 2, i) for i in range(n)]).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum(np.arange(n) + 2)])
    learn = np.ones(len(ids), bool)
    learn[offsets[:-1]] = False
    return Examples(ids, learn, offsets, np.arange(n), seed)


def shown(found: tuple[Examples, Summary], width: int, made: Tokenizer = CHAT, colors: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colors, color_system="standard" if colors else None)
    console.print(*report(found[1], found[0], made, width, for_command_line), sep="\n")
    return out.getvalue()

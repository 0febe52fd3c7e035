"""The ids at which a model ends a text: an answer, a turn of a chat, a document.

generation_config.json   eos_token_id, one or several; without it that of config.json
tokenizer_config.json    eos_token
a GGUF file              tokenizer.ggml.eos_token_id, eot_token_id (end of turn), eom_token_id (end of message)
"""

from pathlib import Path
from typing import Any

from ..errors import MissingError
from ..files.reading import read_json
from ..gguf.file import is_gguf, open_gguf
from .tokenizer import Tokenizer


def end_ids(path: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The end-of-sequence ids of the model in a folder or GGUF file; ids outside the tokenizer's vocabulary are left out."""
    if is_gguf(path):
        metadata = open_gguf(path).metadata
        found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    else:
        found = _listed(path / "generation_config.json") or _listed(path / "config.json")
    ids = [*found, tokenizer.end]
    return frozenset(i for i in ids if type(i) is int and 0 <= i < tokenizer.n_vocab)


def _listed(file: Path) -> list[Any]:
    """eos_token_id of a JSON file as a list; empty without one."""
    try:
        found = read_json(file).get("eos_token_id")
    except MissingError:
        return []
    if found is None:
        return []
    return found if isinstance(found, list) else [found]

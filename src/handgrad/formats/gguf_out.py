"""Write a model as a GGUF file for llama.cpp and Ollama.

What the file would say is read back first, and compared with the model and with its tokenizer: a choice or a way of
splitting text that GGUF cannot express is refused before anything is written. The weights of a GGUF file are repacked
under the names and with the metadata that it has; those that are in the wanted type already are copied.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import lora
from ..errors import HandgradError, option, shown
from ..formatting import plural
from ..gguf.export import export, general
from ..gguf.file import GGUFFile, Stored, is_gguf, open_gguf
from ..gguf.model import read_model
from ..gguf.quantize import EXPERTS, FILE_TYPES, FLOATS, check_type, pack, type_for
from ..gguf.tokenizer import read_tokenizer
from ..gguf.tokenizer_export import TokenizerMetadata, tokenizer_metadata
from ..gguf.writing import REMEDY, Planned, Value, check_new, typed, write
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..ops import rotary
from ..text import chat_template, tokenizer
from ..text import format as text_format
from ..text.endings import end_ids
from ..text.tokenizer import Tokenizer
from .config_json import config_json, read_config
from .gguf_model import unpacked
from .huggingface import read_directory, stored_dtype
from .merge import open_merged
from .models import base_of, tokenizer_folder, weights_folder

_TYPE_OF = {torch.float32: "F32", torch.float64: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Texts whose ids must not change: words, contractions, digits, white space, code, accents composed or not, other scripts.
_PROBES = (
    "Hello, world!", "it's we'll I'VE they're", "1 12 123 1234567890 3.14159", "  two   three\n\n\n four\t\tfive \r\n", " x",
    "def f(a, b):\n    return a**2 != b  # ok\n", "naïve cafe\u0301 Größe", "東京 こんにちは 한국어",
    "Привет мир 🙂👩\u200d👧", "مرحبا नमस्ते", "\x00\x07\ufeff\u2028\xa0",
    "camelCase snake_case SHOUTING", "a.b/c?d=e&f#g <|x|> [PAD1]",
)  # fmt: skip


@dataclass(frozen=True)
class Written:
    """What `write_gguf` wrote."""

    bytes: int
    types: dict[str, int]  # number of tensors of each type
    notes: list[str]  # what llama.cpp does differently, and matrices of another type than was asked for


class _Source(NamedTuple):
    """A model to export."""

    config: ModelConfig
    weights: Mapping[str, Tensor]  # by Hugging Face's names
    kind: str | None  # the type of the file if none is asked for


def write_gguf(model: str, out: Path, kind: str | None = None) -> Written:
    """Write the model named `model`, with its tokenizer, to the new file `out`. An adapter is merged into its base model.

    kind   one of `gguf.quantize.TYPES` or Q4_K_M; None: as stored"""
    check_new(out)
    wanted = None if kind is None else check_type(kind)
    folder = weights_folder(model)
    if is_gguf(folder):
        return _finish(out, *_repacked(folder, wanted), [], wanted)
    base = base_of(folder) if lora.is_adapter(folder) else None
    texts = _tokenizer_path(folder)
    source = _directory(folder) if base is None else _merged(folder, base)
    wanted = wanted or source.kind
    if wanted is None:
        raise HandgradError(
            f"the weights of {base} have types that cannot be written: choose one with {option('type')}"
        )
    config, weights = source.config, source.weights
    known = tokenizer.read(texts)
    spoken = _of_base(base, known) or _tokenizer(known, config.n_vocab, end_ids(folder, known))
    _check_ids(known, spoken.metadata)
    # in float32, which is what a GGUF file has
    named, weights = _as_granite(config, weights)
    hf = {"tie_word_embeddings": config.tied, **config_json(named, torch.float32)}
    planned = export(named.table.architecture, hf, weights, spoken.metadata, wanted)
    _check_config(config, read_config(planned.config, out))
    metadata = {"general.name": typed(out.stem), **planned.metadata}
    notes = spoken.notes + _raw_notes(known) + _notes(config, planned.config)
    return _finish(out, metadata, planned.tensors, notes, wanted)


def _finish(
    out: Path, metadata: Mapping[str, Value], tensors: Mapping[str, Planned], notes: list[str], wanted: str | None
) -> Written:
    if wanted == EXPERTS and not any(tensor.kind == EXPERTS for tensor in tensors.values()):
        raise HandgradError(
            f"{option('type', wanted)} is for experts whose width is a multiple of 32, and this model has none: choose Q8_0"
        )
    write(out, metadata, tensors)
    found = [*notes, *_unpackable(tensors, wanted)]
    return Written(out.stat().st_size, dict(Counter(tensor.kind for tensor in tensors.values())), found)


def _unpackable(tensors: Mapping[str, Planned], wanted: str | None) -> list[str]:
    """Say which matrices were not written as the type asks."""
    widths = [x.shape[-1] for x in tensors.values() if x.kind == "F16" and wanted not in (None, *FLOATS)]
    if not widths:
        return []
    rows = ", ".join(map(str, sorted(set(widths))))
    return [
        f"{plural(len(widths), 'tensor')} written as F16: {wanted} packs 32 numbers of a row, and their rows have {rows}"
    ]


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _directory(folder: Path) -> _Source:
    config, weights = read_directory(folder)
    names = dict(GPT(config, device="meta").named_parameters())
    return _Source(config, {name: weights[name] for name in names}, _TYPE_OF.get(stored_dtype(folder)))


def _merged(folder: Path, base: Path) -> _Source:
    network = open_merged(folder, base, "float32").network
    weights = {name: p.detach() for name, p in network.named_parameters()}
    return _Source(network.config, weights, _file_type(base) if is_gguf(base) else _TYPE_OF.get(stored_dtype(base)))


def _as_granite(config: ModelConfig, weights: Mapping[str, Tensor]) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """MiniCPM and Granite 4 without mixtures are the network of Granite, under other names."""
    if config.family not in ("minicpm", "granitemoehybrid"):
        return config, weights
    scale = config.query_width**-0.5 if config.attention_scale is None else config.attention_scale
    found = {}
    for name, w in weights.items():
        before, inside, layer = name.partition(".shared_mlp.")
        if not inside:
            found[name] = w
        elif layer == "output_linear.weight":
            found[f"{before}.mlp.down_proj.weight"] = w
        else:
            parts = zip(("gate_proj", "up_proj"), w.chunk(2), strict=True)
            found |= {f"{before}.mlp.{part}.weight": half for part, half in parts}
    return replace(config, family="granite", attention_scale=scale), found


def _file_type(path: Path) -> str | None:
    number = open_gguf(path).metadata.get("general.file_type")
    return next((kind for kind, known in FILE_TYPES.items() if known == number), None)


def _repacked(path: Path, wanted: str | None) -> tuple[dict[str, Value], dict[str, Planned]]:
    """The metadata and tensors of a GGUF file, its matrices in another type."""
    file = read_model(path).file
    if "tokenizer.ggml.model" not in file.metadata:
        raise _no_tokenizer(path)
    metadata = _typed_metadata(file, "")
    del metadata["general.architecture"]
    metadata = {"general.architecture": typed(file.text("general.architecture")), **metadata}
    metadata.pop("general.alignment", None)  # tensors are aligned to 32 bytes again
    metadata |= general(wanted) if wanted else {}
    n_blocks = file.integer(f"{file.text('general.architecture')}.block_count")
    tied = "output.weight" not in file.tensors
    tensors = {}
    for name, stored in file.tensors.items():
        if re.fullmatch(r"blk\.\d+\.ffn_\w+\.\d+\.weight", name):
            raise HandgradError(
                f"{path} has a tensor for every expert, which llama.cpp opens no more: write a directory with"
                f" {option('out')}, and then a GGUF file of that"
            )
        kind = stored.kind
        if wanted is not None and len(stored.shape) > 1:
            kind = type_for(name, n_blocks, stored.shape, wanted, tied)
        tensors[name] = Planned(kind, stored.shape, partial(_repack, stored, kind, name))
    return metadata, tensors


def _repack(stored: Stored, kind: str, name: str) -> Tensor:
    return stored.data if stored.kind == kind else pack(unpacked(stored), kind, name)


def _typed_metadata(file: GGUFFile, prefix: str) -> dict[str, Value]:
    return {key: Value(x, *file.kinds[key]) for key, x in file.metadata.items() if key.startswith(prefix)}


# ── tokenizer ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _tokenizer_path(folder: Path) -> Path:
    path = tokenizer_folder(folder)
    if path is None or (is_gguf(path) and "tokenizer.ggml.model" not in open_gguf(path).metadata):
        raise _no_tokenizer(folder)
    return path


def _no_tokenizer(path: Path) -> HandgradError:
    return HandgradError(
        f"{path} has no tokenizer, and llama.cpp does not open a file without one: put the model's tokenizer.json into the"
        " folder"
    )


def _of_base(base: Path | None, known: Tokenizer) -> TokenizerMetadata | None:
    """The metadata of the GGUF file that an adapter was trained on, unless it has another tokenizer; the template may be the
    adapter's own."""
    if base is None or not is_gguf(base) or tokenizer.read(base).fingerprint != known.fingerprint:
        return None
    metadata = _typed_metadata(open_gguf(base), "tokenizer.")
    template = _template(known)
    return TokenizerMetadata(metadata | ({"tokenizer.chat_template": typed(template)} if template else {}), [])


def _tokenizer(known: Tokenizer, n_vocab: int, ends: frozenset[int]) -> TokenizerMetadata:
    inner = known.inner
    special = chat_template.special_tokens(known.extra_files, known.source)
    end = None if known.end is None else inner.id_to_token(known.end)
    special = special if end is None else {"eos_token": end, **special}
    return tokenizer_metadata(inner, n_vocab, special, ends, _template(known))


def _template(known: Tokenizer) -> str | None:
    if not chat_template.has_template(known.extra_files):
        return None
    return chat_template.of_files(known.extra_files, known.source).source


def _raw_notes(known: Tokenizer) -> list[str]:
    if text_format.recorded(known) != "raw" or not chat_template.has_template(known.extra_files):
        return []
    return [
        "the model was fine-tuned on raw text: let llama.cpp complete a prompt (llama-completion, /completion), not chat"
    ]


def _check_ids(known: Tokenizer, metadata: Mapping[str, Value]) -> None:
    """Raise if the tokenizer that the metadata describe gives other ids."""
    content = {key: value.content for key, value in metadata.items()}
    written = Tokenizer(*read_tokenizer(GGUFFile(Path("the file to write"), content, {})))
    added = [token.content for _, token in sorted(known.inner.get_added_tokens_decoder().items())]
    for text in (*_PROBES, *(f"a{token} b" for token in added)):
        try:
            ids = known.encode(text)
        except HandgradError:  # it has no token for some character
            continue
        found = written.encode(text)
        if ids != found:
            raise HandgradError(
                f"a GGUF file cannot hold this tokenizer: the ids of {shown(text)} would be {found[:12]}, not {ids[:12]};"
                f" {REMEDY}"
            )


# ── configuration ───────────────────────────────────────────────────────────────────────────────────────────────────


def _check_config(wanted: ModelConfig, found: ModelConfig) -> None:
    """Raise if the file would describe another model, beyond the rounding of numbers to float32."""
    ours, theirs = _choices(wanted), _choices(found)
    for name, value in ours.items():
        if value != theirs[name]:
            raise HandgradError(
                f"a GGUF file cannot hold {name}={shown(value)} of this model: llama.cpp would compute with"
                f" {shown(theirs[name])}; {REMEDY}"
            )


def _choices(config: ModelConfig) -> dict[str, Any]:
    """What a model computes, independently of how its configuration says it."""
    found = {f.name: getattr(config, f.name) for f in fields(config)}
    found |= {
        "d_hidden": config.hidden_width, "d_rho": config.query_width, "d_head": config.value_width,
        "n_kv_heads": config.kv_heads, "windowed": [config.window_of(i) is not None for i in range(config.n_blocks)],
    }  # fmt: skip
    if config.positions == "rotary":
        of = partial(rotary.frequencies, config.rotary_width_of_head, dtype=torch.float64)
        tables = [[of(x.base, x.scaling, long=long) for long in (False, True)] for x in config.rotary_tables()]
        used = [table for i in range(config.n_blocks) for table in tables[config.rotary_table_of(i)]]
        found["rope_scaling"] = [[_rounded(x) for x in (*theta.tolist(), factor)] for theta, factor in used]
        found["rotary_width"] = config.rotary_width_of_head
    scale = config.attention_scale
    found["attention_scale"] = config.query_width**-0.5 if scale is None else scale
    del found["family"], found["rope_base"], found["local_rope_base"]
    return {name: _rounded(x) if isinstance(x, float) else x for name, x in found.items()}


def _rounded(x: float) -> float:
    """To five digits: float32 has seven, of which a power of a rounded base loses some."""
    return float(np.format_float_positional(x, 5, fractional=False))


def _notes(config: ModelConfig, read: Mapping[str, Any]) -> list[str]:
    """What llama.cpp computes otherwise for this architecture."""
    notes = []
    ignored = read["model_type"] in ("mistral", "mixtral", "phi3", "starcoder2")
    if ignored and config.window is not None and config.window < config.n_context:
        notes.append(
            f"llama.cpp computes this architecture without a window: texts beyond {config.window:,} tokens differ"
        )
    if read["model_type"] == "gpt_neox":
        notes.append("llama.cpp computes GELU by its tanh form in this architecture: logits differ in the third digit")
    if read["model_type"] == "gpt_oss" and config.rope_scaling.rope_type == "yarn":
        notes.append(
            "llama.cpp begins and ends the blend of yarn's frequencies at whole features, and this model does not"
        )
    if config.rope_scaling.rope_type == "longrope":
        n = config.rope_scaling.original_max_position_embeddings
        notes.append(
            f"llama.cpp takes the frequencies of long texts if its context (-c) has more than {n:,} tokens, not the text"
        )
    return notes

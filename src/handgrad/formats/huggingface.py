"""Read and write Hugging Face model directories: config.json and model.safetensors. Writing is atomic."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import HandgradError, MissingError
from ..families import full_name
from ..files import manifest
from ..files.atomic import write_folder
from ..files.reading import read_bytes, read_json
from ..files.tensors import Header, missing_weights, read_headers, read_tensors
from ..gguf.file import is_gguf
from ..gguf.model import read_model
from ..lora.injection import adapters_of
from ..model.config import ModelConfig
from ..model.dtype import DTYPES, STORED_DTYPES, as_dtype
from ..model.gpt import GPT
from ..model.storage.packed import Packed
from ..model.storage.weights import Scratch
from ..text.endings import end_ids
from ..text.tokenizer import FORMAT
from .config_json import QUANTIZED, config_json, read_config
from .stacked_experts import name_in_files, split_headers, split_tensors, stack_tensors

GENERATION = "generation_config.json"
# Files that handgrad and transformers write next to config.json: weights and training state, tokenizer and chat template.
_WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors", "pytorch_model*.bin",
    "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "adapter_config.json", "adapter_model.*",
    "handgrad-merge.safetensors", "optimizer.safetensors", "training.json", "optimizer.pt", "scheduler.pt", "rng_state*.pth",
    "trainer_state.json", "training_args.bin",
)  # fmt: skip
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "additional_chat_templates",
    GENERATION, FORMAT,
)  # fmt: skip
_MAX_SHARDS = 1000
TWO_BYTES = {torch.bfloat16: "BF16", torch.float16: "F16"}


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    base_dtype: torch.dtype | str | None = None,
) -> GPT:
    """Load a directory with config.json and model.safetensors, in its stored dtype unless another is given.

    The file is memory-mapped: a weight that keeps its dtype and device uses memory only once it is read or changed, and
    the file itself never changes.

    base_dtype   keep matrices in this dtype of two bytes, frozen, and compute in `dtype` (default: float32)"""
    folder = Path(path)
    dtype = None if dtype is None else as_dtype(dtype)
    kept = None if base_dtype is None else as_dtype(base_dtype, tuple(TWO_BYTES), "base_dtype")
    config, tensors = read_directory(folder)
    stored = tensors[f"{config.table.names['embed']}.weight"].dtype
    dtype = dtype or (stored if stored in DTYPES and kept is None else torch.float32)
    weights: dict[str, Tensor | Packed] = dict(tensors)
    if kept is not None:
        weights = {name: Packed.of(t, TWO_BYTES[kept]) if t.ndim == 2 else t for name, t in tensors.items()}
    model = build(config, weights, dtype, device)
    model.source = str(folder.absolute())
    return model


def read_directory(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the tensors of a directory, memory-mapped and checked."""
    config = load_config(folder)
    manifest.check_present(folder)
    names = config.table.names
    head_name, embed_name = f"{names['head']}.weight", f"{names['embed']}.weight"
    headers = {full_name(name): header for name, header in _headers(folder).items()}
    matrices = split_headers(headers, config)
    _check_tensors(replace(config, tied=head_name not in headers), matrices, folder)
    tensors = split_tensors({full_name(name): t for name, t in _weights(headers).items()}, config.table)
    head = tensors.get(head_name)  # the file decides, not config.json
    tied = head is None or (config.tied and torch.equal(head, tensors[embed_name]))
    return replace(config, tied=tied), tensors


def build(
    config: ModelConfig,
    weights: dict[str, Tensor | Packed],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> GPT:
    """A model with these weights by Hugging Face's names. If matrices are packed, everything is frozen."""
    model = GPT(config, device="meta")
    for name, _ in list(model.named_parameters()):
        path, _, kind = name.rpartition(".")
        owner, found = model.get_submodule(path), weights[name]
        if isinstance(found, Packed):
            owner.pack(found, dtype)  # type: ignore[operator]
            model.scratch = model.scratch or Scratch()
        else:
            trains = getattr(owner, kind).requires_grad
            setattr(owner, kind, torch.nn.Parameter(found.to(device=device, dtype=dtype), trains))
    if config.tied:
        model.tie()
    if model.packed:
        model.requires_grad_(False)
    return model


def _check_tensors(config: ModelConfig, headers: dict[str, Header], folder: Path) -> None:
    """Check the tensors' names and shapes before the model is built."""
    outside: dict[str, tuple[int, ...]] = {}
    kinds: dict[tuple[bool, bool], dict[str, tuple[int, ...]]] = {}
    first, every = (f"{config.table.names['blocks']}.{i}." for i in (0, "{}"))
    kind_of = [(not config.sparse_block(i), i in config.conv_blocks) for i in range(config.n_blocks)]
    for dense, conv in {*kind_of}:  # a block of each kind
        alone, conv_blocks = (0,) if dense and config.n_experts is not None else (), (0,) if conv else ()
        of_one = replace(config, n_blocks=1, unrotated=(), windowed=None, dense=alone, conv_blocks=conv_blocks)
        one = GPT(of_one, device="meta")
        shapes = {name: tuple(p.shape) for name, p in one.named_parameters()}
        outside = {name: shape for name, shape in shapes.items() if not name.startswith(first)}
        kinds[dense, conv] = {name.removeprefix(first): shapes[name] for name in shapes if name.startswith(first)}

    def expected() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from outside.items()
        for i in range(config.n_blocks):
            for name, shape in kinds[kind_of[i]].items():
                yield every.format(i) + name, shape

    table = config.table
    names = {name for name, _ in expected()}
    missing = sorted({name_in_files(name, table) for name in names - set(headers)})
    if missing:
        total = len({name_in_files(name, table) for name in names})
        raise HandgradError(f"{folder}: no tensor {missing[0]!r} ({len(missing)} of {total} are missing)")
    unknown = sorted(name for name in set(headers) - names if not re.fullmatch(config.table.extra_tensors, name))
    if unknown:
        raise HandgradError(
            f"{folder}: {unknown[0]!r} is not a tensor of the model that config.json describes ({len(unknown)} such)"
        )
    for name, shape in expected():
        found = headers[name]
        if found.shape != shape:
            raise HandgradError(
                f"{folder}: {name_in_files(name, table)} has shape {found.shape}; config.json requires {shape}"
            )
        if not found.dtype.is_floating_point:
            raise HandgradError(f"{folder}: {name} holds {found.dtype}, not floating-point numbers")


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of a directory's weights; float32 for a GGUF file, which is unpacked."""
    if is_gguf(folder):
        return torch.float32
    found = [header.dtype for header in _headers(folder).values() if header.dtype.is_floating_point]
    if not found:
        raise HandgradError(f"{folder}: all tensors are missing")
    return found[0]


def _headers(folder: Path) -> dict[str, Header]:
    """Headers of the tensors in model.safetensors, or in the shards that model.safetensors.index.json lists."""
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    try:
        return read_headers(file)
    except MissingError:
        try:
            raw = read_json(index)
        except MissingError:
            raise missing_weights(file) from None
    shard_of = raw.get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(x, str) for x in shard_of.values()):
        raise HandgradError(f"{index}: weight_map from tensors to files is missing")
    shards = list(dict.fromkeys(shard_of.values()))
    if len(shards) > _MAX_SHARDS:
        raise HandgradError(f"{index} lists {len(shards):,} files; at most {_MAX_SHARDS:,} are read")
    headers: dict[str, Header] = {}
    for name in shards:
        if Path(name).name != name:
            raise HandgradError(f"{index}: {name!r} is not a file name in the same folder")
        found = read_headers(folder / name)
        twice = sorted(set(found) & set(headers))
        if twice:
            raise HandgradError(f"{folder}: {twice[0]!r} is in {headers[twice[0]].file.name} and in {name}")
        headers |= found
    missing = sorted(set(shard_of) - set(headers))
    if missing:
        raise HandgradError(f"{folder}: {missing[0]!r} is not in {shard_of[missing[0]]}, where the index lists it")
    return headers


def _weights(headers: dict[str, Header]) -> dict[str, Tensor]:
    """The tensors, memory-mapped."""
    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(header.file for header in headers.values()):
        tensors |= read_tensors(file)
    return tensors


def load_config(folder: Path, **instead: Any) -> ModelConfig:
    """The configuration of the model in a directory, with other fields of config.json in the place of its own."""
    file = folder / "config.json"
    if not os.path.isdir(folder):
        raise HandgradError(f"{folder} is not a directory: give a preset's name or a folder with config.json")
    try:
        raw = read_json(file)
    except MissingError:
        raise HandgradError(f"{folder} has no config.json: it is not a model directory") from None
    return read_config({**raw, **instead}, file)


def save(
    model: GPT, path: str | Path, *, dtype: torch.dtype | str | None = None, shard_bytes: int | None = None
) -> None:
    """Write the model and its tokenizer, atomically, as a directory that `transformers` opens, unless its config.json cannot
    express it.

    An existing model directory is replaced together with its tokenizer, chat template, generation settings and adapter,
    which belong to the old model; if this model was loaded from that directory, they stay. Other files (README.md) always
    stay.

    dtype         dtype to store, float16 included (default: the model's own)
    shard_bytes   write several files of at most this size, with an index
    """
    folder = Path(path)
    _check_saveable(model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not (folder / "config.json").exists():
        raise HandgradError(f"{folder} exists and is not a model directory: choose another path")
    stored = None if dtype is None else as_dtype(dtype, STORED_DTYPES)
    own = bool(model.source) and Path(model.source).resolve() == folder.resolve()

    def fill(partial: Path) -> None:
        write_model(model, partial, stored, shard_bytes)
        if not own:
            _write_tokenizer(model, partial)
        manifest.write(partial)

    write_folder(folder, fill, stale=_WEIGHT_FILES if own else _WEIGHT_FILES + _TOKENIZER_FILES)


def _write_tokenizer(model: GPT, folder: Path) -> None:
    """Write the model's tokenizer, if it has one, with the settings of generation that belong to it."""
    source = Path(model.text_source)
    if model.text_source and not source.exists():
        return  # it has gone with the folder that the model was loaded from
    found = model.tokenizer
    if found is None:
        return
    found.write(folder)
    generation: dict[str, Any] = {}
    with contextlib.suppress(MissingError, NotADirectoryError):
        generation = read_json(Path(model.source) / GENERATION)
    ends = [end_ids(path, found) for path in {source, Path(model.source)} if model.text_source and model.source]
    if any(ends):
        generation["eos_token_id"] = sorted(frozenset().union(*ends))
        (folder / GENERATION).write_text(json.dumps(generation, indent=2) + "\n")


def write_model(
    model: GPT,
    folder: Path,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    like: Path | None = None,
) -> None:
    """Write config.json and model.safetensors into a new folder. Other fields of the config.json in `like`, and its
    generation settings, are copied."""
    _check_saveable(model)
    if dtype is not None:
        as_dtype(dtype, STORED_DTYPES)
    tensors = {name: p.detach().to(dtype or p.dtype).contiguous() for name, p in model.named_parameters()}
    tensors = stack_tensors(tensors, model.config.table)
    for name, t in tensors.items():
        if dtype == torch.float16 and not torch.isfinite(t).all():
            raise HandgradError(f"{name} has values that float16 cannot represent: choose bfloat16 or float32")
    shards = _shards(tensors, shard_bytes)
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        shard_of = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": shard_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = config_json(model.config, next(iter(tensors.values())).dtype)
    if like is not None:
        before = read_model(like).config if is_gguf(like) else read_json(like / "config.json")
        existing = {name: x for name, x in before.items() if name not in ("torch_dtype", "handgrad", QUANTIZED)}
        ends = ("bos_token_id", "eos_token_id", "pad_token_id")
        config = existing | {name: x for name, x in config.items() if name not in ends or name not in existing}
        with contextlib.suppress(MissingError, NotADirectoryError):
            generation = read_bytes(like / GENERATION)
            (folder / GENERATION).write_bytes(generation)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _shards(tensors: dict[str, Tensor], limit: int | None) -> dict[str, list[str]]:
    """Assign tensors to files: in order, as many as fit, at least one per file."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        if limit is not None and groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _check_saveable(model: GPT) -> None:
    if model.packed:
        raise HandgradError(
            "the weights are packed, and only adapters can be saved: load it without packed=True or bits"
        )
    adapted = list(adapters_of(model))
    if adapted:
        raise HandgradError(f"{adapted[0]} has an adapter: merge or remove the adapters before saving the model")

"""Hugging Face directories of GPT-2 models: config.json and model.safetensors, both ways, written atomically."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import manifest
from .config import GPTConfig
from .errors import HandgradError
from .files import write_folder
from .gpt import DTYPES, GPT, as_dtype
from .layers import LoRA

_ACTIVATION = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_HF_ACTIVATION = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
_HARMLESS = r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight"  # masks that old files store; a tied head stored twice
_OLD_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
# what a config.json of ours says beyond Hugging Face's fields; absent means GPT-2's way
_OWN = ("d_rho", "d_head", "logits_bias", "key_bias", "causal")


def load(path: str | Path, *, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None) -> GPT:
    """A model from a directory with config.json and model.safetensors, in the dtype it was stored in unless given.

    The file is mapped into memory, not read: a weight that keeps its dtype and device costs memory only where it is used
    or changed, and the file itself never changes."""
    folder = Path(path)
    dtype = None if dtype is None else as_dtype(dtype)
    config = load_config(folder)
    manifest.check_present(folder)
    tensors = {name.removeprefix("transformer."): t for name, t in _weights(folder).items()}
    if "wte.weight" in tensors:  # what is stored counts, whatever config.json says
        head = tensors.get("lm_head.weight")
        config = replace(config, tied=head is None or (config.tied and torch.equal(head, tensors["wte.weight"])))
    model = GPT(config, device="meta")
    expected = {name.removeprefix("transformer."): (name, p) for name, p in model.named_parameters()}
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise HandgradError(f"{folder}: no tensor {missing[0]!r} ({len(missing)} of {len(expected)} are missing)")
    strange = sorted(name for name in set(tensors) - set(expected) if not re.fullmatch(_HARMLESS, name))
    if strange:
        raise HandgradError(
            f"{folder}: {strange[0]!r} is not a tensor of the model that config.json describes ({len(strange)} such)"
        )
    stored = tensors["wte.weight"].dtype
    dtype = dtype or (stored if stored in DTYPES else torch.float32)
    for short, (name, p) in expected.items():
        found = tensors.pop(short)
        if found.shape != p.shape:
            raise HandgradError(f"{folder}: {short} is {tuple(found.shape)}, config.json wants {tuple(p.shape)}")
        if not found.is_floating_point():
            raise HandgradError(f"{folder}: {short} holds {found.dtype}, not floating-point numbers")
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(found.to(device=device, dtype=dtype)))
    if config.tied:
        model.tie()
    model.source = str(folder.absolute())
    return model


def stored_dtype(folder: Path) -> torch.dtype:
    """What a directory's weights are stored in."""
    dtype: torch.dtype = next(iter(_weights(folder).values())).dtype
    return dtype


def _weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, or of the shards that model.safetensors.index.json lists."""
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if file.exists() or not index.exists():
        return read_tensors(file)
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise HandgradError(f"{index}: there is no weight_map from tensors to files")
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(places.values()):
        if Path(name).name != name:
            raise HandgradError(f"{index}: {name!r} is not a file beside it")
        tensors |= read_tensors(folder / name)
    missing = sorted(set(places) - set(tensors))
    if missing:
        raise HandgradError(f"{folder}: {missing[0]!r} is not in {places[missing[0]]}, where the index has it")
    return tensors


def load_config(folder: Path) -> GPTConfig:
    """The shape of the model in a directory."""
    file = folder / "config.json"
    if not folder.is_dir():
        raise HandgradError(f"{folder} is not a directory: give a preset's name or a folder with config.json")
    if not file.exists():
        raise HandgradError(f"{folder} has no config.json: it is not a model directory")
    raw = read_json(file)
    if raw.get("model_type") not in ("gpt2", "handgrad"):
        raise HandgradError(f"{file}: model_type is {raw.get('model_type')!r}; this version reads 'gpt2'")
    for field, only in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if raw.get(field, only) != only:
            raise HandgradError(f"{file}: {field} is {raw[field]}; only {only} is supported")
    activation = raw.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATION:
        raise HandgradError(f"{file}: activation_function {activation!r} is not one of {', '.join(_ACTIVATION)}")
    own = raw.get("handgrad", {})
    if not isinstance(own, dict) or not set(own) <= set(_OWN):
        raise HandgradError(f"{file}: 'handgrad' may hold {', '.join(_OWN)}, not {own!r}")
    try:
        return GPTConfig(
            n_vocab=raw["vocab_size"],
            n_context=raw.get("n_positions", 1024),
            d_model=raw["n_embd"],
            n_heads=raw["n_head"],
            n_blocks=raw["n_layer"],
            d_hidden=raw.get("n_inner"),
            activation=_ACTIVATION[activation],
            eps=raw.get("layer_norm_epsilon", 1e-5),
            tied=raw.get("tie_word_embeddings", True),
            **own,
        )
    except KeyError as missing:
        raise HandgradError(f"{file} has no field {missing}") from None
    except HandgradError as mistake:
        raise HandgradError(f"{file}: {mistake}") from None


def save(
    model: GPT, path: str | Path, *, dtype: torch.dtype | str | None = None, shard_bytes: int | None = None
) -> None:
    """Write the model as a directory that `transformers` opens, if it is a GPT-2 and not something only we can express.
    Whole or not at all; other files of a model directory that is there already stay.

    dtype         to store the weights in, float16 as well; the model's own unless given
    shard_bytes   in several files of at most this size, with an index
    """
    folder = Path(path)
    _check_saveable(model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not (folder / "config.json").exists():
        raise HandgradError(f"{folder} exists and is not a model directory: choose another place")
    stored = None if dtype is None else as_dtype(dtype, (*DTYPES, torch.float16))

    def fill(partial: Path) -> None:
        write_model(model, partial, stored, shard_bytes)
        manifest.write(partial)

    write_folder(folder, fill, stale=_OLD_WEIGHTS)


def write_model(
    model: GPT,
    folder: Path,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    like: Path | None = None,
) -> None:
    """config.json and model.safetensors, into a folder that nobody reads yet. What the directory `like` says of a model
    beyond its shape, and how it generates, comes along."""
    _check_saveable(model)
    if dtype not in (None, torch.float16, *DTYPES):
        raise HandgradError(f"weights are stored in float64, float32, bfloat16 or float16, not {dtype}")
    tensors = {name: p.detach().to(dtype or p.dtype).contiguous() for name, p in model.named_parameters()}
    for name, t in tensors.items():
        if dtype == torch.float16 and not torch.isfinite(t).all():
            raise HandgradError(f"{name} has numbers that float16 cannot hold: choose bfloat16 or float32")
    shards = _shards(tensors, shard_bytes)
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        places = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = _hf_config(model.config, tensors)
    if like is not None:
        said = {
            name: x for name, x in read_json(like / "config.json").items() if name not in ("torch_dtype", "handgrad")
        }
        ends = ("bos_token_id", "eos_token_id", "pad_token_id")
        config = said | {name: x for name, x in config.items() if name not in ends or name not in said}
        if (like / "generation_config.json").exists():
            shutil.copyfile(like / "generation_config.json", folder / "generation_config.json")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _shards(tensors: dict[str, Tensor], limit: int | None) -> dict[str, list[str]]:
    """Which tensors go into which file: in order, as many as fit, at least one."""
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
    adapted = [name for name, layer in model.named_modules() if isinstance(layer, LoRA)]
    if adapted:
        raise HandgradError(
            f"{adapted[0]} has an adapter beside it: merge or remove the adapters before saving the model"
        )


def _hf_config(config: GPTConfig, tensors: dict[str, Tensor]) -> dict[str, object]:
    own = {name: getattr(config, name) for name in _OWN if getattr(config, name) != getattr(GPTConfig(), name)}
    return {
        # what GPT-2 cannot express must not be opened as if it were one
        **({"model_type": "handgrad"} if own else {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}),
        "vocab_size": config.n_vocab,
        "n_positions": config.n_context,
        "n_embd": config.d_model,
        "n_head": config.n_heads,
        "n_layer": config.n_blocks,
        "n_inner": config.d_hidden,
        "activation_function": _HF_ACTIVATION[config.activation],
        "layer_norm_epsilon": config.eps,
        "tie_word_embeddings": config.tied,
        # GPT-2's own, where its vocabulary is GPT-2's; otherwise the tokenizer and generation_config.json know
        **({} if config.n_vocab >= 50257 else {"bos_token_id": None, "eos_token_id": None}),
        "dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        **({"handgrad": own} if own else {}),
    }


def read_json(file: Path) -> dict[str, Any]:
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as reason:
        raise HandgradError(f"{file} cannot be read: {reason.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as reason:
        raise HandgradError(f"{file} is not valid JSON: {reason}") from None
    if not isinstance(raw, dict):
        raise HandgradError(f"{file} must hold a JSON object, not a {type(raw).__name__}")
    return raw


def read_tensors(file: Path) -> dict[str, Tensor]:
    if not file.exists():
        unsafe = sorted(other.name for other in file.parent.glob("*.bin"))
        why = "weights are missing"
        if unsafe:
            why = f"{unsafe[0]} could run code when it is read; convert it to safetensors, with save_pretrained"
        raise HandgradError(f"{file} does not exist: {why}")
    try:
        with safe_open(file, "pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as reason:
        raise HandgradError(f"{file} cannot be read: {reason}") from None

"""A model as a GGUF file has it: metadata and tensors by the same tables as `model.py` reads them, the other way round.

Metadata are the fields of config.json under GGUF's keys. `describe` reads them back before anything is written, and
`formats.gguf_out` compares the result with the model: what a key is missing for is refused, never left out.
"""

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import HandgradError
from .architectures import ARCHITECTURES, Architecture, by_head_order, interleaved_order
from .file import GGUFFile, Stored
from .model import describe, expected
from .quantize import FILE_TYPES, pack, type_for
from .writing import REMEDY, Planned, Value, typed

# Fields of config.json by GGUF's keys under the architecture's name.
_KEYS = {
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("context_length",), "n_positions": ("context_length",),
    "hidden_size": ("embedding_length",), "n_embd": ("embedding_length",),
    "intermediate_size": ("feed_forward_length",), "n_inner": ("feed_forward_length",),
    "num_hidden_layers": ("block_count",), "n_layer": ("block_count",),
    "num_attention_heads": ("attention.head_count",), "n_head": ("attention.head_count",),
    "num_key_value_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length", "attention.value_length", "rope.dimension_count"),
    "conv_L_cache": ("shortconv.l_cache",),
    "layer_norm_epsilon": ("attention.layer_norm_epsilon",),
    "sliding_window": ("attention.sliding_window",),
}  # fmt: skip
_SCALING = {
    "rope_type": "type", "factor": "factor", "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "attn_factor",
}  # fmt: skip


class Exported(NamedTuple):
    """A model as a GGUF file has it, before its weights are packed."""

    config: dict[str, Any]  # what reading the file gives
    metadata: dict[str, Value]
    tensors: dict[str, Planned]


def architecture_of(model_class: str) -> tuple[str, Architecture]:
    """GGUF's name of the architecture that this class of transformers has, and its table."""
    tables = [(name, x) for name, table in ARCHITECTURES.items() for x in (table, table.mixture) if x is not None]
    known = {x.model_class: (name, x) for name, x in reversed(tables)}
    known |= {x.windowed[0]: (name, x) for name, x in tables if x.windowed is not None}
    if model_class not in known:
        raise HandgradError(f"a GGUF file has no known names for {model_class}, only for {', '.join(known)}: {REMEDY}")
    return known[model_class]


def export(
    model_class: str,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokenizer: Mapping[str, Value],
    wanted: str,
) -> Exported:
    """Plan a file of the type `wanted` with these weights by Hugging Face's names, a config.json and the metadata of a
    tokenizer."""
    name, architecture = architecture_of(model_class)
    heads = config.get("num_attention_heads") or 0
    head_width = config.get("head_dim") or (config["hidden_size"] // heads if heads else 0)
    config = {**config, "head_dim": head_width} if heads else config
    ordered = _ordered(architecture, config, weights)
    metadata = {"general.architecture": typed(name), "general.type": typed("model")}
    metadata |= {**general(wanted), **_metadata(name, architecture, config), **tokenizer}
    tensors: dict[str, Planned] = {}
    shapes: dict[str, Stored] = {}
    for gguf_name, place in ordered.items():
        ws = [(hf_name, _without_ones(weights[hf_name], place.sizes)) for hf_name in place.names]
        shape = tuple(ws[0][1].shape)[::-1] if _is_transposed(architecture, place.layer, ws[0][1]) else ws[0][1].shape
        shape = (len(ws), *shape) if "*" in place.name else tuple(shape)
        kind = type_for(gguf_name, _blocks(config), shape, wanted, "output.weight" not in ordered)
        tensors[gguf_name] = Planned(kind, shape, partial(_packed, architecture, place.layer, ws, head_width, kind))
        shapes[gguf_name] = Stored("F32", shape, torch.empty(0, dtype=torch.uint8))
    for table, x in _frequencies(config).items():
        shapes[table] = Stored("F32", tuple(x.shape), x.view(torch.uint8))
        tensors[table] = Planned("F32", tuple(x.shape), partial(x.view, torch.uint8))
    _check_opens(architecture, name, tensors, config)
    content = {key: value.content for key, value in metadata.items()}
    places = {gguf_name: (place.name, shapes[gguf_name].shape) for gguf_name, place in ordered.items()}
    return Exported(_read_back(GGUFFile(Path("its metadata"), content, shapes), places), metadata, tensors)


def _read_back(file: GGUFFile, places: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """The config.json that our reader makes of a file. Raise unless it looks for the tensors in these places: GGUF's name,
    Hugging Face's name and shape."""
    try:
        architecture, config, sizes = describe(file)
    except HandgradError as mistake:
        raise HandgradError(f"a GGUF file cannot hold this model: {mistake.message}; {REMEDY}") from None
    read = {gguf_name: (hf_name, shape) for gguf_name, hf_name, shape, _ in expected(architecture, config, sizes)}
    for gguf_name, place in places.items():
        if read.pop(gguf_name, None) != place:
            raise HandgradError(
                f"a GGUF file of a {architecture.model_class} has no place for {place[0]} of this shape: {REMEDY}"
            )
    for hf_name, _ in read.values():
        raise HandgradError(
            f"a GGUF file of a {architecture.model_class} needs {hf_name}, which this model does not have"
        )
    return config


def _check_opens(
    architecture: Architecture, name: str, tensors: Mapping[str, Planned], config: Mapping[str, Any]
) -> None:
    """Raise for a file that our reader opens and llama.cpp does not."""
    unread = [tensor for tensor in tensors if re.fullmatch(architecture.unread, tensor)]
    if unread:
        raise HandgradError(f"llama.cpp opens no file of the architecture {name} with {unread[0]}: {REMEDY}")
    if architecture.own_head and "output.weight" not in tensors:
        raise HandgradError(
            f"llama.cpp opens no file of the architecture {name} without output.weight, and this model's head is its"
            f" token embedding: {REMEDY}"
        )
    widths = [
        x.shape for tensor, x in tensors.items() if tensor.endswith("attn_output.weight") and architecture.whole_width
    ]
    d, queries = widths[0] if widths else (0, 0)  # no block of attention has other widths
    if queries != d:
        raise HandgradError(
            f"llama.cpp opens a file of the architecture {name} only if all heads together are as wide as the model,"
            f" and they have {queries} and {d} features: {REMEDY}"
        )
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if architecture.ungrouped and heads != kv_heads:
        raise HandgradError(
            f"llama.cpp opens a file of the architecture {name} only if every head of queries has keys of its own, and"
            f" {heads} heads share {kv_heads}: {REMEDY}"
        )
    groups = config.get("n_group", 1)
    if groups > 1 and config["topk_group"] >= groups:
        raise HandgradError(
            f"llama.cpp opens no file whose tokens choose among all {groups} groups of experts: set n_group and topk_group"
            " to 1 in config.json, which is the same"
        )
    taps = [x.shape[1] for tensor, x in tensors.items() if tensor.endswith("shortconv.conv.weight")]
    if name == "lfm2" and max(taps, default=0) < 2:
        raise HandgradError(
            f"llama.cpp opens a file of the architecture lfm2 only with a convolution of two taps or more: {REMEDY}"
        )


def general(wanted: str) -> dict[str, Value]:
    """What a file says about the type of its weights."""
    return {"general.file_type": typed(FILE_TYPES[wanted]), "general.quantization_version": typed(2)}


def _metadata(name: str, architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Value]:
    """The fields of config.json and the scaling of its rotary positions under GGUF's keys."""
    found: dict[str, Any] = {}
    fields = {**_KEYS, architecture.eps[1]: (architecture.eps[0],)}
    for key, field in architecture.keys.items():
        fields[field] = (*fields.get(field, ()), key)
    for field, keys in fields.items():
        if config.get(field) is not None:
            found |= {f"{name}.{key}": config[field] for key in keys}
    found |= {f"{name}.{key}": value for key, value in architecture.constants.items()}
    if "conv_L_cache" in config:  # blocks with a short convolution have no keys
        heads = config["num_key_value_heads"]
        kv = [0 if kind == "conv" else heads for kind in config["layer_types"]]
        found[f"{name}.attention.head_count_kv"] = kv
    rope, local = _rope(config), (config.get("rope_parameters") or {}).get("sliding_attention")
    if "rope_theta" in rope:
        found[f"{name}.rope.freq_base"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        found[f"{name}.rope.dimension_count"] = int(config["head_dim"] * rope["partial_rotary_factor"])
    if local is not None and architecture.local_base not in (None, 0, local["rope_theta"]):
        found[f"{name}.rope.freq_base_swa"] = local["rope_theta"]
    if rope.get("rope_type", "default") not in ("default", "llama3"):  # that one has a table of frequencies
        for field, key in _SCALING.items():
            if rope.get(field) is not None:
                found[f"{name}.rope.scaling.{key}"] = rope[field]
    if rope.get("rope_type") == "longrope":  # two tables of frequencies
        del found[f"{name}.rope.scaling.type"]
        found.pop(f"{name}.rope.scaling.factor", None)
        found[f"{name}.rope.scaling.attn_factor"] = _longrope_factor(rope)
    windowed = [kind == "sliding_attention" for kind in config.get("layer_types") or ()]
    if architecture.pattern and windowed != [bool((i + 1) % architecture.pattern) for i in range(len(windowed))]:
        found[f"{name}.attention.sliding_window_pattern"] = windowed
    reals = ("epsilon", "freq_base", "freq_base_swa", "factor", "beta_fast", "beta_slow", "scale", "softcapping")
    return {key: typed(float(x) if key.endswith(reals) else x) for key, x in found.items()}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary positions, of blocks without a window if others have their own."""
    nested = config.get("rope_parameters") or {}
    rope = nested.get("full_attention", nested)
    if rope or "rope_theta" not in config:
        return dict(rope)
    return {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}


def _longrope_factor(rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor, n = rope.get("factor") or 1.0, rope["original_max_position_embeddings"]
    return math.sqrt(1 + math.log(factor) / math.log(n)) if factor > 1 else 1.0


def _frequencies(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """What divides the frequencies θ_i: longrope's factors, or in llama3's scaling 1/((1 − s_i)/f + s_i) with s_i =
    (n θ_i/2π − low)/(high − low) clamped to [0, 1]."""
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{x}.weight": torch.tensor(rope[f"{x}_factor"]).float() for x in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    low, high, factor = (rope[f"{name}factor"] for name in ("low_freq_", "high_freq_", ""))
    theta = rope["rope_theta"] ** (-torch.arange(0, config["head_dim"], 2, dtype=torch.float64) / config["head_dim"])
    turns = rope["original_max_position_embeddings"] * theta / (2 * math.pi)
    s = ((turns - low) / (high - low)).clamp(0, 1)
    divisors: Tensor = 1 / ((1 - s) / factor + s)
    return {"rope_freqs.weight": divisors.float()}


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _blocks(config: Mapping[str, Any]) -> int:
    return int(config.get("num_hidden_layers") or config["n_layer"])


class _Place(NamedTuple):
    """The tensors of a model that a file holds in one."""

    layer: str
    name: str  # Hugging Face's, with a * for the number of an expert
    names: list[str]  # of every expert, or itself
    sizes: tuple[str, ...]


def _ordered(architecture: Architecture, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, _Place]:
    """By GGUF's name of every tensor."""
    groups = [("", "", architecture.outer)]
    groups += [(f"blk.{i}.", f"{architecture.blocks}.{i}.", architecture.block) for i in range(_blocks(config))]
    n_experts = config.get(architecture.keys.get("expert_count", ""), 0)
    found: dict[str, _Place] = {}
    for prefix, hf_prefix, layers in groups:
        for layer, table in layers.items():
            for kind, name, sizes in table.tensors(with_bias=True):
                hf_name = hf_prefix + name
                names = [hf_name.replace("*", str(e)) for e in range(n_experts)] if "*" in name else [hf_name]
                if names[0] in weights:
                    found[f"{prefix}{layer}.{kind}"] = _Place(layer, hf_name, names, sizes)
    unknown = sorted({*weights} - {hf_name for place in found.values() for hf_name in place.names})
    if unknown:
        raise HandgradError(f"a GGUF file of a {architecture.model_class} has no name for {unknown[0]}")
    return found


def _without_ones(w: Tensor, sizes: tuple[str, ...]) -> Tensor:
    """The shape that GGUF has for a weight."""
    return w.reshape([n for n, size in zip(w.shape, sizes, strict=False) if size != "one"]) if "one" in sizes else w


def _is_transposed(architecture: Architecture, layer: str, w: Tensor) -> bool:
    return layer in architecture.transposed and w.ndim == 2


def _packed(architecture: Architecture, layer: str, ws: list[tuple[str, Tensor]], head_width: int, kind: str) -> Tensor:
    """The bytes in GGUF's order of a weight, or of those of all experts one after the other."""
    return torch.cat([pack(_in_order(architecture, layer, name, w, head_width), kind, name) for name, w in ws])


def _in_order(architecture: Architecture, layer: str, name: str, w: Tensor, head_width: int) -> Tensor:
    if architecture.permuted and layer in ("attn_q", "attn_k"):
        w = w[interleaved_order(len(w), head_width)]
    if layer == architecture.by_head:
        w = w[by_head_order(len(w), len(w) // (3 * head_width)).argsort()]
    if architecture.gain_offset and layer.endswith("norm") and name.endswith(".weight"):
        w = w + architecture.gain_offset
    return w.t() if _is_transposed(architecture, layer, w) else w

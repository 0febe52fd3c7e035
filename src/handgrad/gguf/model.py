"""Models in GGUF files: their config.json and tensors as Hugging Face's directories have them.

The tables of `architectures.py` say which. Matrices stay packed. In llama and smollm3 the rows
of q and k are stored for interleaved rotation; they are moved to Hugging Face's half-split order, whole rows at a time.
GPT-2's matrices are stored the other way round than in its Hugging Face files, so they are unpacked. Metadata that would
change the computation and cannot be expressed in config.json are refused by name.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_integer
from ..errors import HandgradError, shown
from ..families import FAMILIES
from .architectures import ARCHITECTURES, Architecture, by_head_order, half_split_order, table_of
from .blocks import OF_WINDOWS, absent_layers, kv_heads_of, window
from .file import GGUFFile, Stored, can_dequantize, dequantize, open_gguf
from .metadata import Metadata
from .rope import rope_of

# Metadata under the architecture's name that are read, or that change nothing.
_READ = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon", "attention.sliding_window", "attention.causal", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor",
    "rope.scaling.finetuned", "tensor_data_layout",
    "shortconv.l_cache",
}  # fmt: skip

# Those that count something of a mixture, and the limits of their values.
_COUNTS = {
    "expert_count": "n_experts", "expert_used_count": "experts_per_token", "expert_feed_forward_length": "d_expert",
    "expert_shared_feed_forward_length": "d_shared", "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace", "expert_group_count": "expert_groups",
    "expert_group_used_count": "groups_per_token",
}  # fmt: skip

# Those that every file has.
_NEEDED = ("embedding_length", "attention.head_count", "block_count", "context_length")

_TABLES = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)  # not parameters


class GGUFModel(NamedTuple):
    config: dict[str, Any]  # what config.json would hold
    tensors: dict[str, Stored]  # by Hugging Face's names
    file: GGUFFile


def read_model(path: str | Path) -> GGUFModel:
    """Read the configuration and the tensors of a GGUF file, without unpacking matrices."""
    file = open_gguf(path)
    architecture, config, sizes = describe(file)
    return GGUFModel(config, _tensors(file, architecture, config, sizes), file)


def describe(file: GGUFFile) -> tuple[Architecture, dict[str, Any], dict[str, int]]:
    """What the metadata and the shapes of the tensors say: the architecture, config.json and the sizes of its layers."""
    if (kind := file.text("general.type", "model")) != "model":
        raise HandgradError(f"{file.path} is of the type {shown(kind)}, not a model")
    name = file.text("general.architecture")
    if name not in ARCHITECTURES:
        raise HandgradError(
            f"{file.path}: the architecture {shown(name)} is not supported; {', '.join(ARCHITECTURES)} are"
        )
    architecture = table_of(name, file.metadata)
    _refuse_unknown_metadata(file, name, architecture)
    config, sizes = (_gpt2_config if name == "gpt2" else _config)(Metadata(file, name), architecture)
    return architecture, config, sizes


def _refuse_unknown_metadata(file: GGUFFile, architecture: str, table: Architecture) -> None:
    """Raise for metadata that may change the computation. A value of 0, as for the number of experts, changes nothing."""
    known = {*_READ, *table.keys, *table.constants, *(OF_WINDOWS if table.pattern else ())}
    missing = [key for name in (*_NEEDED, *table.needed) if (key := f"{architecture}.{name}") not in file.metadata]
    for key, value in file.metadata.items():
        owner, _, name = key.partition(".")
        if owner == architecture and name not in known and value and not re.fullmatch(table.idle, name):
            without = f" has no {missing[0]} in its metadata, and" if missing else ":"
            raise HandgradError(f"{file.path}{without} {key} is {shown(value)}, which is not supported")
    if needed := [key for key in missing if key.removeprefix(f"{architecture}.") in table.needed]:
        raise HandgradError(f"{file.path} has no {needed[0]} in its metadata: convert the model again")
    for key, only in table.constants.items():
        if (found := file.integer(f"{architecture}.{key}")) != only:
            raise HandgradError(f"{file.path}: {architecture}.{key} is {found}; only {only} is supported")
    if file.metadata.get(f"{architecture}.attention.causal", True) is not True:
        raise HandgradError(
            f"{file.path}: {architecture}.attention.causal is not true; only causal models are supported"
        )


def _config(given: Metadata, architecture: Architecture) -> tuple[dict[str, Any], dict[str, int]]:
    """The config.json of every architecture but GPT-2's, and the sizes of its layers."""
    file, name = given.file, given.architecture
    d = given.integer("embedding_length", "d_model")
    heads = given.integer("attention.head_count", "n_heads")
    blocks = given.integer("block_count", "n_blocks")
    kv_heads, conv = kv_heads_of(given, heads, blocks)
    d_head = given.integer("attention.key_length", "d_head", d // heads or 1)
    if not given.has("attention.key_length") and d % heads:
        given.refuse("attention.head_count", f"which does not divide the width {d}")
    if heads % kv_heads:
        given.refuse("attention.head_count_kv", f"which does not divide the {heads} heads")
    if given.integer("attention.value_length", "d_head", d_head) != d_head:
        given.refuse("attention.value_length", f"and keys have {d_head}; only equal widths are supported")
    rotated = given.integer("rope.dimension_count", "d_head", d_head)
    if rotated != d_head and not (architecture.partial and rotated < d_head):
        given.refuse("rope.dimension_count", f"and heads have {d_head}; only a rotation of whole heads is supported")
    if rotated % 2:
        key = "rope.dimension_count" if architecture.partial else "attention.key_length"
        given.refuse(key, f"and heads have {d_head}; rotation needs an even width")
    rope = rope_of(given, rotated)
    if architecture.partial:
        rope["partial_rotary_factor"] = rotated / d_head
    config = {
        **_common(file, architecture, architecture.model_type or name),
        "vocab_size": _vocabulary_size(file, name),
        "max_position_embeddings": given.integer("context_length", "n_context"),
        "hidden_size": d,
        "intermediate_size": given.integer("feed_forward_length", "d_hidden"),
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": d_head,
        architecture.activation[0]: architecture.activation[1],
        architecture.eps[1]: given.number(architecture.eps[0]),
        "rope_parameters": rope,
        **architecture.fixed,
        **_by_keys(given, architecture),
    }
    if name == "lfm2":
        del config["hidden_act"]
        config |= {
            "conv_L_cache": given.integer("shortconv.l_cache", "conv_taps"),
            "layer_types": ["conv" if i in conv else "full_attention" for i in range(blocks)],
            "block_auto_adjust_ff_dim": False,
        }  # fmt: skip
    for choice, layers in architecture.choices.items():
        config[choice] = any(f"blk.0.{layer}.bias" in file.tensors for layer in layers)
    if name == "smollm3":  # fixed in llama.cpp: every fourth block does not rotate
        config |= {"no_rope_layer_interval": 4, "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(blocks)]}
    if name == "exaone4":
        if blocks == 64:
            given.refuse("block_count", "and llama.cpp gives a model of 64 blocks windows; only others are supported")
        config |= {"sliding_window": None, "layer_types": ["full_attention"] * blocks}
    if architecture.wide_from:
        config["query_pre_attn_scalar"] = d // heads if blocks == architecture.wide_from else d_head
    if architecture.model_class == "GraniteForCausalLM":
        config.setdefault("attention_multiplier", d_head**-0.5)
        if file.metadata.get(f"{name}.rope.scaling.finetuned") is False and name == "granite":
            given.refuse("rope.scaling.finetuned", "which turns rotation off; only models with rotation are supported")
    if name == "gpt-oss" and rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as in every published one; llama.cpp computes it otherwise
    config |= window(given, architecture, blocks, rope)
    if rope["rope_type"] == "longrope" and "longrope" in FAMILIES[config["model_type"]].rope_types:
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    sizes = {
        "vocab": config["vocab_size"], "d": d, "hidden": config["intermediate_size"], "head": d_head,
        "queries": heads * d_head, "keys": kv_heads * d_head, "qkv": (heads + 2 * kv_heads) * d_head,
        "gate_up": 2 * config["intermediate_size"], "heads": heads, "gates": 3 * d,
        "taps": config.get("conv_L_cache", 0), "one": 1, **_expert_sizes(architecture, config),
    }  # fmt: skip
    fields = FAMILIES[config["model_type"]].fields
    if "head_dim" not in fields:
        del config["head_dim"]
        if d_head * heads != d:
            given.refuse("attention.key_length", f"and {heads} heads of a model of width {d} have {d // heads}")
    if "num_key_value_heads" not in fields:
        del config["num_key_value_heads"]
    return config, sizes


def _by_keys(given: Metadata, architecture: Architecture) -> dict[str, Any]:
    """The fields of config.json for which the architecture has its own keys."""
    found: dict[str, Any] = {}
    for key, name in architecture.keys.items():
        value = given.file.metadata.get(f"{given.architecture}.{key}")
        if value is None:
            continue
        if limit := _COUNTS.get(key):
            found[name] = given.integer(key, limit)
        else:
            found[name] = value if isinstance(value, bool) else given.number(key)
    return found


def _expert_sizes(architecture: Architecture, config: dict[str, Any]) -> dict[str, int]:
    """The number of experts, the width of one and that of the shared one."""

    def value(key: str) -> int:
        return int(config.get(architecture.keys.get(key, ""), 0))

    width = value("expert_feed_forward_length") or config["intermediate_size"]
    shared = value("expert_shared_feed_forward_length") or value("expert_shared_count") * width
    return {"experts": value("expert_count"), "expert": width, "shared": shared}


def _gpt2_config(given: Metadata, architecture: Architecture) -> tuple[dict[str, Any], dict[str, int]]:
    d = given.integer("embedding_length", "d_model")
    config = {
        **_common(given.file, architecture, given.architecture),
        "vocab_size": _vocabulary_size(given.file, given.architecture),
        "n_positions": given.integer("context_length", "n_context"),
        "n_embd": d,
        "n_inner": given.integer("feed_forward_length", "d_hidden", 4 * d),
        "n_layer": given.integer("block_count", "n_blocks"),
        "n_head": given.integer("attention.head_count", "n_heads"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": given.number("attention.layer_norm_epsilon"),
    }
    sizes = {"vocab": config["vocab_size"], "d": d, "qkv": 3 * d, "hidden": config["n_inner"]}
    return config, sizes | {"context": config["n_positions"]}


def _common(file: GGUFFile, architecture: Architecture, model_type: str) -> dict[str, Any]:
    return {
        "architectures": [architecture.model_class],
        "model_type": model_type,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
        # null where the file has none: the defaults of transformers belong to other vocabularies
        **{
            f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }


def _vocabulary_size(file: GGUFFile, architecture: str) -> int:
    """The number of rows of the token embedding; it may exceed the number of tokens."""
    if "token_embd.weight" not in file.tensors:
        raise HandgradError(f"{file.path} has no tensor token_embd.weight: convert the model again")
    n = file.tensors["token_embd.weight"].shape[0]
    for key, claimed in (
        (f"{architecture}.vocab_size", file.integer(f"{architecture}.vocab_size", n)),
        ("tokenizer.ggml.tokens", len(file.array("tokenizer.ggml.tokens", str, []))),
    ):
        if claimed > n:
            raise HandgradError(f"{file.path}: {key} has {claimed:,} tokens, token_embd.weight has {n:,}")
    check_integer("n_vocab", n, f"{file.path}: the number of rows of token_embd.weight")
    return n


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tensors(
    file: GGUFFile, architecture: Architecture, config: dict[str, Any], sizes: dict[str, int]
) -> dict[str, Stored]:
    """The tensors by Hugging Face's names. Every one that the configuration implies, and no other."""
    tensors = {}
    used = set()
    for name, hf_name, shape, hf_shape in expected(architecture, config, sizes):
        of_experts = "*" in hf_name
        singles = [name.replace("_exps.", f".{e}.") for e in range(shape[0])] if of_experts else []
        if singles and singles[0] in file.tensors:  # an older file has a tensor of each expert
            for e, single in enumerate(singles):
                tensors[hf_name.replace("*", str(e))] = _found(file, single, shape[1:])
            used |= {*singles}
            continue
        stored = _found(file, name, shape)
        used.add(name)
        if of_experts:
            for e, data in enumerate(stored.data.chunk(shape[0])):
                tensors[hf_name.replace("*", str(e))] = Stored(stored.kind, shape[1:], data)
            continue
        layer = name.split(".")[-2]
        if architecture.permuted and layer in ("attn_q", "attn_k"):
            stored = _half_split(stored, sizes["head"], f"{file.path}: {name}")
        if layer == architecture.by_head:
            stored = _reordered(stored, by_head_order(shape[0], sizes["heads"]), f"{file.path}: {name}")
        if layer in architecture.transposed and len(shape) == 2:
            stored = _transposed(stored)
        elif hf_shape != shape:
            stored = Stored("F32", hf_shape, dequantize(stored).contiguous().view(torch.uint8))
        if architecture.gain_offset and name.endswith("norm.weight"):
            gain = dequantize(stored) - architecture.gain_offset
            stored = Stored("F32", shape, gain.view(torch.uint8))
        tensors[hf_name] = stored
    for name in file.tensors:
        if name not in used and not _TABLES.fullmatch(name):
            raise HandgradError(f"{file.path}: the tensor {shown(name)} is not part of this architecture")
    return tensors


def _found(file: GGUFFile, name: str, shape: tuple[int, ...]) -> Stored:
    """The tensor of this name, which must have this shape."""
    stored = file.tensors.get(name)
    if stored is None:
        raise HandgradError(f"{file.path} has no tensor {name}: convert the model again")
    if stored.shape != shape:
        raise HandgradError(f"{file.path}: {name} has the shape {stored.shape}, expected {shape}")
    if not can_dequantize(stored.kind):
        raise HandgradError(f"{file.path}: {name} is stored as {stored.kind}, which cannot be unpacked")
    return stored


def expected(
    architecture: Architecture, config: dict[str, Any], sizes: dict[str, int]
) -> Iterator[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    """GGUF's name, Hugging Face's name and the shapes in both of every tensor. Those of experts, whose name has a *, are in
    one tensor."""
    n_blocks = config.get("num_hidden_layers") or config["n_layer"]
    with_bias = {*architecture.biases}
    for choice, layers in architecture.choices.items():
        with_bias |= {*layers} if config[choice] else set()
    groups = [("", "", architecture.outer, {"output"} if config["tie_word_embeddings"] else set())]
    groups += [
        (f"blk.{i}.", f"{architecture.blocks}.{i}.", architecture.block, absent_layers(architecture, config, i))
        for i in range(n_blocks)
    ]
    for prefix, hf_prefix, layers_of_group, absent in groups:
        for name, layer in layers_of_group.items():
            for kind, hf_name, names in layer.tensors(name in with_bias) if name not in absent else ():
                shape = tuple(sizes[size] for size in names if size != "one")
                yield f"{prefix}{name}.{kind}", f"{hf_prefix}{hf_name}", shape, tuple(sizes[size] for size in names)


def _half_split(stored: Stored, d_head: int, name: str) -> Stored:
    """Move the rows of each head from the interleaved order to the half-split one."""
    return _reordered(stored, half_split_order(stored.shape[0], d_head), name)


def _reordered(stored: Stored, order: Tensor, name: str) -> Stored:
    """The rows of a matrix, or the entries of a bias, in another order."""
    n = stored.shape[0]
    if len(stored.shape) == 2:
        return Stored(stored.kind, stored.shape, stored.data[order])
    if stored.kind not in ("F32", "F16", "BF16"):
        raise HandgradError(f"{name} is stored as {stored.kind}; the entries of a bias must be whole numbers of bytes")
    entries = stored.data.view(n, -1)
    return Stored(stored.kind, stored.shape, entries[order].view(1, -1))


def _transposed(stored: Stored) -> Stored:
    w = dequantize(stored).t().contiguous()
    return Stored("F32", tuple(w.shape), w.view(torch.uint8))

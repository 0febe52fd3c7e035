"""config.json ↔ `ModelConfig`, by the tables of the families. A field that changes the mathematics and is not supported is
refused by name."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from ..checks import check_integer, is_number
from ..errors import HandgradError, shown
from ..families import FAMILIES, Family
from ..families.family import ACTIVATIONS
from ..model.config import ACTIVATIONS as PLAIN
from ..model.config import GATES, ModelConfig
from ..ops.rope_scaling import ROPE_TYPES, UNSCALED, Scaling

_HF_ACTIVATION = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
_KINDS = ("full_attention", "sliding_attention")
# Fields of other families that some files carry, with the value that changes nothing.
_NEUTRAL = {
    "partial_rotary_factor": 1.0, "is_causal": True, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "logits_scaling": 1.0, "logit_scale": 1.0, "scale_emb": 1.0, "rope_interleaved": False, "num_nextn_predict_layers": 0,
}  # fmt: skip
# Fields of any config.json that change nothing in the computation.
_NO_EFFECT = frozenset({
    "model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "pretraining_tp", "auto_map", "id2label", "label2id", "num_labels", "problem_type", "return_dict",
    "chunk_size_feed_forward",
    "output_hidden_states", "output_attentions", "is_encoder_decoder", "task_specific_params", "tokenizer_class",
    "is_llama_config", "is_qwen2_config", "transformers.js_config", "name_or_path", "_name_or_path", "unsloth_fixed",
    "unsloth_version", "gradient_checkpointing", "embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout",
    "hidden_dropout", "resid_dropout", "embd_dropout", "finetuning_task", "prefix", "attn_implementation", "handgrad",
    "_attn_implementation", "_attn_implementation_autoset", "max_sequence_length", "license", "use_bfloat16",
    "output_past", "mask_token_id", "cls_token_id", "router_aux_loss_coef", "neftune_noise_alpha",
})  # fmt: skip


def read_config(raw: dict[str, Any], file: Path) -> ModelConfig:
    """A parsed config.json → the model it describes."""
    family = _family(raw, file)
    for field, only in family.only.items():
        if raw.get(field, only) != only:
            raise HandgradError(f"{file}: {field} is {shown(raw[field])}; only {shown(only)} is supported")
    _check_known(raw, family, file)
    own = raw.get("handgrad", {})
    choices = [f.name for f in fields(ModelConfig)]
    if not isinstance(own, dict) or not set(own) <= set(choices):
        raise HandgradError(f"{file}: 'handgrad' may hold {', '.join(choices)}, not {shown(own)}")
    values: dict[str, Any] = dict(family.fixed)
    for field, ours in family.fields.items():
        value = raw.get(field, family.defaults.get(field))
        if value is None and field in raw and family.defaults.get(field) is not None:
            raise HandgradError(f"{file}: {field} is null: give a value, or leave it out")
        if ours == ("activation",):
            possible = GATES if values.get("gated") else PLAIN
            supported = [theirs for theirs, name in ACTIVATIONS.items() if name in possible]
            if value not in supported:
                raise HandgradError(f"{file}: {field} {shown(value)} is not one of {', '.join(supported)}")
            value = ACTIVATIONS[value]
        values |= dict.fromkeys(ours, value)
    missing = [field for field in family.fields if field not in raw and field not in family.defaults]
    if missing:
        raise HandgradError(f"{file} has no field {missing[0]!r}")
    own = {name: tuple(x) if isinstance(x, list) else x for name, x in own.items()}
    try:
        config = ModelConfig(**{**values, **own, "family": family.name})
        if config.positions == "rotary":
            config = replace(config, **{**_rotary(raw, config, family), **own})
        return replace(config, **{**_window(raw, config, family), **_conv(raw, config, family), **own})
    except HandgradError as mistake:
        raise HandgradError(f"{file}: {_in_their_words(str(mistake), family, own)}") from None


def _in_their_words(message: str, family: Family, own: dict[str, Any]) -> str:
    """A message about fields of `ModelConfig` with the names that config.json has for them, except those in `own`."""
    theirs = {name: field for field, ours in family.fields.items() for name in ours}
    theirs |= {"rope_base": "rope_theta", "window": "sliding_window", "unrotated": "no_rope_layers"}
    theirs |= {"conv_blocks": "layer_types"} if family.has("conv") else {}
    ours = "|".join(name for name in theirs if name not in own)
    message = re.sub(r" \(or, from Python, [^)]*\)", "", message)
    return re.sub(rf"\b({ours})(?==| must\b)", lambda found: theirs[found[1]], message)


def _family(raw: dict[str, Any], file: Path) -> Family:
    field, name = "model_type", raw.get("model_type")
    if name == "handgrad":  # choices that no family of Hugging Face's has
        own = raw.get("handgrad")
        field, name = "family in 'handgrad'", own.get("family", "gpt2") if isinstance(own, dict) else "gpt2"
    if not isinstance(name, str) or name not in FAMILIES:
        raise HandgradError(f"{file}: {field} is {shown(name)}; this version reads {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _check_known(raw: dict[str, Any], family: Family, file: Path) -> None:
    known = {*_NO_EFFECT, *family.no_effect, *family.fields, *family.only, *family.defaults}
    own = raw.get("handgrad")
    choices = {**family.fixed, **(own if isinstance(own, dict) else {})}
    known |= set(_ROPE) if choices.get("positions") == "rotary" else set()
    known |= set(_WINDOW) if family.windows else set()
    for field, value in raw.items():
        empty = value is None or value is False or value in ([], {}, "")
        if field in known or (value in (None, _NEUTRAL[field]) if field in _NEUTRAL else empty):
            continue
        if not field.startswith("_") and not any(word in field for word in ("token_id", "dropout", "version")):
            raise HandgradError(
                f"{file}: {field} is {shown(value)}, which this version does not implement for model_type {family.name}."
                " If it does not change what the model computes, remove it from the file"
            )


# ── rotary positions ────────────────────────────────────────────────────────────────────────────────────────────────


def _rotary(raw: dict[str, Any], config: ModelConfig, family: Family) -> dict[str, Any]:
    """The rotary fields, as transformers 5 writes them (rope_parameters) or as older files have them."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}  # transformers' own order
    if not isinstance(given, dict):
        raise HandgradError(f"rope_scaling must be an object, not {shown(given)}")
    given = dict(given)
    base = given.pop("rope_theta", None)
    base = raw.get("rope_theta", family.defaults.get("rope_theta", 10000.0)) if base is None else base
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind not in ROPE_TYPES:
        raise HandgradError(f"rope_type {shown(kind)} is not supported; choose one of {', '.join(ROPE_TYPES)}")
    unknown = [field for field in given if field not in Scaling._fields]
    for field in unknown:
        neutral = 1.0 if field == "partial_rotary_factor" else None
        if given[field] != neutral:
            raise HandgradError(f"{field}={shown(given[field])} in rope_scaling is not supported")
    scaling = UNSCALED
    if kind != "default":
        known = {field: given[field] for field in given if field in Scaling._fields}
        for field in _NEEDED[kind]:
            # transformers computes a factor of yarn that is null, and refuses one that is missing
            if known.get(field) is None and not (kind == "yarn" and field in known):
                raise HandgradError(f"rope_scaling of the type {kind} needs {field}")
        scaling = _checked(Scaling(kind, **known), config, known.get("factor") is not None)
    return {"rope_base": base, "rope_scaling": scaling, "unrotated": _unrotated(raw, config, family)}


def _checked(scaling: Scaling, config: ModelConfig, given_factor: bool) -> Scaling:
    """Fill in what transformers computes from other fields, and check the values."""
    if scaling.rope_type in ("llama3", "yarn") and scaling.original_max_position_embeddings is None:
        scaling = scaling._replace(original_max_position_embeddings=config.n_context)
    context = scaling.original_max_position_embeddings
    if not given_factor and is_number(context) and context:
        scaling = scaling._replace(factor=config.n_context / context)
    for field, value in scaling._asdict().items():
        if field not in ("rope_type", "truncate") and value is not None and not (is_number(value) and value > 0):
            raise HandgradError(f"{field} in rope_scaling must be a number above 0, not {shown(value)}")
    return scaling


def _unrotated(raw: dict[str, Any], config: ModelConfig, family: Family) -> tuple[int, ...]:
    """The blocks without rotation: no_rope_layers holds 0 for them."""
    if "no_rope_layer_interval" not in family.defaults:
        return ()
    rotated = raw.get("no_rope_layers")
    if rotated is None:
        interval = raw.get("no_rope_layer_interval", family.defaults["no_rope_layer_interval"])
        check_integer("no_rope_layer_interval", interval)
        rotated = [(i + 1) % interval for i in range(config.n_blocks)]
    elif not isinstance(rotated, list) or len(rotated) < config.n_blocks or any(x not in (0, 1) for x in rotated):
        raise HandgradError(
            f"no_rope_layers must be a list of the numbers 0 or 1 for each of the {config.n_blocks} blocks, not"
            f" {shown(rotated)}"
        )
    return tuple(i for i, flag in enumerate(rotated[: config.n_blocks]) if not flag)


def _kinds(raw: dict[str, Any], config: ModelConfig, family: Family) -> list[str] | None:
    """layer_types, if the file has them: the kind of attention of every block."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != config.n_blocks or not set(map(str, kinds)) <= set(_KINDS):
        raise HandgradError(f"layer_types must name {' or '.join(_KINDS)} for every block, not {shown(kinds)}")
    if family.windows == "every block" and "full_attention" in kinds and raw.get("sliding_window") is not None:
        raise HandgradError("layer_types with full_attention is not supported here: every block has the window")
    return kinds


def _window(raw: dict[str, Any], config: ModelConfig, family: Family) -> dict[str, Any]:
    """The sliding window, and the blocks that have it."""
    if not family.windows:
        return {}
    width = raw.get("sliding_window", family.defaults["sliding_window"])
    kinds = _kinds(raw, config, family)
    wanted = raw.get("use_sliding_window", False)
    if "use_sliding_window" in family.defaults and not isinstance(wanted, bool | None):
        raise HandgradError(f"use_sliding_window must be true or false, not {shown(wanted)}")
    if "use_sliding_window" in family.defaults and not wanted:
        if kinds and "sliding_attention" in kinds:
            raise HandgradError("layer_types asks for sliding_attention, but use_sliding_window is false")
        width = None
    if width is None:
        return {}
    if kinds is not None:
        blocks = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    elif family.windows == "late blocks":
        first = raw.get("max_window_layers", family.defaults["max_window_layers"])
        check_integer("max_window_layers", first)
        blocks = tuple(range(first, config.n_blocks))
    elif family.windows == "unrotated blocks":
        blocks = config.unrotated
    else:
        blocks = tuple(range(config.n_blocks))
    return {"window": width, "windowed": None if len(blocks) == config.n_blocks else blocks} if blocks else {}


# ── short convolutions ──────────────────────────────────────────────────────────────────────────────────────────────


def _conv(raw: dict[str, Any], config: ModelConfig, family: Family) -> dict[str, Any]:
    """The blocks with a short convolution, and what LFM2's files compute or name in their own way: the width of the
    feed-forward layer and whether the embedding is tied."""
    if not family.has("conv"):
        return {}
    kinds, attention = raw.get("layer_types"), raw.get("full_attn_idxs")
    blocks = range(config.n_blocks)
    if kinds is None:
        attention = list(blocks) if attention is None else attention
        if not isinstance(attention, list) or any(type(i) is not int for i in attention):
            raise HandgradError(f"full_attn_idxs must be a list of blocks, not {shown(attention)}")
        kinds = ["full_attention" if i in attention else "conv" for i in blocks]
    if not isinstance(kinds, list) or len(kinds) != len(blocks) or not set(map(str, kinds)) <= {"conv", _KINDS[0]}:
        raise HandgradError(f"layer_types must name conv or full_attention for every block, not {shown(kinds)}")
    tied = raw.get("tie_embedding")
    if not isinstance(tied, bool | None):
        raise HandgradError(f"tie_embedding must be true or false, not {shown(tied)}")
    width = _feed_forward_width(raw, config.hidden_width, family)
    found = {"conv_blocks": tuple(i for i in blocks if kinds[i] == "conv"), "d_hidden": width}
    return found if tied is None else {**found, "tied": tied}


def _feed_forward_width(raw: dict[str, Any], width: int, family: Family) -> int:
    """Two thirds of the width in the file, times a factor, rounded up to a multiple; or the width itself."""
    adjust, factor, multiple, own = (
        raw.get(name, family.defaults[name])
        for name in ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "block_ff_dim")
    )
    if own is not None:
        check_integer("d_hidden", own, "block_ff_dim")
        width = own
    if not isinstance(adjust, bool):
        raise HandgradError(f"block_auto_adjust_ff_dim must be true or false, not {shown(adjust)}")
    if not adjust:
        return width
    width = int(2 * width / 3)
    if not is_number(factor) or not 0 < factor < 1e6:
        raise HandgradError(f"block_ffn_dim_multiplier must be a number above 0, not {shown(factor)}")
    check_integer("d_hidden", multiple, "block_multiple_of")
    adjusted: int = multiple * -(-int(factor * width) // multiple)
    return adjusted


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """The config.json of a model with these choices, its weights stored in `dtype`."""
    family = config.table
    own = _own(config)
    if own and family.name != "gpt2":
        own = {"family": family.name, **own}
    return {
        # a model that transformers would compute differently must not be opened under the family's name
        **({"model_type": "handgrad"} if own else {"architectures": [family.architecture], "model_type": family.name}),
        **{field: _value(config, ours) for field, ours in family.fields.items()},
        **(_rope_fields(config) if config.positions == "rotary" else {}),
        **_layer_fields(config),
        # the defaults hold for the family's own vocabulary only; otherwise generation_config.json has the ids
        **({} if config.n_vocab >= family.own_vocabulary else dict.fromkeys(family.token_ids)),
        "dtype": str(dtype).removeprefix("torch."),
        **({"handgrad": own} if own else {}),
    }


def _value(config: ModelConfig, ours: tuple[str, ...]) -> object:
    """The value of a field of config.json."""
    if ours == ("activation",):
        return _HF_ACTIVATION[config.activation]
    explicit = {"d_rho": config.query_width, "n_kv_heads": config.kv_heads}
    if config.table.defaults.get("n_inner", ...) is ...:  # GPT-2's files may leave the width out
        explicit["d_hidden"] = config.hidden_width
    return explicit.get(ours[0], getattr(config, ours[0]))


def _own(config: ModelConfig) -> dict[str, Any]:
    """Choices that the family's config.json cannot express."""
    family = config.table
    told = {name for ours in family.fields.values() for name in ours} | {"family"}
    told |= {"rope_base", "rope_scaling"} if config.positions == "rotary" else set()
    if family.windows and (family.windows != "every block" or config.windowed is None):
        told |= {"window", "windowed"}
    told |= {"conv_blocks"} if family.has("conv") else set()
    told |= {"unrotated"} if "no_rope_layer_interval" in family.defaults else set()
    own = {}
    for f in fields(ModelConfig):
        value = getattr(config, f.name)
        if f.name not in told and value != family.fixed.get(f.name, f.default):
            own[f.name] = value
    for ours in family.fields.values():  # one field that stands for several of ours: they must agree
        for name in ours[1:]:
            pair = {"d_rho": config.query_width, "d_head": config.value_width}
            first, other = (pair.get(n, getattr(config, n)) for n in (ours[0], name))
            own |= {} if first == other else {name: other}
    return own


def _rope_fields(config: ModelConfig) -> dict[str, object]:
    """Rotary positions in the form that old and new versions of transformers read."""
    scaling = config.rope_scaling
    given = {name: x for name, x in scaling._asdict().items() if x != UNSCALED._asdict()[name] or name == "factor"}
    if scaling.rope_type == "llama3":
        given |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    plain = scaling.rope_type == "default"
    return {"rope_theta": config.rope_base, "rope_scaling": None if plain else given}


def _layer_fields(config: ModelConfig) -> dict[str, object]:
    """Fields that list a choice for every block."""
    family = config.table
    written: dict[str, object] = {}
    if "no_rope_layer_interval" in family.defaults:
        written["no_rope_layers"] = [int(i not in config.unrotated) for i in range(config.n_blocks)]
    if family.has("conv"):
        kinds = ["conv" if i in config.conv_blocks else "full_attention" for i in range(config.n_blocks)]
        # a file beside which this one is written may have had the other names, which come first
        own = {"block_auto_adjust_ff_dim": False, "block_ff_dim": config.hidden_width, "tie_embedding": config.tied}
        written |= {"layer_types": kinds, **own}
    if family.windows:
        written["sliding_window"] = config.window
    if family.windows in ("late blocks", "unrotated blocks"):
        windowed = [config.window_of(i) is not None for i in range(config.n_blocks)]
        written["use_sliding_window"] = config.window is not None
        written["layer_types"] = ["sliding_attention" if x else "full_attention" for x in windowed]
    return written

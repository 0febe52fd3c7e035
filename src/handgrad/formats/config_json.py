"""config.json ↔ `ModelConfig`, by the tables of the families. A field that changes the mathematics and is not supported is
refused by name."""

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from ..checks import check_integer, is_number
from ..errors import HandgradError, shown
from ..families import FAMILIES, Family
from ..families.family import ACTIVATIONS
from ..families.refused import REFUSED
from ..model.config import ACTIVATIONS as PLAIN
from ..model.config import GATES, ModelConfig
from .conv_fields import conv_fields, read_conv_fields
from .expert_fields import expert_fields, read_experts, told_by_experts
from .rope_fields import LOCAL, read_rope, rope_fields

_HF_ACTIVATION = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern")
_KINDS = ("full_attention", "sliding_attention")
_BESIDE = "every block without a window"
# Fields of other families that some files carry, with the value that changes nothing.
_NEUTRAL = {
    "partial_rotary_factor": 1.0, "is_causal": True, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "logits_scaling": 1.0, "logit_scale": 1.0, "scale_emb": 1.0, "rope_interleaved": False, "num_nextn_predict_layers": 0,
}  # fmt: skip
# Fields of any config.json that change nothing in the computation.
QUANTIZED = "quantization_config"
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
    for other, field in family.aliases.items():
        if other in raw and raw.get(field, raw[other]) != raw[other]:
            raise HandgradError(f"{file}: {other} is {shown(raw[other])} and {field} {shown(raw[field])}: which one?")
    raw = {family.aliases.get(field, field): value for field, value in raw.items()}
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
            value = ACTIVATIONS[family.means.get(value, value)]
        values |= dict.fromkeys(ours, value)
    for field, form in family.forms.items():
        (name,) = family.fields[field]
        values[name] = _converted(form, values[name], values, f"{file}: {field}")
    if "embedding_scale" in family.fixed:
        values["embedding_scale"] = _root(values["d_model"], file)
    missing = [field for field in family.fields if field not in raw and field not in family.defaults]
    if missing:
        raise HandgradError(f"{file} has no field {missing[0]!r}")
    own = {name: tuple(x) if isinstance(x, list) else x for name, x in own.items()}
    try:
        config = ModelConfig(**{**values, **own, "family": family.name})
        if config.positions == "rotary":
            config = replace(
                config, **{**read_rope(raw, config, family), "unrotated": _unrotated(raw, config, family), **own}
            )
        config = replace(config, **{**read_experts(raw, config, family), **own})
        return replace(config, **{**_window(raw, config, family), **read_conv_fields(raw, config, family), **own})
    except HandgradError as mistake:
        raise HandgradError(f"{file}: {_in_their_words(str(mistake), family, own)}") from None


def _converted(form: str, x: Any, values: dict[str, Any], what: str, back: bool = False) -> Any:
    """Our value of a field whose file has x, or the file's of ours."""
    if x is None:
        return None
    if not is_number(x) or not x > 0:
        raise HandgradError(f"{what} must be a number above 0, not {shown(x)}")
    power = -1 if back else 1
    if form == "1/x":
        found = 1 / x
    elif form == "1/√x":
        found = x**-2 if back else x**-0.5
    elif form == "x/√n_blocks":
        found = x * values["n_blocks"] ** (-power / 2)
    else:
        assert form == "x/d_model"
        found = x * values["d_model"] ** -power
    return round(found) if back and math.isclose(found, round(found), rel_tol=1e-12) else found


def _root(d_model: Any, file: Path) -> float:
    check_integer("d_model", d_model, f"{file}: hidden_size")
    return math.sqrt(d_model)


def _in_their_words(message: str, family: Family, own: dict[str, Any]) -> str:
    """A message about fields of `ModelConfig` with the names that config.json has for them, except those in `own`."""
    theirs = {name: field for field, ours in family.fields.items() for name in ours}
    theirs |= {"rope_base": "rope_theta", "window": "sliding_window", "unrotated": "no_rope_layers"}
    theirs |= {"balance_loss": "router_aux_loss_coef"}
    theirs |= {"d_shared": "n_shared_experts · moe_intermediate_size"} if "n_shared_experts" in family.defaults else {}
    theirs |= {"conv_blocks": "layer_types"} if family.has("conv") else {}
    ours = "|".join(name for name in theirs if name not in own)
    message = re.sub(r" \(or, from Python, [^)]*\)", "", message)
    return re.sub(rf"\b({ours})(?==| must\b)", lambda found: theirs[found[1]], message)


def _family(raw: dict[str, Any], file: Path) -> Family:
    field, name = "model_type", raw.get("model_type")
    if name == "handgrad":  # choices that no family of Hugging Face's has
        own = raw.get("handgrad")
        field, name = "family in 'handgrad'", own.get("family", "gpt2") if isinstance(own, dict) else "gpt2"
    if isinstance(name, str) and name in REFUSED:
        raise HandgradError(f"{file}: {field} {name} is not supported: {REFUSED[name]}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise HandgradError(f"{file}: {field} is {shown(name)}; this version reads {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _check_known(raw: dict[str, Any], family: Family, file: Path) -> None:
    known = {*_NO_EFFECT, *family.no_effect, *family.fields, *family.only, *family.written, *family.defaults}
    own = raw.get("handgrad")
    choices = {**family.fixed, **(own if isinstance(own, dict) else {})}
    known |= set(_ROPE) if choices.get("positions") == "rotary" and family.rope_types else set()
    known |= set(_WINDOW) if family.windows else set()
    known |= {"layer_types"} if family.block_kinds else set()
    known |= {"original_max_position_embeddings"} if "longrope" in family.rope_types else set()
    known |= {"partial_rotary_factor"} if family.rotary_share is not None else set()
    for field, value in raw.items():
        if field == QUANTIZED and isinstance(value, dict) and value.get("quant_method") in family.quant_methods:
            continue
        empty = value is None or value is False or value in ([], {}, "")
        if field in known or (value in (None, _NEUTRAL[field]) if field in _NEUTRAL else empty):
            continue
        if not field.startswith("_") and not any(word in field for word in ("token_id", "dropout", "version")):
            raise HandgradError(
                f"{file}: {field} is {shown(value)}, which this version does not implement for model_type {family.name}."
                " If it does not change what the model computes, remove it from the file"
            )


# ── rotary positions ────────────────────────────────────────────────────────────────────────────────────────────────


def _unrotated(raw: dict[str, Any], config: ModelConfig, family: Family) -> tuple[int, ...]:
    """The blocks without rotation: no_rope_layers holds 0 for them."""
    if family.unrotated != "listed blocks":
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
    kinds, known = raw.get("layer_types"), family.block_kinds or _KINDS
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != config.n_blocks or not set(map(str, kinds)) <= set(known):
        raise HandgradError(f"layer_types must name {' or '.join(known)} for every block, not {shown(kinds)}")
    if family.windows == "every block" and "full_attention" in kinds and raw.get("sliding_window") is not None:
        raise HandgradError("layer_types with full_attention is not supported here: every block has the window")
    return kinds


def _window(raw: dict[str, Any], config: ModelConfig, family: Family) -> dict[str, Any]:
    """The sliding window, and the blocks that have it."""
    kinds = _kinds(raw, config, family)
    if not family.windows:
        return {}
    width = raw.get("sliding_window", family.defaults["sliding_window"])
    wanted = raw.get("use_sliding_window", False)
    if "use_sliding_window" in family.defaults and not isinstance(wanted, bool | None):
        raise HandgradError(f"use_sliding_window must be true or false, not {shown(wanted)}")
    if "use_sliding_window" in family.defaults and not wanted:
        if kinds and LOCAL in kinds:
            raise HandgradError("layer_types asks for sliding_attention, but use_sliding_window is false")
        width = None
    blocks = _windowed(raw, config, family, kinds)
    found: dict[str, Any] = {}
    if family.unrotated.startswith(_BESIDE) and (width is not None or family.unrotated == _BESIDE):
        found["unrotated"] = tuple(i for i in range(config.n_blocks) if i not in blocks)
    if width is not None and blocks:
        found |= {"window": width, "windowed": None if len(blocks) == config.n_blocks else blocks}
    if family.local_rope and width is None and blocks:
        raise HandgradError(
            "sliding_window is null, but layer_types has sliding_attention: give the width of the window"
        )
    return found


def _windowed(raw: dict[str, Any], config: ModelConfig, family: Family, kinds: list[str] | None) -> tuple[int, ...]:
    """The blocks that the window is for."""
    if kinds is not None:
        return tuple(i for i, kind in enumerate(kinds) if kind == LOCAL)
    every = range(config.n_blocks)
    if family.windows == "late blocks":
        first = raw.get("max_window_layers", family.defaults["max_window_layers"])
        check_integer("max_window_layers", first)
        return tuple(every[first:])
    if family.windows == "even early blocks":
        first = raw.get("max_window_layers", family.defaults["max_window_layers"])
        check_integer("max_window_layers", first)
        return tuple(every[:first:2])
    if family.windows == "unrotated blocks":
        return config.unrotated
    if family.windows == "pattern":
        period = raw.get("sliding_window_pattern") or family.pattern
        check_integer("sliding_window_pattern", period)
        if period != family.pattern and not family.reads_pattern:
            raise HandgradError(
                f"sliding_window_pattern is {period}, and transformers ignores it in this family: give layer_types instead"
            )
        return tuple(i for i in every if (i + 1) % period)
    return tuple(every)


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def config_json(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """The config.json of a model with these choices, its weights stored in `dtype`."""
    family = config.table
    own = _own(config)
    other = own.keys() - {"z_loss"}  # of training alone
    if other and family.name != "gpt2":
        own = {"family": family.name, **own}
    return {
        # a model that transformers would compute differently must not be opened under the family's name
        **(
            {"model_type": "handgrad"} if other else {"architectures": [family.architecture], "model_type": family.name}
        ),
        **{field: _value(config, field, ours) for field, ours in family.fields.items()},
        **{field: only for field, only in family.only.items() if only is not None},
        **family.written,
        **(rope_fields(config) if _tells_rotation(config) else {}),
        **_layer_fields(config),
        **expert_fields(config),
        # the defaults hold for the family's own vocabulary only; otherwise generation_config.json has the ids
        **({} if config.n_vocab >= family.own_vocabulary else dict.fromkeys(family.token_ids)),
        "dtype": str(dtype).removeprefix("torch."),
        **({"handgrad": own} if own else {}),
    }


def _value(config: ModelConfig, field: str, ours: tuple[str, ...]) -> object:
    """The value of a field of config.json."""
    if field in config.table.forms:
        return _converted(config.table.forms[field], getattr(config, ours[0]), vars(config), field, back=True)
    if ours == ("activation",):
        return _HF_ACTIVATION[config.activation]
    explicit = {
        "d_rho": config.query_width, "n_kv_heads": config.kv_heads, "d_expert": config.expert_width,
        "rotary_width": config.rotary_width_of_head,
    }  # fmt: skip
    if config.table.defaults.get("n_inner", ...) is ...:  # GPT-2's files may leave the width out
        explicit["d_hidden"] = config.hidden_width
    return explicit.get(ours[0], getattr(config, ours[0]))


def _own(config: ModelConfig) -> dict[str, Any]:
    """Choices that the family's config.json cannot express."""
    family = config.table
    told = {name for ours in family.fields.values() for name in ours} | {"family"}
    told |= {"rope_base", "rope_scaling"} if _tells_rotation(config) else set()
    told |= {"local_rope_base"} if family.local_rope and config.local_rope_base is not None else set()
    told |= {"rotary_width"} if family.rotary_share is not None else set()
    if "embedding_scale" in family.fixed and config.embedding_scale == math.sqrt(config.d_model):
        told |= {"embedding_scale"}
    if family.windows and (family.windows != "every block" or config.windowed is None):
        told |= {"window", "windowed"}
    told |= {"conv_blocks"} if family.has("conv") else set()
    told |= {"unrotated"} if _tells_unrotated(config) else set()
    told |= told_by_experts(config)
    own = {}
    for f in fields(ModelConfig):
        value = getattr(config, f.name)
        fixed = family.fixed.get(f.name, f.default)
        if f.name not in told and value != fixed:
            own[f.name] = value
    for ours in family.fields.values():  # one field that stands for several of ours: they must agree
        for name in ours[1:]:
            pair = {"d_rho": config.query_width, "d_head": config.value_width}
            first, other = (pair.get(n, getattr(config, n)) for n in (ours[0], name))
            own |= {} if first == other else {name: other}
    return own


def _tells_rotation(config: ModelConfig) -> bool:
    """Whether config.json says by which frequencies queries and keys are rotated."""
    return config.positions == "rotary" and config.table.rope_types != ()


def _tells_unrotated(config: ModelConfig) -> bool:
    """Whether config.json says which blocks do not rotate."""
    if config.table.unrotated.startswith(_BESIDE):
        others = tuple(i for i in range(config.n_blocks) if config.window_of(i) is None)
        return config.unrotated == (others if config.window or config.table.unrotated == _BESIDE else ())
    return config.table.unrotated == "listed blocks"


def _layer_fields(config: ModelConfig) -> dict[str, object]:
    """Fields that list a choice for every block."""
    family = config.table
    written: dict[str, object] = {}
    if "no_rope_layer_interval" in family.defaults:
        written["no_rope_layers"] = [int(i not in config.unrotated) for i in range(config.n_blocks)]
    if family.windows:
        written["sliding_window"] = config.window
    kinds = [config.window_of(i) is not None for i in range(config.n_blocks)]
    if "use_sliding_window" in family.defaults:
        written["use_sliding_window"] = config.window is not None
    if family.windows and family.windows != "every block":
        written["layer_types"] = [LOCAL if windowed else "full_attention" for windowed in kinds]
    elif family.block_kinds:
        written["layer_types"] = [family.block_kinds[0]] * config.n_blocks
    return {**written, **conv_fields(config)} if family.has("conv") else written

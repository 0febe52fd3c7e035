"""adapter_config.json of PEFT ↔ `LoRAConfig`. Layers of a mixture that PEFT finds by their parameters are there under its
names, and under "handgrad" as they are for us."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import HandgradError, MissingError, shown
from ..files.reading import read_json
from ..model.gpt import GPT
from . import experts
from .config import LoRAConfig
from .injection import adapters_of, layers_of
from .patterns import shortest

CONFIG = "adapter_config.json"
# PEFT options that change what an adapter computes and are not supported.
_UNSUPPORTED = (
    "layer_replication", "megatron_config", "trainable_token_indices", "use_qalora", "lora_bias",
    "use_bdlora", "arrow_config", "kasa_config", "alora_invocation_tokens", "velora_config", "monteclora_config",
)  # fmt: skip
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")  # initializations that change the base model


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def peft_config(model: GPT, stacks: dict[experts.Stack, experts.Stacked]) -> dict[str, object]:
    """The fields of adapter_config.json; `stacks` are the factors of experts."""
    config: LoRAConfig = model.adapter
    table, adapters = model.config.table, adapters_of(model)
    modules = [table.as_in_memory(x) for x in adapters if experts.parameter_of(model.config, x) is None]
    found: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.source or None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": _as_int(config.alpha or config.rank),
        "lora_dropout": config.dropout,
        "target_modules": compact(modules, map(table.as_in_memory, layers_of(model))),
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": {name: _as_int(alpha) for name, alpha in config.alpha_pattern.items()},
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "fan_in_fan_out": any(adapter.base.in_out for adapter in adapters.values()),
        "bias": config.bias,
        "modules_to_save": [table.as_in_memory(name) for name in config.modules_to_save] or None,
        "init_lora_weights": True,
    }
    own: dict[str, object] = {"freeze_down": True} if config.freeze_down else {}
    if len(modules) < len(adapters):
        own |= {
            "targets": compact(adapters, layers_of(model)),
            "rank_pattern": found["rank_pattern"],
            "alpha_pattern": found["alpha_pattern"],
            "dropout": config.dropout,
        }
        found |= {"lora_dropout": 0.0, **_of_parameters(model, stacks)}
    return found | ({"handgrad": own} if own else {})


def _of_parameters(model: GPT, stacks: dict[experts.Stack, experts.Stacked]) -> dict[str, object]:
    """PEFT's fields for layers that it finds by their parameters."""
    config: LoRAConfig = model.adapter
    adapters = adapters_of(model)
    stacked = {layer for one in experts.stacks_of(model.config) for own in one.layers for layer in own}
    every = {name: experts.parameter_of(model.config, name) for name in layers_of(model) if name not in stacked}
    names = [x for x in every.values() if x is not None] + [x.parameter for x in experts.stacks_of(model.config)]
    ranks = {p: config.rank_of(x) for x, p in every.items() if x in adapters and p is not None}
    alphas = {p: config.alpha_of(x) for x, p in every.items() if x in adapters and p is not None}
    ranks |= {one.parameter: found.rank for one, found in stacks.items()}
    alphas |= {x.parameter: found.scale * found.rank ** (0.5 if config.rslora else 1) for x, found in stacks.items()}
    return {
        "target_parameters": list(shortest(dict.fromkeys(ranks, True), names, 2)),
        # the first that matches counts
        "rank_pattern": shortest(ranks, names, 2) | config.rank_pattern,
        "alpha_pattern": {p: _as_int(x) for p, x in (shortest(alphas, names, 2) | config.alpha_pattern).items()},
    }


def _as_int(x: float) -> float:
    """16.0 → 16, as PEFT writes it"""
    return int(x) if x == int(x) else x


def compact(names: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """The shortest patterns that select exactly these layers: c_attn for that of every block, else complete names."""
    return list(shortest(dict.fromkeys(names, True), all_names))


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_config(folder: Path) -> LoRAConfig:
    """Read adapter_config.json. An option that matters and is not supported raises."""
    file = folder / CONFIG
    try:
        raw = read_json(file)
    except MissingError:
        raise HandgradError(f"{folder} has no {CONFIG}: it is not an adapter directory") from None
    return config_of(raw, file)


def config_of(raw: dict[str, Any], file: Path) -> LoRAConfig:
    """A parsed adapter_config.json → the adapter it describes. Messages name `file`."""
    if raw.get("peft_type") != "LORA":
        raise HandgradError(f"{file}: peft_type is {shown(raw.get('peft_type'))}; only LORA is supported")
    for field, kind in (("rank_pattern", dict), ("alpha_pattern", dict), ("modules_to_save", list), ("handgrad", dict)):
        if raw.get(field) is not None and not isinstance(raw[field], kind):
            raise HandgradError(f"{file}: {field} must be a {kind.__name__}, not {shown(raw[field])}")
    for option in _UNSUPPORTED:
        if raw.get(option):
            raise HandgradError(f"{file}: {option} is set to {shown(raw[option])}, which is not supported")
    start = raw.get("init_lora_weights", True)
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise HandgradError(
            f"{file}: init_lora_weights is {shown(start)}, which needs a changed base model: convert it to plain"
            " LoRA with peft first (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    own = raw.get("handgrad") or {}
    told = {
        "rank_pattern": raw.get("rank_pattern") or {},
        "alpha_pattern": raw.get("alpha_pattern") or {},
        "dropout": raw.get("lora_dropout", 0.0),
    }
    if "targets" in own:  # of a mixture: as it was before the layers of experts were stacked
        kinds = {"rank_pattern": dict, "alpha_pattern": dict, "targets": list}
        told = {field: own.get(field) for field in (*kinds, "dropout")}
        wrong = [field for field, kind in kinds.items() if not isinstance(told[field], kind)]
        if wrong:
            raise HandgradError(f"{file}: {wrong[0]} of handgrad is {shown(told[wrong[0]])}: the file was changed")
        told["targets"] = tuple(own["targets"])

    def flag(fields: dict[str, Any], field: str) -> bool:
        value = fields.get(field)
        if not isinstance(value, bool | None):
            raise HandgradError(f"{field} must be true or false, not {shown(value)}")
        return bool(value)

    try:
        return LoRAConfig(
            rank=raw["r"],
            alpha=raw.get("lora_alpha", 8),
            rslora=flag(raw, "use_rslora"),
            dora=flag(raw, "use_dora"),
            freeze_down=flag(own, "freeze_down"),
            modules_to_save=tuple(raw.get("modules_to_save") or ()),
            bias=raw.get("bias", "none"),
            **told,
        )
    except KeyError as missing:
        raise HandgradError(f"{file} has no field {missing}") from None
    except (HandgradError, TypeError, AttributeError) as mistake:
        raise HandgradError(f"{file}: {mistake}") from None


def parameters_of(folder: Path) -> tuple[str, ...]:
    """The parameters that PEFT adapts by name."""
    found = read_json(folder / CONFIG).get("target_parameters") or ()
    if not isinstance(found, list | tuple) or not all(isinstance(x, str) for x in found):
        raise HandgradError(f"{folder / CONFIG}: target_parameters is {shown(found)}, not a list of names")
    return tuple(found)

"""PEFT's files: adapter_config.json and adapter_model.safetensors, both ways, written atomically.

Which layers have adapters, and of which rank, is read from the tensors themselves; the configuration says how the
factors are scaled. PEFT's lora_A (r, f_in) is dᵗ and its lora_B (f_out, r) is uᵗ.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import HandgradError, MissingError, shown
from ..files import manifest
from ..files.atomic import write_folder
from ..files.reading import read_json
from ..files.tensors import read_tensors
from ..model.gpt import GPT
from .config import LoRAConfig
from .injection import adapters_of, apply, layers_of, modules_to_save
from .patterns import matches, prepare_matches

T = TypeVar("T")
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Options of PEFT's that change what an adapter computes, in ways that are not supported here.
_UNSUPPORTED = (
    "layer_replication", "megatron_config", "trainable_token_indices", "use_qalora", "lora_bias", "target_parameters",
    "use_bdlora", "arrow_config", "kasa_config", "alora_invocation_tokens", "velora_config", "monteclora_config",
)  # fmt: skip
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")  # beginnings that subtract something from the base


def save(model: GPT, path: str | Path) -> None:
    """Write the adapters as a directory that `peft` loads, whole or not at all."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not (folder / CONFIG).exists():
        raise HandgradError(f"{folder} exists and is not an adapter's directory: choose another place")
    if model.adapter is None:
        raise HandgradError("the model has no adapter to save: inject one first, or save the model itself")

    def fill(partial: Path) -> None:
        write(model, partial)
        manifest.write(partial)

    write_folder(folder, fill)


def write(model: GPT, folder: Path) -> None:
    """Both files, into a folder that nobody reads yet."""
    tensors: dict[str, Tensor] = {}
    for name, adapter in adapters_of(model).items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = adapter.down.t()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = adapter.up.t()
        if adapter.magnitude is not None:
            tensors[f"{PREFIX}{name}.lora_magnitude_vector"] = adapter.magnitude
    for name, module in modules_to_save(model).items():
        for kind, p in module.named_parameters(recurse=False):
            tensors[f"{PREFIX}{name}.{kind}"] = p
    ready = {name: t.detach().contiguous() for name, t in tensors.items()}
    save_file(ready, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(_peft_config(model), indent=2) + "\n", encoding="utf-8")


def _peft_config(model: GPT) -> dict[str, object]:
    config = model.adapter
    assert config is not None
    names = list(adapters_of(model))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.source or None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": _whole(config.alpha or config.rank),
        "lora_dropout": config.dropout,
        "target_modules": _compact(names, list(layers_of(model))),
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": {name: _whole(alpha) for name, alpha in config.alpha_pattern.items()},
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "fan_in_fan_out": any(name != "lm_head" for name in names),  # GPT-2's files hold (f_in, f_out)
        "bias": "none",
        "modules_to_save": list(config.modules_to_save) or None,
        "init_lora_weights": True,
        **({"handgrad": {"freeze_down": True}} if config.freeze_down else {}),
    }


def _whole(x: float) -> float:
    return int(x) if x == int(x) else x


def _compact(names: list[str], everything: list[str]) -> list[str]:
    """As few patterns as name exactly these: c_attn where every block's is meant, else whole names."""
    chosen = set(names)
    patterns: dict[str, None] = {}
    for name in names:
        for end in (name.rpartition(".")[2], ".".join(name.split(".")[-2:]), name):
            if all(other in chosen for other in everything if other == end or other.endswith("." + end)):
                patterns[end] = None
                break
    return list(patterns)


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(model: GPT, path: str | Path, *, with_copies: bool = True) -> list[str]:
    """Put the adapters of a directory beside the layers they belong to; everything else is frozen. Returns their names.
    If they do not fit, the model stays as it was. PEFT may keep a copy of a head that has an adapter: `with_copies` it
    becomes the head."""
    folder = Path(path)
    config = read_config(folder)
    manifest.check_present(folder)
    file = folder / TENSORS
    tensors = {_short(name, file): t for name, t in read_tensors(file).items()}
    factors, rest, copies = _sorted(tensors, file)
    layers = layers_of(model)
    prepare_matches((*config.rank_pattern, *config.alpha_pattern), factors)
    for name, parts in factors.items():
        if name not in layers:
            raise HandgradError(f"{file}: there is an adapter for {name!r}, and the model has no such linear layer")
        if "lora_A" not in parts or "lora_B" not in parts:
            raise HandgradError(
                f"{file}: {name} has lora_{'B' if 'lora_B' in parts else 'A'} alone: a factor is missing"
            )
        f_in, f_out = layers[name].effective_weight().shape
        rank = config.rank_of(name)
        wanted: dict[str, tuple[int, ...]] = {"lora_A": (rank, f_in), "lora_B": (f_out, rank)}
        if config.dora:
            wanted["lora_magnitude_vector"] = (f_out,)
        for part, shape in wanted.items():
            found = tuple(parts[part].shape) if part in parts else "missing"
            if found != shape:
                raise HandgradError(
                    f"{file}: {part} of {name} is {found}, and for this model and rank it has to be {shape}: the adapter"
                    " belongs to another model, or its configuration was changed"
                )
        if not config.dora and "lora_magnitude_vector" in parts:
            raise HandgradError(f"{file}: {name} has a magnitude, but {CONFIG} does not say use_dora")
    _check_rest(model, config, rest | copies, file)
    strange = [name for name in rest if not any(_belongs(name, layer) for layer in config.modules_to_save)]
    if strange:
        raise HandgradError(f"{file}: {strange[0]} is there whole, but {CONFIG} does not list it in modules_to_save")
    config = replace(
        config,
        targets=tuple(factors),
        rank_pattern=_used(config.rank_pattern, factors),
        alpha_pattern=_used(config.alpha_pattern, factors),
    )
    apply(model, config, any_rank=True)
    _fill(model, factors, rest | copies if with_copies else rest)
    return list(factors)


def _used(patterns: dict[str, T], names: Iterable[str]) -> dict[str, T]:
    """Those that match any layer; PEFT allows for others."""
    names = list(names)
    return {p: value for p, value in patterns.items() if any(matches(p, name) for name in names)}


def read_config(folder: Path) -> LoRAConfig:
    """What adapter_config.json says, as far as it is understood here; anything else that matters is an error."""
    file = folder / CONFIG
    try:
        raw = read_json(file)
    except MissingError:
        raise HandgradError(f"{folder} has no {CONFIG}: it is not an adapter's directory") from None
    if raw.get("peft_type") != "LORA":
        raise HandgradError(f"{file}: peft_type is {shown(raw.get('peft_type'))}; only LORA is supported")
    if raw.get("bias", "none") != "none":
        raise HandgradError(f"{file}: bias is {shown(raw['bias'])}; only 'none' is supported")
    for field, kind in (("rank_pattern", dict), ("alpha_pattern", dict), ("modules_to_save", list), ("handgrad", dict)):
        if raw.get(field) is not None and not isinstance(raw[field], kind):
            raise HandgradError(f"{file}: {field} must be a {kind.__name__}, not {shown(raw[field])}")
    for option in _UNSUPPORTED:
        if raw.get(option):
            raise HandgradError(f"{file}: {option} is set to {shown(raw[option])}, which is not supported")
    start = raw.get("init_lora_weights", True)
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise HandgradError(
            f"{file}: init_lora_weights is {shown(start)}, which goes with a changed base model: convert it to plain"
            " LoRA with peft first (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    own = raw.get("handgrad") or {}
    try:
        return LoRAConfig(
            rank=raw["r"],
            alpha=raw.get("lora_alpha", 8),
            rank_pattern=raw.get("rank_pattern") or {},
            alpha_pattern=raw.get("alpha_pattern") or {},
            rslora=bool(raw.get("use_rslora")),
            dora=bool(raw.get("use_dora")),
            dropout=raw.get("lora_dropout", 0.0),
            freeze_down=bool(own.get("freeze_down")),
            modules_to_save=tuple(raw.get("modules_to_save") or ()),
        )
    except KeyError as missing:
        raise HandgradError(f"{file} has no field {missing}") from None
    except (HandgradError, TypeError, AttributeError) as mistake:
        raise HandgradError(f"{file}: {mistake}") from None


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and not a model."""
    return os.path.lexists(folder / CONFIG) and not os.path.lexists(folder / "config.json")


def ranks_of(folder: Path) -> tuple[dict[str, int], int]:
    """Of an adapter's directory: the rank beside each layer, and how many numbers train besides the factors."""
    file = folder / TENSORS
    factors, rest, _ = _sorted({_short(name, file): t for name, t in read_tensors(file).items()}, file)
    others = [parts["lora_magnitude_vector"] for parts in factors.values() if "lora_magnitude_vector" in parts]
    named = sorted(factors, key=lambda name: name == "lm_head")  # the head comes last
    ranks = {name: len(factors[name]["lora_A"]) for name in named if "lora_A" in factors[name]}
    return ranks, sum(t.numel() for t in (*others, *rest.values()))


def base_of(folder: Path) -> str | None:
    """The model that an adapter was made for, as its configuration names it."""
    name = read_json(folder / CONFIG).get("base_model_name_or_path")
    if name and (not isinstance(name, str) or "\0" in name):
        raise HandgradError(f"{folder / CONFIG}: base_model_name_or_path is {shown(name)}, not a name")
    return name or None


def _short(name: str, file: Path) -> str:
    """A tensor's name as the model has it; PEFT puts base_model.model. before it, and GPT2Model has no transformer."""
    if not name.startswith(PREFIX):
        raise HandgradError(f"{file}: {name} is not a tensor of an adapter: its name should begin with {PREFIX}")
    name = name.removeprefix(PREFIX)
    return f"transformer.{name}" if name.startswith(("h.", "wte.", "wpe.", "ln_f.")) else name


def _sorted(
    tensors: dict[str, Tensor], file: Path
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """Factors by layer; layers that were trained whole; copies PEFT makes of layers that have an adapter, as they were."""
    factors: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise HandgradError(f"{file}: {name} holds {tensor.dtype}, not floating-point numbers")
        if found := re.fullmatch(r"(.+)\.(lora_A|lora_B|lora_magnitude_vector)(\.weight)?", name):
            factors.setdefault(found[1], {})[found[2]] = tensor
        elif ".base_layer." in name:
            copies[name.replace(".base_layer.", ".")] = tensor
        elif ".lora_" in name:
            raise HandgradError(f"{file}: {name} is not a factor of a linear layer: only those are supported")
        else:
            rest[name] = tensor
    if not factors:
        raise HandgradError(f"{file} holds no low-rank factors (lora_A, lora_B)")
    return factors, rest, copies


def _check_rest(model: GPT, config: LoRAConfig, rest: dict[str, Tensor], file: Path) -> None:
    have = {f"{name}.{kind}": p for name, m in model.named_modules() for kind, p in m.named_parameters(recurse=False)}
    for name, tensor in rest.items():
        if name not in have:
            raise HandgradError(f"{file}: {name} is no parameter of this model: the adapter belongs to another one")
        if have[name].shape != tensor.shape:
            wanted = tuple(have[name].shape)
            raise HandgradError(
                f"{file}: {name} is {tuple(tensor.shape)}, and for this model it has to be {wanted}: the adapter belongs"
                " to another model"
            )
    for layer in config.modules_to_save:
        if not any(_belongs(name, layer) for name in rest):
            raise HandgradError(f"{file}: {layer} should be there whole (modules_to_save), and is missing")


def _belongs(tensor: str, layer: str) -> bool:
    """Whether a tensor is of a layer of this name, or whose name ends so."""
    return f".{tensor.rpartition('.')[0]}".endswith(f".{layer}")


@torch.no_grad()
def _fill(model: GPT, factors: dict[str, dict[str, Tensor]], rest: dict[str, Tensor]) -> None:
    adapters = adapters_of(model)
    for name, parts in factors.items():
        adapters[name].down.copy_(parts["lora_A"].t())
        adapters[name].up.copy_(parts["lora_B"].t())
        magnitude = adapters[name].magnitude
        if magnitude is not None:
            magnitude.copy_(parts["lora_magnitude_vector"])
    for name, tensor in rest.items():
        path, _, kind = name.rpartition(".")
        module = model.get_submodule(path)
        layer = module.base if path in adapters else module
        p = getattr(layer, kind)
        if torch.equal(p, tensor.to(p.dtype)):
            continue  # PEFT keeps a copy of a head that has an adapter
        if layer is model.lm_head.plain() and kind == "weight":
            model.untie()
            p = layer.weight
        p.copy_(tensor)

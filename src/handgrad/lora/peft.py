"""Read and write PEFT's files: adapter_config.json (`peft_config.py`) and adapter_model.safetensors.

The tensors decide which layers have adapters; the configuration says how the factors are scaled.
PEFT's lora_A (r, f_in) is dᵗ and its lora_B (f_out, r) is uᵗ.
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

from ..errors import HandgradError, shown
from ..families import HEADS, Family, full_name
from ..files import manifest
from ..files.atomic import write_folder
from ..files.reading import read_json
from ..files.tensors import read_tensors
from ..gguf.file import is_gguf
from ..model.config import ModelConfig
from ..model.gpt import GPT
from . import experts
from .config import LoRAConfig
from .injection import adapters_of, apply, biases_of, layers_of, modules_to_save
from .patterns import is_inside, matches, prepare_matches
from .peft_config import CONFIG, compact, parameters_of, peft_config, read_config

T = TypeVar("T")
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def save(model: GPT, path: str | Path) -> None:
    """Write the adapters, atomically, as a directory that `peft` loads."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not (folder / CONFIG).exists():
        raise HandgradError(f"{folder} exists and is not an adapter directory: choose another path")
    if model.adapter is None:
        raise HandgradError("the model has no adapter to save: inject one first, or save the model itself")

    def fill(partial: Path) -> None:
        write(model, partial)
        manifest.write(partial)

    write_folder(folder, fill)


def check(model: GPT) -> None:
    """Raise if PEFT cannot hold the adapters of the model."""
    experts.check(model.config, adapters_of(model))


def write(model: GPT, folder: Path) -> None:
    """Write both files into a new folder."""
    assert model.adapter is not None
    check(model)
    tensors: dict[str, Tensor] = {}
    adapters = adapters_of(model)
    stacks = experts.stack(model.config, adapters)
    stacked = {layer for one in stacks for own in one.layers for layer in own}
    for name in (name for name in adapters if name not in stacked):
        adapter = adapters[name]
        tensors[f"{name}.lora_A.weight"] = adapter.down.t()
        tensors[f"{name}.lora_B.weight"] = adapter.up.t()
        if adapter.magnitude is not None:
            tensors[f"{name}.lora_magnitude_vector"] = adapter.magnitude
    for one, name in experts.module_names(stacks).items():
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = stacks[one].a, stacks[one].b
    for name, module in modules_to_save(model).items():
        for kind, p in module.named_parameters(recurse=False):
            tensors[f"{name}.{kind}"] = p
    for name, p in biases_of(model, model.adapter.bias, adapters).items():
        layer = _layer(name)
        inside = layer in adapters and layer not in modules_to_save(model)
        tensors[f"{layer}{'.base_layer' if inside else ''}.bias"] = p
    table = model.config.table
    ready = {PREFIX + table.as_in_memory(name): t.detach().contiguous() for name, t in tensors.items()}
    save_file(ready, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(peft_config(model, stacks), indent=2) + "\n", encoding="utf-8")


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(model: GPT, path: str | Path, *, load_head_copy: bool = True) -> list[str]:
    """Add the adapters of a directory to the model, freeze everything else, and return the names of their layers. If they
    do not fit, the model is not changed. PEFT may store a copy of a head that has an adapter; `load_head_copy` loads it."""
    folder = Path(path)
    config = read_config(folder)
    manifest.check_present(folder)
    file = folder / TENSORS
    table = model.config.table
    factors, rest, copies = _read_sorted(file, table)
    factors, config = experts.split(model.config, factors, config, parameters_of(folder), file)
    config = replace(config, modules_to_save=tuple(map(table.as_in_files, config.modules_to_save)))
    layers = layers_of(model)
    prepare_matches((*config.rank_pattern, *config.alpha_pattern), factors)
    for name, parts in factors.items():
        if name not in layers:
            raise HandgradError(f"{file}: has an adapter for {name!r}, but the model has no such linear layer")
        if "lora_A" not in parts or "lora_B" not in parts:
            raise HandgradError(
                f"{file}: {name} has lora_{'B' if 'lora_B' in parts else 'A'} only: the other factor is missing"
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
                    f"{file}: {part} of {name} is {found}; this model and rank need {shape}: the adapter belongs"
                    " to another model, or its configuration was changed"
                )
        if not config.dora and "lora_magnitude_vector" in parts:
            raise HandgradError(f"{file}: {name} has a magnitude, but {CONFIG} does not say use_dora")
    _check_rest(model, config, rest | copies, file)
    biases = biases_of(model, config.bias, factors)
    for name in biases.keys() - rest.keys() - copies.keys():
        raise HandgradError(f"{file}: {name} is missing, which an adapter with bias={config.bias} trains")
    own = rest.keys() - biases.keys()
    unlisted = [name for name in own if not any(is_inside(_layer(name), end) for end in config.modules_to_save)]
    if unlisted:
        raise HandgradError(f"{file}: contains {unlisted[0]}, which {CONFIG} does not list in modules_to_save")
    config = replace(
        config,
        targets=tuple(compact(list(factors), list(layers))),
        rank_pattern=_used(config.rank_pattern, factors),
        alpha_pattern=_used(config.alpha_pattern, factors),
    )
    apply(model, config, any_rank=True)
    _copy_tensors(model, factors, rest | copies if load_head_copy else rest)
    return list(factors)


def _used(patterns: dict[str, T], names: Iterable[str]) -> dict[str, T]:
    """The patterns that match any layer; PEFT accepts others."""
    names = list(names)
    return {p: value for p, value in patterns.items() if any(matches(p, name) for name in names)}


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    return os.path.lexists(folder / CONFIG) and not os.path.lexists(folder / "config.json")


def ranks_of(folder: Path, model: ModelConfig) -> tuple[dict[str, int], int]:
    """The rank of each layer's adapter, and the number of trained parameters besides the factors."""
    factors, rest, copies = _read_sorted(folder / TENSORS, model.table)
    config = read_config(folder)
    factors, _ = experts.split(model, factors, config, parameters_of(folder), folder / TENSORS)
    if config.bias != "none":
        rest |= {name: t for name, t in copies.items() if name.endswith(".bias")}
    others = [parts["lora_magnitude_vector"] for parts in factors.values() if "lora_magnitude_vector" in parts]
    named = sorted(factors, key=lambda name: name in HEADS)  # the head comes last
    ranks = {name: len(factors[name]["lora_A"]) for name in named if "lora_A" in factors[name]}
    return ranks, sum(t.numel() for t in (*others, *rest.values()))


def replaced_tensors(folder: Path, table: Family) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the adapter has besides its factors, under the model's names: layers trained in full, and PEFT's copies of layers
    that have an adapter."""
    return _read_sorted(folder / TENSORS, table)[1:]


def read_factors(folder: Path, model: ModelConfig) -> dict[str, tuple[Tensor, Tensor, float]]:
    """The factors d (f_in, r) and u (r, f_out) of every layer, and what their product is multiplied by."""
    file = folder / TENSORS
    factors, _, _ = _read_sorted(file, model.table)
    factors, config = experts.split(model, factors, read_config(folder), parameters_of(folder), file)
    prepare_matches((*config.rank_pattern, *config.alpha_pattern), factors)
    return {name: (p["lora_A"].t(), p["lora_B"].t(), config.scale_of(name)) for name, p in factors.items()}


def base_of(folder: Path) -> str | None:
    """The name of the base model in the adapter's configuration."""
    name = read_json(folder / CONFIG).get("base_model_name_or_path")
    if name and (not isinstance(name, str) or "\0" in name):
        raise HandgradError(f"{folder / CONFIG}: base_model_name_or_path is {shown(name)}, not a name")
    return name or None


def check_base(folder: Path, base: Path) -> None:
    """Raise if the adapter names another base model that is here: equal shapes do not make equal models. Of one that is not
    here, `load` compares the shapes only."""
    named = base_of(folder)
    if named is None or not os.path.exists(named) or not base.exists() or os.path.samefile(named, base):
        return
    if _hashes(Path(named)) != _hashes(base):
        raise HandgradError(f"{folder} is an adapter of {named}, not of {base}: load that model instead")


def _hashes(model: Path) -> list[str]:
    """The hashes of a model's files of weights."""
    return [manifest.sha256_of(file) for file in ([model] if is_gguf(model) else sorted(model.glob("*.safetensors")))]


def _model_name(name: str, file: Path, table: Family) -> str:
    """PEFT's tensor name → that in the model's files: without base_model.model., with a prefix that they may omit."""
    if not name.startswith(PREFIX):
        raise HandgradError(f"{file}: {name} is not an adapter tensor: its name must begin with {PREFIX}")
    return table.as_in_files(full_name(name.removeprefix(PREFIX)))


def _read_sorted(
    file: Path, table: Family
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a file under the model's names: factors by layer; layers trained in full; PEFT's copies of layers that
    have an adapter."""
    factors: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    tensors = {_model_name(name, file, table): tensor for name, tensor in read_tensors(file).items()}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise HandgradError(f"{file}: {name} holds {tensor.dtype}, not floating-point numbers")
        if not torch.isfinite(tensor).all():
            raise HandgradError(
                f"{file}: {name} holds NaN or infinity: the adapter is broken, use an earlier checkpoint"
            )
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
        if name not in have and model.packed:
            raise HandgradError(
                f"{file} replaces {name}, which is packed or not in this model: load the model without packed=True,"
                " base_dtype or bits, or merge the adapter first"
            )
        if name not in have:
            raise HandgradError(f"{file}: {name} is not a parameter of this model: the adapter belongs to another one")
        if have[name].shape != tensor.shape:
            wanted = tuple(have[name].shape)
            raise HandgradError(
                f"{file}: {name} is {tuple(tensor.shape)}, but this model needs {wanted}: the adapter belongs to"
                " another model"
            )
    for layer in config.modules_to_save:
        if not any(is_inside(_layer(name), layer) for name in rest):
            raise HandgradError(f"{file}: {layer} is missing, which modules_to_save lists")


def _layer(tensor: str) -> str:
    """The name of the layer that has a tensor."""
    return tensor.rpartition(".")[0]


@torch.no_grad()
def _copy_tensors(model: GPT, factors: dict[str, dict[str, Tensor]], rest: dict[str, Tensor]) -> None:
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
            continue  # PEFT's copy of a head that has an adapter
        if layer is model.head.plain() and kind == "weight":
            model.untie()
            p = layer.weight
        p.copy_(tensor)

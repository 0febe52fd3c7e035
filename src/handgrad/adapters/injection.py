"""Putting adapters beside the linear layers of a model, taking them out again, merging them into the weights.

The embedding never changes with an adapter on a tied head: merging gives the head a matrix of its own.
"""

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import HandgradError
from ..model.gpt import GPT
from ..model.layers import Affine, freeze
from .config import LoRAConfig
from .lora import LoRA
from .patterns import alternatives, matches, matching, prepare_matches, shortened


def layers_of(model: GPT) -> dict[str, Affine]:
    """Every linear layer by its name, with its adapter if it has one."""
    layers = model.named_modules()
    return {name: layer for name, layer in layers if isinstance(layer, Affine) and not name.endswith(".base")}


def adapters_of(model: GPT) -> dict[str, LoRA]:
    return {name: layer for name, layer in layers_of(model).items() if isinstance(layer, LoRA)}


def choose(model: GPT, targets: str | Iterable[str]) -> list[str]:
    """The linear layers that the patterns name, in the order of the model. "all-linear" is every one in the blocks; else
    a pattern is a whole name (lm_head), the end of one (c_attn, mlp.c_proj), or a regular expression for either.
    One that matches nothing is an error, and so is one of which only some alternatives, as in (c_attn|c_typo), match."""
    names = list(layers_of(model))
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if not patterns:
        raise HandgradError("no layer is named for the adapters: give all-linear, or names")
    chosen: set[str] = set()
    for pattern in patterns:
        prepare_matches([pattern, *(alone for _, alone in alternatives(pattern))], names)
        matched = matching(pattern, names)
        missing = [pattern]
        if matched:
            missing = [one for one, alone in alternatives(pattern) if not matching(alone, names)]
        if missing:
            part = "" if missing == [pattern] else f" of {pattern}"
            there = ", ".join(shortened(names))
            raise HandgradError(f"no linear layer matches {missing[0]}{part}; there are {there}")
        chosen |= set(matched)
    return [name for name in names if name in chosen]


# ── putting in and taking out ───────────────────────────────────────────────────────────────────────────────────────


def inject(
    model: GPT,
    rank: int = 16,
    alpha: float | None = None,
    targets: str | Iterable[str] = "all-linear",
    *,
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, float] | None = None,
    rslora: bool = False,
    dora: bool = False,
    dropout: float = 0.0,
    freeze_down: bool = False,
    modules_to_save: Iterable[str] = (),
    seed: int = 0,
) -> list[str]:
    """Freeze the model and put adapters beside the layers that `targets` names (see `choose`); returns their names. The
    model's outputs do not change: the up factors begin at zero.

    alpha             the branch is multiplied by alpha/rank; the rank unless given, which makes 1
    rank_pattern      other ranks for layers whose name, or its end, matches: {"mlp.c_proj": 4}; so alpha_pattern
    rslora            multiply by alpha/√rank instead
    dora              learn the length of each output's weights apart from their direction
    dropout           while training, each branch reads its input with this share of it set to zero
    freeze_down       train the up factors only (LoRA-FA)
    modules_to_save   layers that are trained whole and kept with the adapter: ("ln_f",)
    seed              of the down factors
    """
    named = targets if isinstance(targets, str) else tuple(targets)
    config = LoRAConfig(
        rank, alpha, named, rank_pattern or {}, alpha_pattern or {}, rslora, dora, dropout, freeze_down,
        tuple(modules_to_save),
    )  # fmt: skip
    return apply(model, config, seed)


def apply(model: GPT, config: LoRAConfig, seed: int = 0, *, any_rank: bool = False) -> list[str]:
    """`inject` with a configuration. `any_rank` allows for more than a layer itself has, which only wastes."""
    if adapters_of(model):
        raise HandgradError("the model has adapters already: merge or remove them first")
    names = choose(model, config.targets)
    _check_patterns(config, names)
    complete = [module for name in config.modules_to_save for module in _modules(model, name).values()]
    layers = layers_of(model)
    for name in () if any_rank else names:
        most = min(layers[name].effective_weight().shape)
        if config.rank_of(name) > most:
            raise HandgradError(f"a rank of {config.rank_of(name)} is more than {name} itself has ({most})")
    generator = torch.Generator(model.transformer.wte.weight.device).manual_seed(seed)
    freeze(model.parameters())
    for salt, name in enumerate(names):
        adapter = LoRA(
            layers[name].plain(), config.rank_of(name), config.scale_of(name),
            dropout=config.dropout, magnitude=config.dora, salt=salt, generator=generator,
        )  # fmt: skip
        adapter.down.requires_grad_(not config.freeze_down)
        put(model, name, adapter)
    if any(module in (model.transformer.wte, model.lm_head) for module in complete):
        model.untie()  # of two uses of one matrix only one is trained
    for module in complete:
        module.requires_grad_(True)
    model.adapter = config
    return names


def remove(model: GPT) -> None:
    """Take the adapters out, and with them what they have learned. What was frozen stays frozen."""
    for name, adapter in adapters_of(model).items():
        put(model, name, adapter.base)
    model.adapter = None


def put(model: GPT, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def _check_patterns(config: LoRAConfig, names: list[str]) -> None:
    prepare_matches((*config.rank_pattern, *config.alpha_pattern), names)
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        if not any(matches(pattern, name) for name in names):
            there = ", ".join(shortened(names))
            raise HandgradError(f"no layer with an adapter matches {pattern!r}; there are {there}")


def _modules(model: GPT, name: str) -> dict[str, nn.Module]:
    """Layers to be trained whole, by their name or the end of it: ln_1 is that of every block."""
    owners = {n: m for n, m in model.named_modules() if n and any(True for _ in m.parameters(recurse=False))}
    found: dict[str, nn.Module] = {
        n: m
        for n, m in owners.items()
        if n.removesuffix(".base") == name or n.removesuffix(".base").endswith("." + name)
    }
    if not found:
        there = ", ".join(shortened([n for n in owners if n not in adapters_of(model)]))
        raise HandgradError(f"modules_to_save: no layer is called {name}; there are {there}")
    return found


def modules_to_save(model: GPT) -> dict[str, nn.Module]:
    """The layers that are trained whole, by their full names."""
    wanted = () if model.adapter is None else model.adapter.modules_to_save
    return {name.removesuffix(".base"): module for one in wanted for name, module in _modules(model, one).items()}


# ── merging ─────────────────────────────────────────────────────────────────────────────────────────────────────────

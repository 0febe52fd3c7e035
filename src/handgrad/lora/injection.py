"""Put adapters into a model and take them out: each replaces a linear layer, which it holds as its `base`."""

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import HandgradError
from ..model.gpt import GPT
from ..model.layers.linear import Affine, freeze
from .config import LoRAConfig
from .layer import LoRA
from .patterns import alternatives, is_inside, matches, matching, one_block, prepare_matches


def layers_of(model: GPT) -> dict[str, Affine]:
    """Every linear layer by name, as a LoRA layer if it has an adapter."""
    layers = model.named_modules()
    return {name: layer for name, layer in layers if isinstance(layer, Affine) and not name.endswith(".base")}


def adapters_of(model: GPT) -> dict[str, LoRA]:
    """The adapters by the name of their layer."""
    return {name: layer for name, layer in layers_of(model).items() if isinstance(layer, LoRA)}


def choose(model: GPT, targets: str | Iterable[str]) -> list[str]:
    """The linear layers that the patterns select, in the model's order. "all-linear" selects all layers of the blocks but
    routers; any other pattern is a complete name (lm_head), the end of one (c_attn, mlp.c_proj), or a regular expression for
    either. Raises if a pattern, or an alternative inside one as in (c_attn|c_typo), matches no layer."""
    names = list(layers_of(model))
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if not patterns:
        raise HandgradError("no target layers were given for the adapters: give all-linear, or names")
    chosen: set[str] = set()
    for pattern in patterns:
        prepare_matches([pattern, *(alone for _, alone in alternatives(pattern))], names)
        matched = matching(pattern, names)
        missing = [pattern]
        if matched:
            missing = [part for part, alone in alternatives(pattern) if not matching(alone, names)]
        if missing:
            where = "" if missing == [pattern] else f" of {pattern}"
            available = ", ".join(one_block(names))
            raise HandgradError(f"no linear layer matches {missing[0]}{where}; available: {available}")
        chosen |= set(matched)
    return [name for name in names if name in chosen]


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
    bias: str = "none",
    seed: int = 0,
) -> list[str]:
    """Freeze the model, add an adapter to each layer that `targets` selects (see `choose`), and return their names. The
    model's outputs do not change: the up factors start at zero.

    alpha             the branch is multiplied by alpha/rank (default: the rank, a factor of 1)
    rank_pattern      ranks of layers whose name, or its end, matches: {"mlp.c_proj": 4}; alpha_pattern likewise
    rslora            multiply by alpha/√rank instead
    dora              train the length of each output's weight column apart from its direction
    dropout           share of each adapter's input that is set to zero while training
    freeze_down       train the up factors only (LoRA-FA)
    modules_to_save   layers trained in full and saved with the adapter: ("ln_f",); ends of names, as in PEFT: ("norm",) is
                      every norm of a Llama
    bias              biases trained and saved with the adapter: "all" of the model, or "lora_only" those of layers with one
    seed              seed of the down factors
    """
    named = targets if isinstance(targets, str) else tuple(targets)
    config = LoRAConfig(
        rank, alpha, named, rank_pattern or {}, alpha_pattern or {}, rslora, dora, dropout, freeze_down,
        tuple(modules_to_save), bias,
    )  # fmt: skip
    return apply(model, config, seed)


def apply(model: GPT, config: LoRAConfig, seed: int = 0, *, any_rank: bool = False) -> list[str]:
    """`inject` with a configuration. `any_rank` accepts ranks larger than a layer's own, as files may have them."""
    if adapters_of(model):
        raise HandgradError("the model has adapters already: merge or remove them first")
    names = choose(model, config.targets)
    _check_patterns(config, names)
    full = [module for name in config.modules_to_save for module in _modules_named(model, name).values()]
    for module in model.modules():
        if getattr(module, "packed", None) is not None and module in full:
            raise HandgradError("modules_to_save names a layer whose weights are packed: load the model unpacked")
    biases = biases_of(model, config.bias, names)
    if config.bias != "none" and not biases and not any_rank:
        raise HandgradError(f"bias={config.bias} trains nothing, because these layers have no bias: leave it out")
    layers = layers_of(model)
    for name in () if any_rank else names:
        most = min(layers[name].effective_weight().shape)
        if config.rank_of(name) > most:
            raise HandgradError(
                f"rank {config.rank_of(name)} is larger than the rank of {name} itself ({most}): choose a smaller one"
            )
    generator = torch.Generator(model.device).manual_seed(seed)
    freeze(model.parameters())
    for salt, name in enumerate(names):
        adapter = LoRA(
            layers[name].plain(), config.rank_of(name), config.scale_of(name),
            dropout=config.dropout, magnitude=config.dora, salt=salt, generator=generator,
        )  # fmt: skip
        adapter.down.requires_grad_(not config.freeze_down)
        put(model, name, adapter)
    if any(module in (model.embed, model.head.plain()) for module in full):
        model.untie()  # only one of the two uses of the matrix trains
    for module in full:
        module.requires_grad_(True)
    for b in biases.values():
        b.requires_grad_(True)
    model.adapter = config
    return names


def biases_of(model: GPT, kind: str, adapted: Iterable[str]) -> dict[str, nn.Parameter]:
    """The biases by name that train with adapters of these layers, as PEFT chooses them: no tensor of experts is one."""
    own = {f"{name}.bias" for name in adapted} if kind == "lora_only" else set()
    named = {name.replace(".base.", "."): p for name, p in model.named_parameters() if name.endswith(".bias")}
    return {name: p for name, p in named.items() if (kind == "all" or name in own) and ".experts." not in name}


def remove(model: GPT) -> None:
    """Remove the adapters and what they have learned. Frozen parameters stay frozen."""
    for name, adapter in adapters_of(model).items():
        put(model, name, adapter.base)
    model.adapter = None


def put(model: GPT, name: str, layer: nn.Module) -> None:
    """Replace the layer of that name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def _check_patterns(config: LoRAConfig, names: list[str]) -> None:
    prepare_matches((*config.rank_pattern, *config.alpha_pattern), names)
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        if not any(matches(pattern, name) for name in names):
            available = ", ".join(one_block(names))
            raise HandgradError(f"no layer with an adapter matches {pattern!r}; available: {available}")


def _modules_named(model: GPT, name: str) -> dict[str, nn.Module]:
    """Layers by the end of their name, or of a module's that they are in: ln_1 selects that of every block."""
    owners = {n: m for n, m in model.named_modules() if n and any(True for _ in m.parameters(recurse=False))}
    found: dict[str, nn.Module] = {n: m for n, m in owners.items() if is_inside(n.removesuffix(".base"), name)}
    if not found:
        available = ", ".join(one_block([n for n in owners if n not in adapters_of(model)]))
        raise HandgradError(f"modules_to_save: no layer is called {name}; available: {available}")
    return found


def modules_to_save(model: GPT) -> dict[str, nn.Module]:
    """The layers trained in full, by name."""
    wanted = () if model.adapter is None else model.adapter.modules_to_save
    return {
        name.removesuffix(".base"): module
        for pattern in wanted
        for name, module in _modules_named(model, pattern).items()
    }

"""Putting adapters beside the linear layers of a model, taking them out again, merging them into the weights.

The embedding never changes with an adapter on a tied head: merging gives the head a matrix of its own.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import LoRAConfig, matches, prepare_matches
from ..errors import HandgradError
from ..gpt import GPT
from ..layers import Head, Linear, LoRA, freeze


def layers_of(model: GPT) -> dict[str, Linear | LoRA]:
    """Every linear layer by its name, with its adapter if it has one."""
    found: dict[str, Linear | LoRA] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoRA) or (isinstance(layer, Linear) and not name.endswith(".base")):
            found[name] = layer
    return found


def adapters_of(model: GPT) -> dict[str, LoRA]:
    return {name: layer for name, layer in layers_of(model).items() if isinstance(layer, LoRA)}


# ── choosing ────────────────────────────────────────────────────────────────────────────────────────────────────────


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
        prepare_matches([pattern, *(alone for _, alone in _alternatives(pattern))], names)
        matched = _matching(pattern, names)
        missing = [pattern]
        if matched:
            missing = [one for one, alone in _alternatives(pattern) if not _matching(alone, names)]
        if missing:
            part = "" if missing == [pattern] else f" of {pattern}"
            there = ", ".join(_shortened(names))
            raise HandgradError(f"no linear layer matches {missing[0]}{part}; there are {there}")
        chosen |= set(matched)
    return [name for name in names if name in chosen]


def _matching(pattern: str, names: list[str]) -> list[str]:
    if pattern == "all-linear":
        return [name for name in names if name != "lm_head"]
    return [name for name in names if matches(pattern, name)]


def _alternatives(pattern: str) -> list[tuple[str, str]]:
    """Every alternative of every group, and of the whole, with the pattern that has only this one in its place."""
    found = []
    starts: list[int] = [0]  # where the groups around this place begin, the innermost last
    bars: list[list[int]] = [[]]

    def close(end: int) -> None:
        start, inside = starts.pop(), bars.pop()
        if inside:
            for begin, stop in itertools.pairwise([start - 1, *inside, end]):
                one = pattern[begin + 1 : stop]
                found.append((one, pattern[:start] + one + pattern[end:]))

    at = 0
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\":
            at += 1
        elif sign == "[":  # up to its end; a ] that comes first belongs to it
            at = pattern.find("]", at + 2 + (pattern[at + 1 : at + 2] == "^"))
            if at < 0:
                return []
        elif sign == "(":
            opened = re.match(r"\((\?[a-zA-Z-]*:|\?P<\w+>|\?<?[=!])?", pattern[at:])
            starts.append(at + (opened.end() if opened else 1))
            bars.append([])
        elif sign == ")" and len(starts) > 1:
            close(at)
        elif sign == "|":
            bars[-1].append(at)
        at += 1
    close(len(pattern))
    return found


def _shortened(names: list[str]) -> list[str]:
    """With one block standing for all."""
    return list(dict.fromkeys(re.sub(r"\.h\.\d+\.", ".h.*.", name) for name in names))


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
    whole = [module for name in config.modules_to_save for module in _modules(model, name).values()]
    layers = layers_of(model)
    for name in () if any_rank else names:
        most = min(layers[name].effective_weight().shape)
        if config.rank_of(name) > most:
            raise HandgradError(f"a rank of {config.rank_of(name)} is more than {name} itself has ({most})")
    generator = torch.Generator(model.transformer.wte.weight.device).manual_seed(seed)
    freeze(model.parameters())
    for salt, name in enumerate(names):
        base = layers[name]
        assert isinstance(base, Linear)
        adapter = LoRA(
            base, config.rank_of(name), config.scale_of(name),
            dropout=config.dropout, magnitude=config.dora, salt=salt, generator=generator,
        )  # fmt: skip
        adapter.down.requires_grad_(not config.freeze_down)
        put(model, name, adapter)
    if any(module is model.transformer.wte or isinstance(module, Head) for module in whole):
        model.untie()  # of two uses of one matrix only one is trained
    for module in whole:
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
            there = ", ".join(_shortened(names))
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
        there = ", ".join(_shortened([n for n in owners if not isinstance(owners[n], LoRA)]))
        raise HandgradError(f"modules_to_save: no layer is called {name}; there are {there}")
    return found


def modules_to_save(model: GPT) -> dict[str, nn.Module]:
    """The layers that are trained whole, by their full names."""
    wanted = () if model.adapter is None else model.adapter.modules_to_save
    return {name.removesuffix(".base"): module for one in wanted for name, module in _modules(model, one).items()}


# ── merging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Merged:
    """What `merge` took out of a model, enough to put it back."""

    config: LoRAConfig
    adapters: dict[str, LoRA]  # with the layers they stood beside
    norms: dict[str, Tensor]  # of DoRA's columns before they were rescaled
    tied: bool  # the head was the embedding


@torch.no_grad()
def merge(model: GPT) -> Merged:
    """Fold the adapters into the weights: the same outputs without any branch. A tied head that has an adapter becomes a
    matrix of its own, and the embedding stays what it was."""
    adapters = adapters_of(model)
    if model.adapter is None or not adapters:
        raise HandgradError("there is no adapter to merge: inject or load one first")
    taken = Merged(model.adapter, adapters, {}, model.config.tied)
    if "lm_head" in adapters:
        model.untie()
    for name, adapter in adapters.items():
        w = _sum(adapter)
        if adapter.magnitude is not None:
            taken.norms[name] = torch.linalg.vector_norm(w, dim=0)
            w *= adapter.magnitude.double() / taken.norms[name]
        _set_weight(adapter.base, w)
        put(model, name, adapter.base)
    _discard_gradients(model, adapters)
    model.adapter = None
    return taken


@torch.no_grad()
def unmerge(model: GPT, taken: Merged) -> None:
    """The reverse of `merge`, up to the rounding of the weights; the adapters are back in their places."""
    if adapters_of(model):
        raise HandgradError("the model has adapters: only a merged model can be unmerged")
    layers = layers_of(model)
    for name, adapter in taken.adapters.items():
        base = layers.get(name)
        if not isinstance(base, Linear) or base.weight.shape != adapter.base.weight.shape:
            raise HandgradError(f"the adapter stood beside {name}, which this model does not have in that shape")
        w = base.effective_weight().double()
        if adapter.magnitude is not None:
            w = w * (taken.norms[name].double() / adapter.magnitude.double())
        w = w - adapter.scale * adapter.down.double() @ adapter.up.double()
        _set_weight(base, w)
        adapter.base = base
        put(model, name, adapter)
    if taken.tied and not model.config.tied:
        model.tie()
    _discard_gradients(model, taken.adapters)
    model.adapter = taken.config


def _discard_gradients(model: GPT, adapters: dict[str, LoRA]) -> None:
    """They were computed for weights that the model no longer has."""
    for module in (model, *adapters.values()):
        module.zero_grad()


def _sum(adapter: LoRA) -> Tensor:
    """w + scale · d u, in float64, so that a weight is rounded once and not at every step of its way."""
    branch = adapter.scale * adapter.down.double() @ adapter.up.double()
    return adapter.base.effective_weight().double() + branch


def _set_weight(layer: Linear, effective: Tensor) -> None:
    layer.weight.copy_(effective.t() if isinstance(layer, Head) else effective)

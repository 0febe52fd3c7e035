"""Adapters of experts as PEFT writes them for transformers 5, where all experts of a block are two tensors.

    gate_up_proj   lora_A (E r, d)   lora_B (2f, r E)        A_e is r rows, gate and up share it
    down_proj      lora_A (E r, f)   lora_B (d, r E)         B_e is every E-th column

They are read as an adapter for each layer of each expert, with the same output; trained further, gate and up have a factor A
each. We write those, which is what PEFT wrote before and still reads.
"""

import re
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ..errors import HandgradError
from ..model.gpt import GPT
from ..model.layers.experts import Experts
from .config import LoRAConfig
from .injection import layers_of

Factors = dict[str, dict[str, Tensor]]


def split_by_expert(model: GPT, factors: Factors, config: LoRAConfig, file: Path) -> tuple[Factors, LoRAConfig]:
    """The factors of every layer, with those of stacked experts one by one, and the configuration with their ranks."""
    names = {layer: name for name, layer in layers_of(model).items()}
    mixtures = {f"{model.config.table.names['blocks']}.{i}": x.mlp for i, x in enumerate(model.blocks)}
    found: Factors = {}
    ranks, alphas = dict(config.rank_pattern), dict(config.alpha_pattern)
    for name, parts in factors.items():
        path = name.removesuffix(".base_layer").removesuffix(".base_layer")
        mixture = mixtures.get(path.removesuffix(".mlp.experts"))
        if not path.endswith(".mlp.experts") or not isinstance(mixture, Experts):
            found[name] = parts
            continue
        count, (d, f) = len(mixture.experts), mixture.experts[0].contract.plain().w.t().shape
        a, b = parts.get("lora_A"), parts.get("lora_B")
        kinds = {(d, 2 * f): "gate_up_proj", (f, d): "down_proj"}
        kind = None if a is None or b is None else kinds.get((a.shape[-1], len(b)))
        if a is None or b is None or kind is None or len(a) % count or b.shape[1] != len(a):
            raise HandgradError(f"{file}: the factors of {name} do not fit the {count} experts of this model")
        rank, alpha = len(a) // count, config.alpha_of(f"{path}.{kind}")
        for e, expert in enumerate(mixture.experts):
            own = b.reshape(len(b), rank, count)[:, :, e]
            layers = (expert.contract,) if kind == "down_proj" else expert.projections()
            for layer, part in zip(layers, own.chunk(len(layers)), strict=True):
                found[names[layer]] = {"lora_A": a[e * rank : (e + 1) * rank], "lora_B": part}
                of_all = re.sub(r"\.\d+\.(\w+)$", r"\.\\d+\.\1", names[layer])
                ranks |= {} if rank == config.rank else {of_all: rank}
                alphas |= {} if alpha == (config.alpha or config.rank) else {of_all: alpha}
    return found, replace(config, rank_pattern=ranks, alpha_pattern=alphas)

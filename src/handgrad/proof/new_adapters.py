"""New adapters of PEFT: their up factors are 0, and then the gradient of the down factors is 0 whatever the code does."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def filled(model: Any, seed: int = 0) -> Iterator[set[str]]:
    """Fill the up factors of new adapters at random, give the adapters' names, and put the zeros back in the end."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, p in model.named_parameters() if isinstance(model, nn.Module) else ():
        _, found, rest = name.partition(".lora_B.")
        if found:
            groups.setdefault(rest.partition(".")[0], []).append(p)
    new = {name: ups for name, ups in groups.items() if not any(p.detach().any() for p in ups)}
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for p in (p for ups in new.values() for p in ups):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.5 / math.sqrt(p.shape[1]))
        yield set(new)
    finally:
        with torch.no_grad():
            for p in (p for ups in new.values() for p in ups):
                p.zero_()

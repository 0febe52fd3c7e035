"""Experts that a file holds in two tensors per block ↔ a matrix for each layer of each expert.

as transformers 5 has them in memory    gate_up_proj (E, 2f, d)                     down_proj (E, d, f)
as gpt-oss's files                      gate_up_proj (E, d, 2f), gate and up        down_proj (E, f, d)
                                        in turn, and their biases (E, 2f)           and biases (E, d)
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ..families import Family
from ..files.tensors import Header

_NAME = re.compile(r"(.+)\.mlp\.(?:experts\.(gate_up_proj|down_proj)(_bias)?|(.+))")
_LAYERS = {"gate_up_proj": ("expert.gate", "expert.expand"), "down_proj": ("expert.contract",)}


def split_tensors(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Tensors under the names that the family's matrices have; those that are not stacked stay as they are."""
    if not family.has("mlp.experts") or not any((parts := _NAME.fullmatch(x)) and parts[2] for x in tensors):
        return dict(tensors)
    found: dict[str, Tensor] = {}
    for name, x in tensors.items():
        parts = _NAME.fullmatch(name)
        if parts is None:
            found[name] = x
        elif parts[2] is None:
            found[f"{parts[1]}.{family.names['mlp']}.{parts[4]}"] = x
        else:
            for e, one in enumerate(x):
                layers = _LAYERS[parts[2]]
                if family.stacked_experts:
                    pieces = [one[..., i :: len(layers)].t().contiguous() for i in range(len(layers))]
                else:
                    pieces = list(one.chunk(len(layers)))
                for layer, piece in zip(layers, pieces, strict=True):
                    where = f"{parts[1]}.{family.names['mlp']}.experts.{e}.{family.names[layer]}"
                    found[f"{where}.{'bias' if parts[3] else 'weight'}"] = piece
    return found


def split_headers(headers: Mapping[str, Header], family: Family) -> dict[str, Header]:
    """The same of headers."""
    sources = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in headers.items()}
    any_header = next(iter(headers.values()), None)
    found: dict[str, Header] = {}
    for name, x in split_tensors(sources, family).items():
        assert any_header is not None
        found[name] = headers.get(name, any_header)._replace(shape=tuple(x.shape), dtype=x.dtype)
    return found


def name_in_files(name: str, family: Family) -> str:
    """The name that a tensor has in the family's files: layers of experts are parts of a stacked one."""
    parts = re.fullmatch(r"(.+\.mlp\.experts)\.\d+\.(.+)\.(weight|bias)", name) if family.stacked_experts else None
    if parts is None:
        return name
    stacked = next(x for x, layers in _LAYERS.items() if parts[2] in [family.names[layer] for layer in layers])
    return f"{parts[1]}.{stacked}{'_bias' if parts[3] == 'bias' else ''}"


def stack_tensors(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Tensors as the family's files have them: those of gpt-oss are stacked."""
    if not family.stacked_experts:
        return dict(tensors)
    found: dict[str, Tensor] = {}
    groups: dict[str, list[Tensor]] = {}
    layers = {family.names[layer]: (stack, layer) for stack, names in _LAYERS.items() for layer in names}
    for name, x in tensors.items():
        parts = re.fullmatch(r"(.+\.experts)\.\d+\.(\w+)\.(weight|bias)", name)
        if parts is None:
            found[name] = x
        else:
            stack = layers[parts[2]][0] + ("_bias" if parts[3] == "bias" else "")
            groups.setdefault(f"{parts[1]}.{stack}", []).append(x)  # gate and up of each expert in turn
    for name, own in groups.items():
        each = 2 if "gate_up" in name else 1
        whole = torch.stack(own).view(-1, each, *own[0].shape)  # (E, 2, f, d)
        found[name] = whole.transpose(1, 2).flatten(1) if own[0].ndim == 1 else whole.permute(0, 3, 2, 1).flatten(2)
    return {name: x.contiguous() for name, x in found.items()}

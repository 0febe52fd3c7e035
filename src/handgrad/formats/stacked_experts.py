"""Experts that a file holds in two tensors per block ↔ a matrix for each layer of each expert.

as transformers 5 has them in memory    gate_up_proj (E, 2f, d)                     down_proj (E, d, f)
as gpt-oss's files                      gate_up_proj (E, d, 2f), gate and up        down_proj (E, f, d)
                                        in turn, and their biases (E, 2f)           and biases (E, d)
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import HandgradError
from ..families import Family
from ..files.tensors import Header
from ..model.config import ModelConfig
from . import mxfp4


class Piece(NamedTuple):
    """A matrix or bias in a stacked tensor."""

    expert: int
    layer: str  # as the tables of families call it: expert.gate
    i: int  # it is the i-th of n
    n: int
    in_turn: bool  # as in gpt-oss's files

    def of(self, x: Tensor) -> Tensor:
        """Take it out of the stacked tensor, as (f_out, f_in) or (f_out)."""
        one = x[self.expert]
        return one[..., self.i :: self.n].t() if self.in_turn else one.chunk(self.n)[self.i]


_NAME = re.compile(r"(.+)\.mlp\.(?:experts\.(gate_up_proj|down_proj)(_bias)?|.+)")
_LAYERS = {"gate_up_proj": ("expert.gate", "expert.expand"), "down_proj": ("expert.contract",)}


def split_tensors(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Tensors under the names that the family's matrices have; those that are not stacked stay as they are."""
    if not _any_stacked(tensors, family):
        return dict(tensors)
    items = mxfp4.unpacked(tensors) if family.quant_methods else tensors.items()
    return {new: piece for name, x in items for new, piece in _split(name, x, family)}


def split_headers(headers: Mapping[str, Header], config: ModelConfig) -> dict[str, Header]:
    """The same of headers. What stands in them is a claim of the file: stacked ones must have the configuration's shape."""
    family = config.table
    if config.n_experts is None or not _any_stacked(headers, family):
        return dict(headers)
    headers = mxfp4.unpacked_headers(headers) if family.quant_methods else headers
    found: dict[str, Header] = {}
    for name, header in headers.items():
        if (stacked := _stacked_shape(name, config)) is None:
            found[family.as_in_files(name)] = header
        elif header.shape != stacked:
            raise HandgradError(f"{header.file}: {name} has shape {header.shape}; config.json requires {stacked}")
        else:
            whole = torch.empty(stacked, dtype=header.dtype, device="meta")
            found |= {new: header._replace(shape=tuple(x.shape)) for new, x in _split(name, whole, family)}
    return found


def _any_stacked(names: Iterable[str], family: Family) -> bool:
    return family.has("mlp.experts") and any(
        (parts := _parts(x.removesuffix("_blocks"), family)) and parts[2] for x in names
    )


def _stacked_shape(name: str, config: ModelConfig) -> tuple[int, ...] | None:
    """The shape of a stacked tensor; None if the name is that of another one."""
    parts = _parts(name, config.table)
    if parts is None or parts[2] is None:
        return None
    assert config.n_experts is not None
    d, f = config.d_model, config.expert_width
    out, into = (2 * f, d) if parts[2] == "gate_up_proj" else (d, f)
    if parts[3]:
        return config.n_experts, out
    return (config.n_experts, into, out) if config.table.stacked_experts else (config.n_experts, out, into)


def _parts(name: str, family: Family) -> re.Match[str] | None:
    return _NAME.fullmatch(family.as_in_memory(name))


def _split(name: str, x: Tensor, family: Family) -> Iterator[tuple[str, Tensor]]:
    """The matrices or biases in a stacked tensor; any other tensor as it is."""
    for new, piece in split_name(name, len(x), family):
        yield new, x if piece is None else piece.of(x).contiguous()


def split_name(name: str, n_experts: int, family: Family) -> Iterator[tuple[str, Piece | None]]:
    """The family's names of the matrices or biases in a stacked tensor, and where they are; of any other tensor its own."""
    parts = _parts(name, family)
    if parts is None or parts[2] is None:
        yield family.as_in_files(name), None
        return
    layers = _LAYERS[parts[2]]
    for e in range(n_experts):
        for i, layer in enumerate(layers):
            where = f"{parts[1]}.{family.names['mlp']}.experts.{e}.{family.names[layer]}"
            piece = Piece(e, layer, i, len(layers), family.stacked_experts)
            yield f"{where}.{'bias' if parts[3] else 'weight'}", piece


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

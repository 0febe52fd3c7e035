"""Muon for the matrices of the blocks, AdamW for all else: embeddings, head, gains, biases.

    B ← μ B + (1 − μ) ∂w          momentum
    M = μ B + (1 − μ) ∂w          Nesterov
    O ≈ (M Mᵗ)^(−1/2) M           M with its singular values near 1: five Newton–Schulz iterations in bfloat16
    w ← (1 − lr λ) w − 0.2 lr √max(f_in, f_out) O

The factor gives the entries of an update the usual size of AdamW's, so that one learning rate serves both. An update belongs
to a linear map, not to the tensor that stores it: q, k and v side by side are three maps, and every map is computed as
(f_out, f_in) with contiguous rows. So the same maps get the same update, bit for bit, however a family's files store them.
Nesterov and the constants are torch's.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim._muon import muon

from ..model.gpt import GPT
from ..model.layers.linear import Affine

_DEFAULTS = {name: x.default for name, x in inspect.signature(torch.optim.Muon).parameters.items()}
OPTIONS = {name: _DEFAULTS[name] for name in ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps")}
OPTIONS["adjust_lr_fn"] = "match_rms_adamw"


class Maps(NamedTuple):
    """The linear maps that a matrix holds: side by side with these widths, or a single one. The matrix is (f_in, f_out) if
    `in_out`, else (f_out, f_in)."""

    in_out: bool
    widths: tuple[int, ...] = ()

    def of(self, x: Tensor) -> list[Tensor]:
        """The matrix, or its gradient → views (f_out, f_in) of every map"""
        rows = x.t() if self.in_out else x
        return list(torch.split(rows, list(self.widths))) if self.widths else [rows]


Matrices = Mapping[nn.Parameter, Maps]


def matrices(model: GPT) -> Matrices:
    """The matrices of the blocks' linear layers and of their adapters."""
    found: dict[nn.Parameter, Maps] = {}
    for layer in (layer for block in model.blocks for layer in block.modules() if isinstance(layer, Affine)):
        plain, symbols = layer.plain(), layer.named_symbols()
        # q, k and v of every head side by side are no matrices that lie in one piece: one map
        side_by_side = () if getattr(plain, "heads", None) else tuple(plain.parts.values())
        maps = {"w": Maps(plain.in_out, side_by_side), "d": Maps(True), "u": Maps(True, side_by_side)}
        found |= {p: maps[letter] for letter, p in symbols.items() if p is not None and letter in maps}
    return found


def groups(parameters: Iterable[nn.Parameter], of: Matrices, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of those that are matrices, by the maps that they hold."""
    chosen: dict[Maps, list[nn.Parameter]] = {}
    for p in parameters:
        if p in of:
            chosen.setdefault(of[p], []).append(p)
    of_group = {**OPTIONS, "weight_decay": weight_decay}
    return [{"params": params, "maps": maps, **of_group} for maps, params in chosen.items()]


class MuonAndAdamW(torch.optim.AdamW):
    """torch's Muon for groups that have `maps`, torch's AdamW for the others."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        every = self.param_groups
        for group in every:
            for p in group["params"] if "maps" in group else ():
                if p.grad is not None:
                    scale = getattr(self, "grad_scale", None)  # of clipping, which AdamW's kernel applies itself
                    _update(p, p.grad if scale is None else p.grad / scale, group, self.state[p])
        self.param_groups = [group for group in every if "maps" not in group]
        adamw: Callable[[Any], None] = inspect.unwrap(torch.optim.AdamW.step)  # without the hooks, which run once
        try:
            adamw(self)
        finally:
            self.param_groups = every

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # Adam's expects its own state of every parameter


def _update(p: nn.Parameter, grad: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> None:
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(grad)
    maps: Maps = group["maps"]
    weights, grads, buffers = (maps.of(x) for x in (p.detach(), grad, state["momentum_buffer"]))
    options = {name: group[name] for name in (*OPTIONS, "lr", "weight_decay")}
    muon(weights, [g.contiguous() for g in grads], buffers, has_complex=False, **options)

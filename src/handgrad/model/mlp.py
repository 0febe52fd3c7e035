"""The feed-forward layer with its parameters.

plain   a_7 = a_6 w_6 + b_6                           a_8 = g(a_7)            a_9 = a_8 w_8 + b_8
gated   gate = a_6 w_gate,  up = a_6 w_up             a_8 = g(gate) ∘ up      a_9 = a_8 w_8
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops import activation, gated
from . import branches
from .config import ModelConfig
from .layers import Affine, Linear
from .norms import Norm
from .parts import Parts, part
from .passes import Pass


class MLP(Parts):
    """`expand` is w_6, or w_up beside `gate`; `contract` is w_8. A family may store gate and up in one matrix."""

    gate: Affine = part("gate")
    expand: Affine = part("expand")
    gate_expand: Affine = part("gate_expand")
    contract: Affine = part("contract")

    def __init__(self, config: ModelConfig, device: torch.device | None):
        super().__init__()
        c, names, stored = config, config.table.names, config.table.stored
        self.g, self.gated = c.activation, c.gated
        hidden = c.hidden_width
        if "mlp.gate_expand" in names:
            self.inputs: tuple[str, ...] = ("gate_expand",)
        else:
            self.inputs = ("gate", "expand") if c.gated else ("expand",)
        for name in self.inputs:
            parts = {"gate": hidden, "up": hidden} if name == "gate_expand" else None
            width = sum(parts.values()) if parts else hidden
            layer = Linear(c.d_model, width, c.mlp_bias, device, stored=stored, parts=parts)
            self.add(name, names[f"mlp.{name}"], layer)
        contract = Linear(hidden, c.d_model, c.mlp_bias, device, stored=stored)
        self.add("contract", names["mlp.contract"], contract)

    def projections(self) -> Sequence[Affine]:
        """The layers that read a_6."""
        return [getattr(self, name) for name in self.inputs]

    def forward(self, a_6: Tensor, run: Pass) -> list[Tensor]:
        """a_6 → a_7, or gate and up"""
        return branches.forward(self.projections(), a_6, run)

    def activate(self, a_7: list[Tensor]) -> Tensor:
        """a_7, or gate and up → a_8"""
        return gated.forward(a_7[0], a_7[1], self.g) if self.gated else activation.forward(a_7[0], self.g)

    def backward_activation(self, delta_8: Tensor, a_7: list[Tensor]) -> tuple[branches.ErrorSignals, Tensor]:
        """Δ_8 → Δ_7, or the error signals of gate and up; and a_8"""
        if self.gated:
            *parts, a_8 = gated.backward(delta_8, a_7[0], a_7[1], self.g)
        else:
            *parts, a_8 = activation.backward(delta_8, a_7[0], self.g)
        return branches.ErrorSignals(self.projections(), parts), a_8

    def letters(self) -> tuple[str, ...]:
        """The names of what `forward` returns."""
        return ("gate", "up") if self.gated else ("7",)

    def numbered(self) -> dict[str, Affine | Norm]:
        """The layers by the letter or number of their parameters: w_6, or w_gate and w_up; w_8."""
        numbers = {"expand": "up", "gate": "gate", "gate_expand": "6"} if self.gated else {"expand": "6"}
        return {**{numbers[name]: getattr(self, name) for name in self.inputs}, "8": self.contract}

"""The feed-forward layer with its parameters.

plain   a_7 = a_6 w_6 + b_6                           a_8 = g(a_7)            a_9 = a_8 w_8 + b_8
gated   gate = a_6 w_gate,  up = a_6 w_up             a_8 = g(gate) ∘ up      a_9 = a_8 w_8
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...ops import activation, gated
from ..config import ModelConfig
from ..passes.arguments import Pass
from ..steps import Step
from . import branches
from .linear import Affine, Linear
from .parts import Parts, part


class Saved(NamedTuple):
    """What the branch saves for its backward pass."""

    a_7: list[Tensor]  # a_7, or gate and up
    a_8: Tensor | None = None  # computed again from a_7, unless it may have been replaced


class Input(Protocol):
    """a_6 in the backward pass: a `BranchInput`, or the rows of one expert."""

    @property
    def signal_needed(self) -> bool: ...

    def tensor(self) -> Tensor: ...


class MLP(Parts):
    """`expand` is w_6, or w_up beside `gate`; `contract` is w_8. A family may store gate and up in one matrix.

    kind    what the family calls the layers of: "mlp", the feed-forward layer itself; "expert" or "shared" of a mixture
    width   of the layer, if it is not that of the config
    output  the name of what it computes
    """

    gate: Affine = part("gate")
    expand: Affine = part("expand")
    gate_expand: Affine = part("gate_expand")
    contract: Affine = part("contract")

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | None,
        kind: str = "mlp",
        width: int | None = None,
        output: str = "a_9",
    ):
        super().__init__()
        c, names, stored = config, config.table.names, config.table.stored
        self.g, self.gated, self.output = c.activation, c.gated, output
        hidden = width or c.hidden_width
        if f"{kind}.gate_expand" in names:
            self.inputs: tuple[str, ...] = ("gate_expand",)
        else:
            self.inputs = ("gate", "expand") if c.gated else ("expand",)
        for name in self.inputs:
            parts = {"gate": hidden, "up": hidden} if name == "gate_expand" else None
            width = sum(parts.values()) if parts else hidden
            layer = Linear(c.d_model, width, c.mlp_bias, device, stored=stored, parts=parts)
            self.add(name, names[f"{kind}.{name}"], layer)
        contract = Linear(hidden, c.d_model, c.mlp_bias, device, stored=stored)
        self.add("contract", names[f"{kind}.contract"], contract)

    def projections(self) -> Sequence[Affine]:
        """The layers that read a_6."""
        return [getattr(self, name) for name in self.inputs]

    def forward(self, a_6: Tensor, run: Pass) -> tuple[Tensor, Saved]:
        """a_6 → a_7, or gate and up → a_8 → a_9"""
        a_7 = branches.forward(self.projections(), a_6, run, dtype=run.operand)
        if run.observer is not None:
            a_7 = [run.at(f"a_{letter}", x) for letter, x in zip(self.letters(), a_7, strict=True)]
        a_8 = run.at("a_8", self.activate(a_7))
        a_9 = run.at(self.output, self.contract.forward(a_8, run))
        return a_9, Saved(a_7, a_8 if run.edited else None)

    def backward(self, delta_9: Tensor, saved: Saved, a_6: Input, run: Pass) -> Tensor | None:
        """Δ_9 → Δ_8 → Δ_7, or the error signals of gate and up → Δ_6"""
        return self.backward_gated(delta_9, saved, a_6, run)[0]

    def backward_gated(
        self, delta_9: Tensor, saved: Saved, a_6: Input, run: Pass, gate: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The same if every row of the output was multiplied by its gate (n); and Δ_g = ⟨Δ_9 w_8ᵗ, a_8⟩ + ⟨Δ_9, b_8⟩"""
        upstream = self.contract.upstream(delta_9, run)
        delta_8 = alone = self.contract.backward(delta_9, run, None, upstream)
        if gate is not None:
            gate = gate[:, None].to(delta_9.dtype)
            delta_9, delta_8, upstream, b = delta_9 * gate, alone * gate, None, delta_9
        delta_8 = run.at("delta_8", delta_8)
        parts, a_8 = self.backward_activation(delta_8, saved.a_7)
        a_8 = a_8 if saved.a_8 is None else saved.a_8
        delta_g = None
        if gate is not None:
            delta_g = (alone * a_8).sum(1)
            if (bias := self.contract.plain().added_bias()) is not None:
                delta_g += b @ bias
        self.contract.accumulate(delta_9, a_8, run, upstream)
        del a_8, delta_8, alone, upstream  # the largest tensors here
        if run.observer is not None:
            parts = [run.at(f"delta_{letter}", x) for letter, x in zip(self.letters(), parts, strict=True)]
        return branches.ErrorSignals(self.projections(), parts).backward(a_6.tensor(), run, a_6.signal_needed), delta_g

    def activate(self, a_7: list[Tensor]) -> Tensor:
        """a_7, or gate and up → a_8"""
        return gated.forward(a_7[0], a_7[1], self.g) if self.gated else activation.forward(a_7[0], self.g)

    def backward_activation(self, delta_8: Tensor, a_7: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Δ_8 → Δ_7, or the error signals of gate and up; and a_8"""
        if self.gated:
            *parts, a_8 = gated.backward(delta_8, a_7[0], a_7[1], self.g)
        else:
            *parts, a_8 = activation.backward(delta_8, a_7[0], self.g)
        return parts, a_8

    def letters(self) -> tuple[str, ...]:
        """The names of what the layers that read a_6 compute."""
        return ("gate", "up") if self.gated else ("7",)

    def steps(self, reads: str) -> list[Step]:
        """The activation of that name → a_7, or gate and up → a_8 → a_9; the parameters are w_6, or w_gate and w_up; w_8."""
        numbers = {"expand": "up", "gate": "gate", "gate_expand": "6"} if self.gated else {"expand": "6"}
        hidden = tuple(f"a_{letter}" for letter in self.letters())
        return [
            Step("expand", "linear", (reads,), hidden, {numbers[name]: getattr(self, name) for name in self.inputs}),
            Step("activation", "gated" if self.gated else "activation", hidden, ("a_8",)),
            Step("contract", "linear", ("a_8",), (self.output,), {"8": self.contract}),
        ]

    def joining(self) -> list[Affine]:
        """The layers that write to the stream."""
        return [self.contract]

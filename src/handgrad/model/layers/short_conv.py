"""The short causal convolution with gates, with its parameters: LFM2 has it in place of attention in some blocks.

a_2 → B, C, x → z = B ∘ x → c = conv(z) → a_3 = C ∘ c → projection a_4;   the first layer is w_2, out is w_3
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.short_conv import Borders, product
from ..config import ModelConfig
from ..passes.arguments import Pass
from ..steps import Step
from . import branches
from .branches import BranchInput
from .linear import Affine, Linear
from .parts import Parts, part
from .taps import Taps

LETTERS = ("B", "C", "x")


class Computed(NamedTuple):
    """What is between the two products."""

    z: Tensor  # (n, d)
    c: Tensor  # (n, d)
    a_3: Tensor  # (m, d)


class Saved(NamedTuple):
    """What the branch saves for its backward pass."""

    gates: list[Tensor]  # B, C, x (n, d)
    computed: Computed | None = None  # computed again from them, unless it may have been replaced


class ShortConv(Parts):
    """B, C and x of one layer, the taps, and the projection."""

    gates: Affine = part("gates")
    taps: Taps = part("taps")
    out: Affine = part("out")

    def __init__(self, config: ModelConfig, device: torch.device | None):
        super().__init__()
        c, names, d = config, config.table.names, config.d_model
        stored, parts = c.table.stored, dict.fromkeys(LETTERS, d)
        self.add("gates", names["conv.gates"], Linear(d, 3 * d, c.conv_bias, device, stored=stored, parts=parts))
        self.add("taps", names["conv.taps"], Taps(d, c.conv_taps, c.conv_bias, device))
        self.add("out", names["conv.out"], Linear(d, d, c.conv_bias, device, stored=stored))

    def projections(self) -> list[Affine]:
        """The layers that read a_2."""
        return [self.gates]

    def forward(self, a_2: Tensor, run: Pass) -> tuple[Tensor, Saved]:
        """a_2 → B, C and x → a_3 → a_4"""
        gates = branches.forward([self.gates], a_2, run)
        if run.observer is not None:
            gates = [run.at(f"a_{letter}", x) for letter, x in zip(LETTERS, gates, strict=True)]
        computed = self._compute(gates, run)
        a_3 = run.at("a_3", computed.a_3)
        a_4 = run.at("a_4", self.out.forward(a_3, run))
        return a_4, Saved(gates, computed._replace(a_3=a_3) if run.edited else None)

    def _compute(self, gates: list[Tensor], run: Pass) -> Computed:
        """z = B ∘ x,  c = conv(z),  a_3 = C ∘ c of the rows that are needed"""
        b_gate, c_gate, x = gates
        stream = self.taps.weight.dtype
        z = _seen("a_z", product(b_gate, x, stream), run)
        if run.cache is not None:
            earlier_and_new, new = run.cache.continued(z)
            c = self.taps.forward(earlier_and_new, Borders((), self.taps.count, z.device))[new]
        else:
            c = self.taps.forward(z, self._borders(run, z))
        c, rows = _seen("a_conv", c, run), slice(None) if run.query_rows is None else run.query_rows
        return Computed(z, c, product(c_gate[rows], c[rows], run.operand or stream))

    def backward(self, delta_4: Tensor, saved: Saved, a_2: BranchInput, run: Pass) -> Tensor | None:
        """Δ_4 → Δ_3 → Δ_C and Δ_c → Δ_z → Δ_B and Δ_x → Δ_2, if it is needed"""
        b_gate, c_gate, x = saved.gates
        computed = saved.computed or self._compute(saved.gates, run._replace(observer=None))
        stream = self.taps.weight.dtype
        upstream = self.out.upstream(delta_4, run)
        delta_3 = run.at("delta_3", self.out.backward(delta_4, run, None, upstream))
        self.out.accumulate(delta_4, computed.a_3, run, upstream)
        if run.query_rows is not None:
            delta_3 = delta_3.new_zeros(x.shape).index_copy_(0, run.query_rows, delta_3)
        delta_c = _seen("delta_conv", product(delta_3, c_gate, stream), run)
        borders = self._borders(run, delta_c)
        self.taps.accumulate(delta_c, computed.z, borders, run)
        delta_z = _seen("delta_z", self.taps.backward(delta_c, borders), run)
        parts = [product(*pair, stream) for pair in ((delta_z, x), (delta_3, computed.c), (delta_z, b_gate))]
        if run.observer is not None:
            parts = [run.at(f"delta_{letter}", x) for letter, x in zip(LETTERS, parts, strict=True)]
        return branches.ErrorSignals([self.gates], parts).backward(a_2.tensor(), run, a_2.signal_needed)

    def _borders(self, run: Pass, z: Tensor) -> Borders:
        return Borders(run.spans, self.taps.count, z.device)

    def steps(self, reads: str) -> list[Step]:
        """The activation of that name → B, C, x → a_3 → a_4; the parameters are w_2, the columns w_B, w_C and w_x side by
        side, w_conv and w_3."""
        gates = tuple(f"a_{letter}" for letter in LETTERS)
        return [
            Step("gates", "linear", (reads,), gates, {"2": self.gates}),
            Step("convolution", "convolution", gates, ("a_3",), {"conv": self.taps}, ("delta_z", "delta_conv")),
            Step("out_projection", "linear", ("a_3",), ("a_4",), {"3": self.out}),
        ]


def _seen(name: str, x: Tensor, run: Pass) -> Tensor:
    """Show a tensor inside the step to the observer, who may replace it where the pass is edited."""
    if run.edited:
        return run.at(name, x)
    if run.observer is not None:
        run.observer.note(name, x)
    return x

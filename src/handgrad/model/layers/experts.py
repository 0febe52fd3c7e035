"""A mixture of experts with its parameters: a router, experts that are feed-forward layers, and one that all tokens share.

    a_scores = a_6 w_router   (n, E)        a_gates (n, k), of the k experts that each token goes to
    a_experts = their outputs y side by side (n, k·d)        a_9 = Σ g y + a_shared, times σ(a_6 v) where the family has v

Rows are sorted by expert, and each expert computes its own rows: no token is dropped, and an expert without a row costs
nothing. Only an observer needs `a_experts`; without one, a row of y is added to a_9 as soon as it is computed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops import experts
from ...ops.routing import Routing
from ..config import ModelConfig
from ..passes.arguments import Pass
from ..steps import Step
from . import mlp
from .branches import BranchInput
from .hookless import Layers
from .linear import Affine, Linear
from .mlp import MLP
from .parts import Parts, part

SELECTION = (
    "e_score_correction_bias"  # of a router with sigmoids: (E), added to them in order to choose. It gets no gradient
)


class Saved(NamedTuple):
    """What the branch saves for its backward pass."""

    scores: Tensor  # (n, E)
    gates: Tensor  # (n, k)
    chosen: Tensor  # (n, k)
    experts: list[mlp.Saved | None]  # of every expert that has rows
    shared: mlp.Saved | None = None
    shared_score: Tensor | None = None  # (n, 1)
    outputs: Tensor | None = None  # a_experts and a_shared, if they may have been replaced
    shared_output: Tensor | None = None


class Rows(NamedTuple):
    """The rows of a_6 that one expert has read."""

    a: Tensor
    signal_needed: bool

    def tensor(self) -> Tensor:
        return self.a


class Experts(Parts):
    """A mixture of experts in the place of the feed-forward layer."""

    router: Affine = part("router")
    experts: Any = part("experts")  # a list of MLP
    shared: MLP = part("shared")
    shared_gate: Affine = part("shared_gate")

    def __init__(self, config: ModelConfig, device: torch.device | None):
        super().__init__()
        c, names, stored = config, config.table.names, config.table.stored
        assert c.n_experts is not None and c.experts_per_token is not None
        self.g, self.gated = c.activation, True
        self.routing = Routing(
            c.experts_per_token, c.router, c.normalized_gates, c.gate_scale, c.expert_groups, c.groups_per_token
        )
        router = Linear(c.d_model, c.n_experts, c.mlp_bias, device, stored=stored)
        if c.router == "sigmoid":
            router.register_parameter(SELECTION, nn.Parameter(torch.empty(c.n_experts, device=device), False))
        self.add("router", names["mlp.router"], router)
        own = (MLP(c, device, "expert", c.expert_width) for _ in range(c.n_experts))
        self.add("experts", names["mlp.experts"], Layers(own))
        if c.d_shared is not None:
            self.add("shared", names["mlp.shared"], MLP(c, device, "shared", c.d_shared, "a_shared"))
        if "mlp.shared_gate" in names:
            self.add("shared_gate", names["mlp.shared_gate"], Linear(c.d_model, 1, False, device, stored=stored))

    def forward(self, a_6: Tensor, run: Pass) -> tuple[Tensor, Saved]:
        """a_6 → a_scores → a_gates; a_6 of every expert's tokens → a_experts; both → a_9"""
        scores = run.at("a_scores", self.router.forward(a_6, run))
        chosen = experts.choose(scores, self.routing, getattr(self.router.plain(), SELECTION, None))
        chosen = run.at("chosen", chosen)
        if run.routers is not None:
            run.routers.count(scores, chosen)
        gates = run.at("a_gates", experts.gates(scores, chosen, self.routing))
        a_9 = scores.new_zeros(len(a_6), self.router.plain().f_in)
        outputs: Tensor | None = None
        saved: list[mlp.Saved | None] = []
        if run.observer is not None:
            outputs = a_9.new_empty(chosen.numel(), a_9.shape[1])
        places = experts.by_expert(chosen, len(self.experts))
        for expert, rows in zip(self.experts, places, strict=True):
            if not len(rows):
                saved.append(None)
                continue
            with run.weights.part() as weights:
                part = run.of_rows(rows // self.routing.k, len(a_6))._replace(weights=weights)
                y, own = expert.forward(a_6[rows // self.routing.k], part)
            saved.append(own)
            if outputs is None:
                self._add(a_9, y, rows, gates)
            else:
                outputs[rows] = y
        if outputs is not None:
            outputs = run.at("a_experts", outputs.view(len(a_6), -1))
            for rows in places:
                self._add(a_9, outputs.view(-1, a_9.shape[1])[rows], rows, gates)
        found = Saved(scores, gates, chosen, saved, outputs=outputs if run.edited else None)
        return self._add_shared(a_9, found, a_6, run)

    def _add(self, a_9: Tensor, y: Tensor, rows: Tensor, gates: Tensor) -> None:
        """Add the rows g y of one expert."""
        a_9.index_add_(0, rows // self.routing.k, y.mul_(gates.view(-1)[rows, None]))

    def _add_shared(self, a_9: Tensor, saved: Saved, a_6: Tensor, run: Pass) -> tuple[Tensor, Saved]:
        """a_9 + a_shared, or + σ(a_6 v) a_shared"""
        if self.has("shared"):
            a_shared, own = self.shared.forward(a_6, run)
            saved = saved._replace(shared=own, shared_output=a_shared if run.edited else None)
            if self.has("shared_gate"):
                score = run.at("a_shared_gate", self.shared_gate.forward(a_6, run))
                saved = saved._replace(shared_score=score)
                a_shared = torch.sigmoid(score) * a_shared
            a_9 += a_shared
        return run.at("a_9", a_9), saved

    def backward(self, delta_9: Tensor, saved: Saved, a_6: BranchInput, run: Pass) -> Tensor | None:
        """Δ_9 → that of every expert's rows, and Δ_g → Δ_s, to which the router's own losses add; their sum over the
        experts and the router is Δ_6"""
        rows = Rows(a_6.tensor(), a_6.signal_needed)
        delta = torch.zeros_like(delta_9) if rows.signal_needed else None
        delta_g = self._backward_experts(delta_9, saved, rows, delta, run)
        delta_g = run.at("delta_gates", delta_g)
        delta_s = experts.backward(delta_g, saved.scores, saved.chosen, self.routing)
        if run.routers is not None:
            delta_s += run.routers.delta(saved.scores)
        delta_s = run.at("delta_scores", delta_s)
        _backward_linear(self.router, delta_s, rows.a, delta, run)
        if self.has("shared"):
            self._backward_shared(delta_9, saved, rows, delta, run)
        return delta

    def _backward_experts(self, delta_9: Tensor, saved: Saved, a: Rows, delta: Tensor | None, run: Pass) -> Tensor:
        """Add every expert's part to Δ_6, and return Δ_g (n, k)."""
        k, gates = self.routing.k, saved.gates
        if run.observer is not None:
            alone = run.at("delta_experts", (gates[:, :, None] * delta_9[:, None]).to(delta_9.dtype).flatten(1))
        delta_g = gates.new_zeros(gates.numel())
        for expert, own, rows in zip(
            self.experts, saved.experts, experts.by_expert(saved.chosen, len(self.experts)), strict=True
        ):
            tokens = rows // k
            part = run.of_rows(tokens, len(delta_9))
            if own is None:
                _no_rows(expert, delta_9, a.a, part)
                continue
            its = Rows(a.a[tokens], a.signal_needed)
            above = alone.view(-1, delta_9.shape[1])[rows] if run.edited else delta_9[tokens]
            with run.weights.part() as weights:
                part = part._replace(weights=weights)
                signal, of_gate = expert.backward_gated(
                    above, own, its, part, None if run.edited else gates.view(-1)[rows]
                )
            if of_gate is not None:
                delta_g[rows] = of_gate.to(delta_g.dtype)
            if delta is not None:
                delta.index_add_(0, tokens, signal)
        if saved.outputs is not None:  # an edit may have changed them
            return (saved.outputs.view(*gates.shape, -1) * delta_9[:, None]).sum(2)
        return delta_g.view(gates.shape)

    def _backward_shared(self, delta_9: Tensor, saved: Saved, a: Rows, delta: Tensor | None, run: Pass) -> None:
        """Add the part of the shared expert to Δ_6."""
        own, score = saved.shared, saved.shared_score
        signal: Tensor | None
        of_gate: Tensor | None
        assert own is not None
        if score is None:
            signal = self.shared.backward(run.at("delta_shared", delta_9), own, a, run)
        else:
            sigma = torch.sigmoid(score)
            alone = run.at("delta_shared", sigma * delta_9) if run.observer is not None else delta_9
            if saved.shared_output is not None:
                signal = self.shared.backward(alone, own, a, run)
                of_gate = (saved.shared_output * delta_9).sum(1)
            else:
                signal, of_gate = self.shared.backward_gated(delta_9, own, a, run, sigma[:, 0])
            assert of_gate is not None
            delta_z = run.at("delta_shared_gate", of_gate[:, None] * sigma * (1 - sigma))
            _backward_linear(self.shared_gate, delta_z, a.a, delta, run)
        if delta is not None:
            delta += signal  # type: ignore[arg-type]

    def activate(self, a_7: list[Tensor]) -> Tensor:
        """gate and up of the shared expert → a_8"""
        return self.shared.activate(a_7)

    def backward_activation(self, delta_8: Tensor, a_7: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Δ_8 of the shared expert → the error signals of gate and up; and a_8"""
        return self.shared.backward_activation(delta_8, a_7)

    def joining(self) -> list[Affine]:
        """The layers that write to the stream."""
        return [expert.contract for expert in (*self.experts, *([self.shared] if self.has("shared") else []))]

    def steps(self, reads: str) -> list[Step]:
        """The activation of that name → a_scores → a_gates; both → a_experts; the first → a_shared; all → a_9"""
        layers = {
            f"{letter}_{e}": layer
            for e, expert in enumerate(self.experts)
            for step in expert.steps(reads)
            for letter, layer in step.layers.items()
        }
        steps = [
            Step("router", "linear", (reads,), ("a_scores",), {"router": self.router}),
            Step("gates", "router", ("a_scores",), ("a_gates",)),
            Step("experts", "experts", (reads, "a_scores"), ("a_experts",), layers),
        ]
        mixed = ["a_gates", "a_experts"]
        if self.has("shared"):
            steps += self.shared.steps(reads)
            mixed.append("a_shared")
        if self.has("shared_gate"):
            steps.append(Step("shared_gate", "linear", (reads,), ("a_shared_gate",), {"shared": self.shared_gate}))
            mixed.append("a_shared_gate")
        return [*steps, Step("mixture", "mixture", tuple(mixed), ("a_9",))]


def _backward_linear(layer: Affine, delta: Tensor, a: Tensor, into: Tensor | None, run: Pass) -> None:
    """Add the gradients of a layer that reads a_6, and its part of Δ_6 if that is needed."""
    upstream = layer.upstream(delta, run)
    layer.accumulate(delta, a, run, upstream)
    if into is not None:
        layer.backward(delta, run, into, upstream)


def _no_rows(expert: MLP, delta_9: Tensor, a: Tensor, run: Pass) -> None:
    """The gradient of an expert that no token goes to is 0, and not missing: an optimizer counts it as a step, and other
    processes may be waiting for it."""
    if any(p.requires_grad for p in expert.parameters()):
        for layer in (*expert.projections(), expert.contract):
            plain = layer.plain()
            layer.accumulate(delta_9.new_empty(0, sum(plain.widths)), a.new_empty(0, plain.f_in), run)


def feed_forward(config: ModelConfig, i: int, device: torch.device | None) -> MLP | Experts:
    """What follows the second norm of block i."""
    return Experts(config, device) if config.sparse_block(i) else MLP(config, device)

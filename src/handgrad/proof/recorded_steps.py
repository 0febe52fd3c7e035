"""Every step of a pass in mixed precision, computed again in float64 from what it was given in that pass.

    a w + b, Δ wᵗ, aᵗ Δ         operands rounded to bfloat16, as products read them
    everything between them     the recorded inputs, and autograd from the recorded error signals of the outputs

So nothing is left of the errors of earlier steps, which would hide a wrong formula. `Inside` has errors of what a step
rounds where nothing is recorded.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..model.block import Block
from ..model.layers.linear import Affine, QueryKeyValue
from ..model.steps import signal
from ..model.storage.packed import Packed
from ..model.storage.weights import Weights
from .reference import (
    ACTIVATIONS,
    Change,
    block_weights,
    convolved,
    reference_logits,
    reference_norm,
    scores,
    turned,
    weight_and_bias,
    weighted,
    with_sink,
)
from .reference_experts import choose, gated, gates_of, mixed, mixture_of, outputs
from .reference_model import Part, ReferenceModel, differentiate, looked_up
from .wide_layers import row_groups


def rounded(x: Tensor) -> Tensor:
    """What a product reads."""
    return x.bfloat16().double()


def _stored(x: Tensor) -> Tensor:
    """x in bfloat16, and its error signal as well"""
    return _Stored.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        return rounded(delta)


class _Product(torch.autograd.Function):
    """a w, and in the backward pass Δ wᵗ and aᵗ Δ, of rounded operands; `again` is a in the last of them"""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, again: Tensor) -> Tensor:
        right = rounded(w)
        ctx.operands = right, rounded(again)
        return rounded(a) @ right

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        (w, again), delta = ctx.operands, rounded(delta)
        return delta @ w.T, again.T @ delta, None


class _Unpacked(Weights):
    """Packed matrices as products read them."""

    def unpacked(self, matrix: Packed, dtype: torch.dtype) -> Tensor:
        return matrix.unpack(dtype=torch.bfloat16).to(dtype)


class Inside(NamedTuple):
    """Errors of what is rounded inside steps.

    change   perturbs ρ and Δ_raw of attention, the factors of an adapter and what is between them
    nudge    moves the outputs of norms and activations, relative to their size, where the backward pass computes them again:
             one that is almost halfway between two numbers of bfloat16 may then be rounded to the other
    """

    change: Change = lambda x: x
    nudge: float = 0.0

    def value(self, x: Tensor) -> Tensor:
        """x, changed in the forward pass alone"""
        return x + (self.change(x) - x).detach()

    def signal(self, x: Tensor) -> Tensor:
        """x, of which the error signal alone is changed"""
        changed = self.change(x)
        return x.detach() + (changed - changed.detach())

    def affine(self, layer: Affine, a: Tensor, computed: Tensor | None) -> Tensor:
        """a w + b, and an adapter's branch; `computed` is a before it was rounded, if it is computed again"""
        plain, again = layer.plain(), a.detach()
        if self.nudge and computed is not None:
            again = computed + self.nudge * (computed.abs() + computed.abs().mean(1, keepdim=True))
        out: Tensor = _Product.apply(a, plain.effective_weight(_Unpacked()), again)  # type: ignore[no-untyped-call]
        if layer.adapted:
            lora: Any = layer
            h = self.change(a @ self.value(lora.down))
            out = out + lora.scale * self.signal(h @ self.value(lora.up))
            if lora.magnitude is not None:
                out = self.signal(out) * lora.magnitude / lora.column_norms(_Unpacked())
        b = plain.added_bias()
        if b is not None and isinstance(plain, QueryKeyValue) and not plain.key_bias_matters:
            q, k, v = torch.split(b, plain.widths)
            b = torch.cat([q, k.detach(), v])  # its gradient is 0 (29)
        return out if b is None else out + b


class _Steps:
    """Steps that are computed from what was recorded: `read` gives an input, `write` takes a result."""

    def __init__(self, seen: Mapping[str, Tensor]):
        self.seen, self.leaves, self.values = seen, dict[str, Tensor](), dict[str, Tensor]()
        self.total = torch.zeros((), dtype=torch.float64)  # of which autograd takes the derivatives

    def read(self, name: str, x: Tensor | None = None) -> Tensor:
        """The recorded tensor, or x"""
        if name not in self.leaves:
            self.leaves[name] = (self.seen[name] if x is None else x).detach().double().requires_grad_()
        return self.leaves[name]

    def write(self, name: str, x: Tensor, delta: Tensor | None = None) -> None:
        """A result, and the error signal that its step was given: the recorded one, or Δ"""
        self.values[name] = x.detach()
        self.total = self.total + (x * (self.seen[signal(name)].double() if delta is None else delta)).sum()

    def part(self, parameters: Mapping[str, Tensor]) -> Part:
        """All results, the error signals of all inputs, and the gradients"""
        wanted = [*self.leaves.values(), *parameters.values()]
        found = torch.autograd.grad(self.total, wanted, allow_unused=True)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]
        deltas = dict(zip(map(signal, self.leaves), grads, strict=False))
        return Part(self.values, deltas, dict(zip(parameters, grads[len(deltas) :], strict=True)))


class RecordedSteps:
    """The steps of a pass of the reference's model; `recorded` are its tensors by name."""

    def __init__(self, reference: ReferenceModel, recorded: Mapping[str, Tensor]):
        self.reference, self.layers, self.config = reference, reference.layers, reference.model.config
        heads = ("q", "k", "v", *(f"delta_{x}" for x in ("q", "k", "v", "x_q", "x_k")))  # (h, n, w) → (n, h w)
        flat = {x: recorded[x].transpose(0, 1).flatten(1) for x in recorded if x.rpartition(".")[2] in heads}
        self.seen: dict[str, Tensor] = {**recorded, **flat}
        routed = [x.double() for name, x in recorded.items() if name.endswith(".a_scores")]
        self.terms = reference.terms_of(routed) if reference.with_routers else None

    @torch.enable_grad()
    def parts(self, errors: Sequence[Inside]) -> Iterator[list[Part]]:
        """What the head, the blocks from the last to the first, and the embeddings compute with each of these errors."""
        n, reference = self.config.n_blocks, self.reference
        ends = [self._readout(inside) for inside in errors]
        yield ends
        for i in reversed(range(n)):
            parts = [self._block(i, inside) for inside in errors]
            for part in parts:  # nothing is computed between two blocks
                if i:
                    part.values[f"blocks.{i}.a_1"] = self.seen[f"blocks.{i - 1}.a_10"].double()
                    part.deltas[f"blocks.{i - 1}.delta_10"] = self.seen[f"blocks.{i}.delta_1"].double()
                else:
                    a_1 = self.layers.embeddings(reference.ids, reference.positions)
                    part.values["blocks.0.a_1"] = a_1.detach()
            yield parts
        for p, name in self.layers.names.items():
            if p.requires_grad and self.layers.number_of(name) is None:
                for rows in row_groups(len(p)):
                    yield [Part({}, {}, {name: self._table(p, rows, end.grads.get(name))}, rows) for end in ends]

    def _block(self, i: int, inside: Inside) -> Part:
        """a_1, Δ_10 → the tensors of block i"""
        block, steps, c = self.layers.layer(i), _Steps(self.seen), self.reference.choices
        again: dict[str, Tensor] = {}  # what the backward pass computes a second time
        for step in block.steps():
            inputs = [steps.read(f"blocks.{i}.{name}") for name in step.inputs]
            outputs, layers = [f"blocks.{i}.{name}" for name in step.outputs], list(step.layers.values())
            if step.kind == "attention":
                projected = self._projected(block, inputs[0], again.get(step.inputs[0]), inside)
                self._attention(i, block, projected, steps, inside)
            elif step.kind == "linear":
                before = again.get(step.inputs[0])
                results = torch.cat([inside.affine(layer, inputs[0], before) for layer in layers], 1)
                if outputs[0].endswith(".a_shared") and block.mlp.has("shared_gate"):
                    results = inside.signal(results)  # Δ_8 is multiplied by the gate after its product, not before
                for name, x in zip(outputs, self._split(results, outputs), strict=True):
                    steps.write(name, x)
            elif step.kind == "convolution":
                self._convolution(f"blocks.{i}.", inputs, layers[0], steps)
            elif step.kind == "norm":
                steps.write(outputs[0], reference_norm(inputs[0], weight_and_bias(layers[0]), c.norm, c.eps))
            elif step.kind == "add":
                steps.write(outputs[0], inputs[0] + step.scale * torch.stack(inputs[1:]).sum(0))
            elif step.kind in ("router", "experts"):
                if step.kind == "router" and self.terms is not None:
                    steps.total = steps.total + self.terms.of_block(inputs[0])
                steps.write(outputs[0], self._mixture(step.kind, block.mlp, inputs, inside))
            elif step.kind == "mixture":
                steps.write(outputs[0], self._mixed(inputs, inside))
            else:
                steps.write(outputs[0], gated(c.g, *inputs) if step.kind == "gated" else ACTIVATIONS[c.g](inputs[0]))
            if step.kind in ("norm", "gated", "activation", "convolution"):
                again[step.outputs[0]] = steps.values[outputs[0]]
        return steps.part(self.layers.parameters(i, block))

    @staticmethod
    def _projected(block: Block, a_2: Tensor, before: Tensor | None, inside: Inside) -> list[Tensor]:
        """a_2 → what the layers of q, k and v compute, all heads side by side"""
        found: list[Tensor] = []
        for layer in block.attn.projections():
            out = inside.affine(layer, a_2, before)
            found += [x.flatten(1) for x in layer.plain().split(out)] if layer.plain().parts else [out]
        return found

    def _attention(self, i: int, block: Block, projected: list[Tensor], steps: _Steps, inside: Inside) -> None:
        """What the layers of q, k and v compute → q, k, v, normalized and rotated; those → a_3. As in the heads,
        the softmax's backward pass is Δ_ρ ∘ ρ − ρ ∘ (Δ_3 ⊖ a_3) of the rounded a_3 and Δ_3."""
        here, c, weights = f"blocks.{i}.", self.reference.choices, block_weights(block, self.config)
        heads: dict[str, Tensor] = {}
        for letter, name, part in zip("qkv", block.attn.projected(), projected, strict=True):
            steps.write(f"{here}a_{name}", part)
            del steps.values[f"{here}a_{name}"]  # recorded is what comes of it: q, k and v
            own = torch.split(steps.read(f"{here}a_{name}", part), [*self.reference.lengths])
            gain, count = weights.get(f"{letter}_norm"), len(weights[letter])
            turn = [torch.cat(turned([*y.chunk(count, 1)], gain, c, i) if letter != "v" else [y], 1) for y in own]
            computed = steps.values[here + letter] = torch.cat(turn)
            heads[letter] = computed + (self.seen[here + letter] - computed).detach()
        delta, found = rounded(self.seen[here + "delta_3"]), []
        shift = (delta * self.seen[here + "a_3"]).view(len(delta), len(weights["q"]), -1).sum(2)  # Δ_3 ⊖ a_3 (n, h)
        for start, length in zip(self.reference.starts, self.reference.lengths, strict=True):
            rows = slice(start, start + length)
            q, k, v = ([*heads[letter][rows].chunk(len(weights[letter]), 1)] for letter in "qkv")
            seen = scores(q, k, c, i, lambda name, x: inside.signal(x) if name == "raw" else x)
            lse = with_sink(seen, weights.get("sink")).logsumexp(2)
            found.append(weighted(inside.value(torch.exp(seen - lse.detach()[..., None])), v))
            steps.total = steps.total - (lse.T * shift[rows]).sum()
        steps.write(here + "a_3", torch.cat(found), delta)

    def _convolution(self, here: str, gates: list[Tensor], taps: Any, steps: _Steps) -> None:
        """B, C, x → z; that → c of every sequence; that and C → a_3"""
        b_gate, c_gate, x = gates
        steps.write(here + "a_z", b_gate * x)
        parts = torch.split(steps.read(here + "a_z"), [*self.reference.lengths])
        steps.write(here + "a_conv", torch.cat([convolved(z, weight_and_bias(taps)) for z in parts]))
        steps.write(here + "a_3", c_gate * steps.read(here + "a_conv"))

    def _mixture(self, kind: str, layers: Any, given: list[Tensor], inside: Inside) -> Tensor:
        """a_scores → a_gates; a_6 and a_scores → a_experts. What an expert rounds inside is not recorded."""
        m, a = mixture_of(layers), given[0]
        if kind == "router":
            return gates_of(a, choose(a, m), m.routing)

        def expert(e: int, rows: Tensor) -> Tensor:
            layer = layers.experts[e]
            both = torch.cat([inside.affine(x, rows, None) for x in layer.projections()], 1)
            gate, up = (inside.change(_stored(x)) for x in both.chunk(2, 1))
            return inside.affine(
                layer.contract, inside.change(_stored(gated(self.reference.choices.g, gate, up))), None
            )

        return outputs(a, choose(given[1], m), expert)

    @staticmethod
    def _mixed(given: list[Tensor], inside: Inside) -> Tensor:
        """a_gates, a_experts and what is shared → a_9. The error signals of gates are ⟨Δ_9 w_8ᵗ, a_8⟩, of a Δ_9 and an a_8
        that are rounded inside."""
        gates, y, *shared = given
        output, gate = shared[:1], shared[1:]  # of what is shared
        of_outputs = mixed(gates.detach(), y, *output, *(x.detach() for x in gate))
        of_gates = mixed(gates, *(inside.value(x).detach() for x in (y, *output)), *gate)
        return of_outputs + of_gates - of_gates.detach()

    def _split(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
        """x as the tensors of these names that are side by side in it"""
        return torch.split(x, [self.seen[name].shape[1] for name in names], 1)

    def _readout(self, inside: Inside) -> Part:
        """a_10 → a_11 → a_12 → the loss, and back; an adapted head's gradients"""
        reference, n, steps, head = self.reference, self.config.n_blocks, _Steps(self.seen), self.reference.model.head
        norm, c, a_11, delta_12 = self.layers.layer(n), reference.choices, steps.read("a_11"), self.seen["delta_12"]
        steps.write("a_11", reference_norm(steps.read(f"blocks.{n - 1}.a_10"), weight_and_bias(norm), c.norm, c.eps))
        parameters: dict[str, Tensor] = {**self.layers.parameters(n, norm)}
        logits, delta_11 = [], torch.zeros_like(a_11)
        if head.adapted:
            wide = self.layers.head()
            pairs = zip(head.parameters(), wide.parameters(), strict=True)
            parameters |= {self.layers.names[p]: q for p, q in pairs if p.requires_grad}
            steps.write("a_12", inside.affine(wide, a_11, None))
        else:
            for columns, (w, b) in self.layers.head_parts():
                logits.append(a_11.detach() @ rounded(w) + (0 if b is None else b))
                delta_11 += rounded(delta_12[:, columns]) @ rounded(w).T
        part = steps.part(parameters)
        if logits:
            part.values["a_12"], part.deltas["delta_11"] = torch.cat(logits, 1), delta_11
        end = differentiate(
            lambda x, _: reference.objective(reference_logits(x, reference.choices)), self.seen["a_12"].double()
        )
        part.values["loss"], part.deltas["delta_12"] = end.out, end.delta
        return part

    def _table(self, p: Tensor, rows: slice, of_head: Tensor | None) -> Tensor:
        """The gradient of some rows of an embedding, or of a head that may be tied to it"""
        model, delta_12 = self.reference.model, self.seen["delta_12"][:, rows]
        head, total = model.head.plain(), torch.zeros_like(p[rows], dtype=torch.float64)
        if of_head is not None:
            total = of_head[rows]
        elif p is head.bias:
            total = delta_12.double().sum(0)
        elif p is head.weight and not model.head.adapted:
            total = rounded(delta_12).T @ self.seen["a_11"].double()
        for table, ids in zip(model.tables().values(), (self.reference.ids, self.reference.positions), strict=False):
            if p is table.weight:
                total = total + table.scale * looked_up(ids, self.seen["blocks.0.delta_1"].double(), rows)
        return total

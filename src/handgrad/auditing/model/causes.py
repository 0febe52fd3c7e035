"""What may be wrong at a point: the terms that a tensor is the sum of, and what known mistakes would have made of it.

Everything is computed from what the audited model itself gave to the layer, so that the mistake of one layer is not blamed
on another.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...lora.injection import adapters_of, layers_of
from ...model.layers.experts import Experts
from ...model.layers.linear import Affine
from ...model.layers.norms import Norm
from ...model.steps import Step
from ...ops.loss import NO_TARGET
from ..diagnosis import Part
from . import heads, mixtures
from .convolutions import convolution_mistakes, convolution_slopes
from .evidence import Evidence, Place, Read
from .expect import expect
from .mistakes import (
    activation_mistakes,
    adapter_term,
    backward_terms,
    delta_of_logits,
    from_other_rows,
    into_other_rows,
    layer_mistakes,
    logit_mistakes,
    norm_mistakes,
    norm_terms,
    parts_of_sequences,
    slope_causes,
    with_undetached_norms,
)
from .points import MIXING, BlockSteps
from .subject import Tracked


@dataclass(frozen=True)
class Causes:
    """The arguments of `diagnose` besides the two tensors."""

    terms: dict[str, Tensor] = field(default_factory=dict)
    mistakes: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    fitted: dict[str, Tensor] = field(default_factory=dict)


class Suspects(Evidence):
    """The possible causes of a wrong tensor in one audit."""

    # ── activations ─────────────────────────────────────────────────────────────────────────────────────────────────

    def of_value(self, point: str) -> Causes:
        """Causes of a wrong activation, by the kind of the step that computes it."""
        place, a = self._place(point), self._values(point)
        if place is None:
            return Causes(mistakes=norm_mistakes(self.subject.ours.final_norm, self._last_output()))
        i, block, steps, name = place
        step = steps.makers.get(name)
        if step is None:
            return Causes(terms=self._embedding_terms(), mistakes=self._embedding_mistakes())
        if step.kind == "norm":
            return Causes(mistakes=norm_mistakes(_norm_of(step), a(step.inputs[0])))
        if step.kind == "attention":
            mistakes, fitted = self._heads(i, lambda found: self._rows(found.a_3), None, a(name))
            return Causes(mistakes=mistakes, fitted=fitted)
        if step.kind in MIXING:
            mistakes = {what: made.values[name] for what, made in self._mixture(i, backward=False).items()}
            return Causes(mixtures.parts(block, self._around_mixture(i)[0]) if step.kind == "mixture" else {}, mistakes)
        if step.kind == "convolution":
            return Causes(mistakes=convolution_mistakes(block.conv, [a(x) for x in step.inputs], self.batch.lengths))
        if step.kind == "add":
            stream, *branches = step.inputs
            terms = {f"the {steps.branch(x)} branch": step.scale * a(x) for x in branches}
            unscaled = a(stream) + sum(a(x) for x in branches)
            mistakes = {"what the branch adds were not scaled": unscaled} if step.scale != 1 else {}
            return Causes({"the residual connection": a(stream), **terms}, mistakes)
        layer = steps.layer_of(name)
        if layer is None:
            return Causes(mistakes=activation_mistakes(block.mlp, a))
        columns, read = _columns(step, name), a(step.inputs[0])
        terms, scales = adapter_term(layer, read, columns), self._adapter_scale(layer)
        mistakes = layer_mistakes(layer, read, columns)
        if steps.reader(name, "router"):
            mistakes["softmax were applied to them"] = torch.softmax(self.right.values[point], 1)
        return Causes(terms, mistakes, scales)

    def _embedding_terms(self) -> dict[str, Tensor]:
        ours = self.subject.ours
        terms = {"the tokens' embeddings": ours.embed.scale * ours.embed.w.detach()[self.batch.tokens]}
        if ours.has("positions"):
            at = torch.cat([torch.arange(n) for n in self.batch.lengths])
            terms["the positions' embeddings"] = ours.positions.w.detach()[at]
        return terms

    def _embedding_mistakes(self) -> dict[str, Tensor]:
        """Embeddings that are not scaled; learned positions that count the padding before a sequence, or from 1."""
        ours, n = self.subject.ours, self.batch.shape[1]
        if not ours.has("positions") or n > len(ours.positions.w):
            alone = ours.embed.w.detach()[self.batch.tokens]
            return {"the embeddings were not scaled": alone} if ours.embed.scale != 1 else {}
        found = {}
        if self.batch.padded:
            name = "positions counted the padding before a sequence: give position_ids"
            found[name] = torch.arange(n).repeat(self.batch.shape[0])
        if n < len(ours.positions.w):
            found["positions were counted from 1, not from 0"] = self.batch.positions.flatten() + 1
        tokens, positions = ours.embed.scale * ours.embed.w.detach()[self.batch.tokens], ours.positions.w.detach()
        return {name: tokens + positions[self._rows(at)] for name, at in found.items()}

    def of_loss(self) -> Causes:
        """Causes of a wrong loss with right activations."""
        mistakes = self._averaged(lambda x: torch.tensor(x.loss, dtype=torch.float64))
        shifted = self._unshifted()
        mistakes |= self._balanced()
        mistakes |= logit_mistakes(self.subject.ours, self._values("a_11")("a_11", padded=True), self.batch)
        mistakes["the labels were not shifted: every token is its own target"] = torch.tensor(
            shifted, dtype=torch.float64
        )
        return Causes(mistakes=mistakes, scales=self.scales())

    def _unshifted(self) -> float:
        """The loss if the label of a token were its own target; transformers shifts labels itself."""
        labels = self.batch.inputs["labels"].cpu().flatten()[self.batch.rows]
        if not (labels != NO_TARGET).any():
            return 0.0
        return expect(self.subject, replace(self.batch, targets=labels), balance=self.right.balance).loss

    # ── error signals ───────────────────────────────────────────────────────────────────────────────────────────────

    def of_signal(self, point: str) -> Causes:
        """Causes of a wrong error signal, by the kinds of the steps that read the activation."""
        place, scales = self._place(point), self.scales()
        if place is None:
            return Causes(mistakes=self._averaged(lambda x: x.signals[point]), scales=scales)
        i, block, steps, name = place
        a, d, readers = self._values(point), self._signals(point), steps.readers(name)
        if any(step.kind in MIXING for step in readers):
            made = self._mixture(i, backward=True)
            mistakes = {what: x.signals[name] for what, x in made.items() if name in x.signals}
            return Causes(self._mixture_terms(i).get(name, {}), mistakes, scales)
        if not readers and i == self.subject.config.n_blocks - 1:
            terms = norm_terms(self.subject.ours.final_norm, a(name), self._signals("a_11")("a_11"), "readout")
            return Causes(terms, scales=scales)
        if len(readers) != 1:
            return Causes(self._sent(place, a, d), scales=scales)
        (step,) = readers
        if step.kind == "norm":
            branch = "attention" if steps.reader(step.outputs[0], "attention") else "norm"
            return Causes(norm_terms(_norm_of(step), a(name), d(step.outputs[0]), branch), scales=scales)
        if step.kind == "add":  # else the branch has the signal of the sum
            unscaled = {"what the branch adds were not scaled": d(step.outputs[0])}
            return Causes(mistakes=unscaled, scales={**scales, "the scale of a branch": step.scale})
        if step.kind == "attention":
            delta_3 = d(step.outputs[0], padded=True)
            mistakes, fitted = self._heads(i, lambda found: self._rows(found.delta_2), delta_3, d(name))
            return Causes(mistakes=mistakes, scales=scales, fitted=fitted)
        if step.kind == "linear":
            return Causes(self._products(steps, step, d), scales=scales)
        if step.kind == "convolution":
            gates, delta_3 = [a(x) for x in step.inputs], d(step.outputs[0])
            slopes = convolution_slopes(block.conv, gates, delta_3, self.batch.lengths)
            return Causes(mistakes=slopes[step.inputs.index(name)], scales=scales)
        return Causes(*slope_causes(block.mlp, name, a, d(step.outputs[0])), scales)

    @staticmethod
    def _products(steps: BlockSteps, step: Step, d: Read, branch: str = "") -> dict[str, Tensor]:
        """What the linear layers of a step send back; nothing if one layer has several outputs."""
        if len(step.layers) < len(step.outputs):
            return {}
        names = [*step.layers] if len(step.layers) > 1 else [branch]
        parts = ((steps.layer_of(x), d(steps.joined(x))) for x in step.outputs)
        return backward_terms(dict(zip(names, parts, strict=True)))

    def _sent(self, place: Place, a: Read, d: Read) -> dict[str, Tensor]:
        """What each of several steps that read an activation sends back."""
        i, block, steps, name = place
        found: dict[str, Tensor] = {}
        for step in steps.readers(name):
            if step.kind == "add":
                found = {"the residual connection": d(step.outputs[0]), **found}
            elif step.kind == "norm":
                reader = steps.readers(step.outputs[0])[0]
                branch = "attention" if reader.kind == "attention" else "feed-forward"
                found |= norm_terms(_norm_of(step), a(name), d(step.outputs[0]), branch)
            elif step.kind == "attention":
                read, delta_3 = a(name, padded=True), d(step.outputs[0], padded=True)
                right = heads.right_choices(self.subject.config, i)
                made = heads.compute(block, self.subject.config, self.batch, read, right, delta_3)
                found["the attention branch"] = self._rows(made.delta_2)
            else:
                signals = [d(x) for x in step.outputs]
                fused = len(step.layers) < len(signals)
                deltas = [torch.cat(signals, 1)] if fused else signals
                layers = [x for x in step.layers.values() if isinstance(x, Affine)]
                sent = [x @ layer.effective_weight().t() for layer, x in zip(layers, deltas, strict=True)]
                found["the feed-forward branch"] = torch.stack(sent).sum(0)
        return found

    # ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────

    def of_gradient(self, tracked: Tracked) -> Causes:
        """Causes of a wrong parameter gradient, in the orientation of the audited parameter."""
        ours, c = self.subject.ours, self.subject.config
        name = tracked.ours
        mistakes, fitted = self.averaged(tracked), dict[str, Tensor]()
        names = c.table.names
        sequences = parts_of_sequences(self.subject, self.batch, name, self.right.balance)
        terms = {part: tracked.turned(x) for part, x in sequences.items()}
        if len(terms) > 2:
            mistakes |= {f"only {part.removeprefix('the part of ')} contributed": x for part, x in terms.items()}
        if c.tied and name == self._embed_name():
            terms |= self._tied_terms()
        path = name.rpartition(".")[0].removesuffix(".base")
        layer = layers_of(ours).get(path)
        parts = self._parts(layer, tracked) if layer is not None else {}
        inside = path.removeprefix(f"{names['blocks']}.").partition(".")
        if f"{inside[2]}.".startswith(f"{names['attn']}.") and not inside[2].endswith(f".{names['attn.out']}"):
            own = name.removeprefix(f"{names['blocks']}.{inside[0]}.{names['attn']}.")
            i = int(inside[0])
            steps = self.steps[i]
            heads_step = next(step for step in steps.steps if step.kind == "attention")
            signal = self._signals(f"blocks.{i}.")(heads_step.outputs[0], padded=True)
            known, fitted = self._heads(
                i, lambda found: tracked.turned(found.grads[own]), signal, self.seen.grads[tracked.name]
            )
            mistakes |= known
        if f"{inside[2]}.".startswith(f"{names['mlp']}.") and isinstance(ours.blocks[int(inside[0])].mlp, Experts):
            own = name.removeprefix(f"{names['blocks']}.{inside[0]}.{names['mlp']}.")
            made = self._mixture(int(inside[0]), backward=True)
            mistakes |= {what: tracked.turned(x.grads[own]) for what, x in made.items()}
            terms |= {what: tracked.turned(x) for what, x in self._mixture_terms(int(inside[0])).get(own, {}).items()}
        mistakes |= {what: tracked.turned(x) for what, x in self._wrong_rows(name, layer).items()}
        if path in (adapters := adapters_of(ours)):
            norms = with_undetached_norms(adapters[path], path, name.rpartition(".")[2], self.right.grads)
            mistakes |= {what: tracked.turned(x) for what, x in norms.items()}
        if layer is not None and layer.adapted:
            return Causes(terms, mistakes, {**self.scales(), **self._adapter_scale(layer)}, parts, fitted)
        return Causes(terms, mistakes, self.scales(), parts, fitted)

    def _wrong_rows(self, name: str, layer: Affine | None) -> dict[str, Tensor]:
        """A weight's gradient from rows that do not belong together; those of q, k and v are in `heads.py`."""
        ours, batch = self.subject.ours, self.batch
        if name == self._embed_name():
            signal = ours.embed.scale * self._signals("blocks.0.")(self.steps[0].input, padded=True)
            found = into_other_rows(ours.embed.w.detach(), batch.inputs["input_ids"], signal)
            if not self.subject.config.tied:
                return found
            of_embed, of_head = self._tied_terms().values()
            found = {what: x + of_head for what, x in found.items()}
            return found | {what: x + of_embed for what, x in self._head_from_other_rows().items()}
        if layer is None or layer.adapted or not name.endswith(".weight"):
            return {}
        if layer is ours.head:
            return self._head_from_other_rows()
        for i, steps in enumerate(self.steps):
            for name, step in steps.makers.items():
                if steps.layer_of(name) is layer and not layer.plain().parts:
                    a = self._values(f"blocks.{i}.")(step.inputs[0], padded=True)
                    delta = self._signals(f"blocks.{i}.")(steps.joined(name), padded=True)
                    return from_other_rows(layer.plain(), a, delta, batch.shape)
        return {}

    def _head_from_other_rows(self) -> dict[str, Tensor]:
        a_11, head = self._values("a_11")("a_11", padded=True), self.subject.ours.head
        delta_12 = delta_of_logits(self.subject.ours, a_11, self.batch)
        return from_other_rows(head.plain(), a_11, delta_12, self.batch.shape)

    @staticmethod
    def _adapter_scale(layer: Affine) -> dict[str, float]:
        scale = getattr(layer, "scale", 1.0)
        return {f"the adapter's scale {scale:g}": scale} if scale != 1 else {}

    def _parts(self, layer: Affine, tracked: Tracked) -> dict[str, Part]:
        """Where q, k and v, or gate and up, are in a gradient that holds them side by side."""
        plain = layer.plain()
        shape = list(tracked.turned(self.subject.ours.get_parameter(tracked.ours)).shape)
        if not plain.parts or tracked.ours.endswith(".down") or sum(plain.widths) not in shape:
            return {}
        starts = [sum(plain.widths[:i]) for i in range(len(plain.widths))]
        axis = shape.index(sum(plain.widths))
        return {
            letter: (axis, start, width) for (letter, width), start in zip(plain.parts.items(), starts, strict=True)
        }

    def _tied_terms(self) -> dict[str, Tensor]:
        """The head's and the embedding's part of a tied weight's gradient."""
        embed = self.subject.ours.embed
        kept = self.batch.tokens != self.subject.padding_row
        part = torch.zeros_like(embed.w)
        delta_1 = self.right.signals[f"blocks.0.{self.steps[0].input}"]
        part.index_add_(0, self.batch.tokens[kept], embed.scale * delta_1[kept])
        return {"the embedding's part": part, "the head's part": self.right.grads[self._embed_name()] - part}

    def _embed_name(self) -> str:
        return f"{self.subject.config.table.names['embed']}.weight"


def _norm_of(step: Step) -> Norm:
    (layer,) = step.layers.values()
    assert isinstance(layer, Norm)
    return layer


def _columns(step: Step, name: str) -> slice:
    """The columns of a layer that computes several outputs at once."""
    (layer, *_), n, j = step.layers.values(), len(step.outputs), step.outputs.index(name)
    if len(step.layers) == n or not isinstance(layer, Affine):
        return slice(None)
    width = sum(layer.plain().widths) // n
    return slice(j * width, (j + 1) * width)

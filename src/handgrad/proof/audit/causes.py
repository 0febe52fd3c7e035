"""What may be wrong at a point: the terms that a tensor is the sum of, and what known mistakes would have made of it.

Everything is computed from what the audited model itself gave to the layer, so that the mistake of one layer is not blamed
on another.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...adapters.injection import adapters_of, layers_of
from ...formatting import number as formatted
from ...model.block import Block
from ...model.layers import Affine
from ...ops.loss import NO_TARGET
from ..diagnosis import Part
from . import heads, weights
from .batch import AuditBatch
from .expect import Expected, expect
from .norms import norm_mistakes, norm_terms
from .observe import Observed
from .slopes import activation_mistakes, slope_causes
from .subject import Subject, Tracked


@dataclass(frozen=True)
class Causes:
    """The arguments of `diagnose` besides the two tensors."""

    terms: dict[str, Tensor] = field(default_factory=dict)
    mistakes: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    fitted: dict[str, Tensor] = field(default_factory=dict)


class Suspects:
    """The possible causes of a wrong tensor in one audit."""

    def __init__(self, subject: Subject, batch: AuditBatch, seen: Observed, right: Expected):
        self.subject, self.batch, self.seen, self.right = subject, batch, seen, right
        self._averages: dict[str, Expected] | None = None

    # ── activations ─────────────────────────────────────────────────────────────────────────────────────────────────

    def of_value(self, point: str) -> Causes:
        """Causes of a wrong activation."""
        block, number = self._block(point)
        a = self._values(point)
        if block is None:
            return Causes(mistakes=norm_mistakes(self.subject.ours.final_norm, a("10", last=True)))
        i = int(point.split(".")[1])
        if number in ("2", "6"):
            norm, before = (block.norm_1, a("1")) if number == "2" else (block.norm_2, a("5"))
            return Causes(mistakes=norm_mistakes(norm, before))
        if number == "3":
            mistakes, fitted = self._heads(i, lambda found: self._rows(found.a_3), None, a("3"))
            return Causes(mistakes=mistakes, fitted=fitted)
        layer, read = self._layer_into(block, number)
        if layer is not None:
            columns = self._part(layer, number)
            terms, scales = _adapter_term(layer, a(read), columns), self._adapter_scale(layer)
            return Causes(terms, _layer_mistakes(layer, a(read), columns), scales)
        if number == "5":
            return Causes(terms={"the residual connection": a("1"), "the attention branch": a("4")})
        if number == "10":
            return Causes(terms={"the residual connection": a("5"), "the feed-forward branch": a("9")})
        if number == "8":
            return Causes(mistakes=activation_mistakes(block.mlp, a))
        return Causes(terms=self._embedding_terms(), mistakes=self._embedding_mistakes())

    def _embedding_terms(self) -> dict[str, Tensor]:
        ours = self.subject.ours
        terms = {"the tokens' embeddings": ours.embed.w.detach()[self.batch.tokens]}
        if ours.has("positions"):
            at = torch.cat([torch.arange(n) for n in self.batch.lengths])
            terms["the positions' embeddings"] = ours.positions.w.detach()[at]
        return terms

    def _embedding_mistakes(self) -> dict[str, Tensor]:
        """Learned positions that count the padding before a sequence, or from 1."""
        ours, n = self.subject.ours, self.batch.shape[1]
        if not ours.has("positions") or n > len(ours.positions.w):
            return {}
        found = {}
        if self.batch.padded:
            name = "positions counted the padding before a sequence: give position_ids"
            found[name] = torch.arange(n).repeat(self.batch.shape[0])
        if n < len(ours.positions.w):
            found["positions were counted from 1, not from 0"] = self.batch.positions.flatten() + 1
        tokens, positions = ours.embed.w.detach()[self.batch.tokens], ours.positions.w.detach()
        return {name: tokens + positions[self._rows(at)] for name, at in found.items()}

    def of_loss(self) -> Causes:
        """Causes of a wrong loss with right activations."""
        mistakes = self._averaged(lambda x: torch.tensor(x.loss, dtype=torch.float64))
        shifted = self._unshifted()
        mistakes["the labels were not shifted: every token is its own target"] = torch.tensor(
            shifted, dtype=torch.float64
        )
        return Causes(mistakes=mistakes, scales=self.scales())

    def _unshifted(self) -> float:
        """The loss if the label of a token were its own target; transformers shifts labels itself."""
        labels = self.batch.inputs["labels"].cpu().flatten()[self.batch.rows]
        if not (labels != NO_TARGET).any():
            return 0.0
        return expect(self.subject, replace(self.batch, targets=labels)).loss

    # ── error signals ───────────────────────────────────────────────────────────────────────────────────────────────

    def of_signal(self, point: str) -> Causes:
        """Causes of a wrong error signal."""
        block, number = self._block(point)
        a, d = self._values(point), self._signals(point)
        scales = self.scales()
        if block is None:
            return Causes(mistakes=self._averaged(lambda x: x.signals[point]), scales=scales)
        i = int(point.split(".")[1])
        if number in ("1", "5"):
            norm, before, after, above = (
                (block.norm_1, a("1"), d("2"), d("5")) if number == "1" else (block.norm_2, a("5"), d("6"), d("10"))
            )
            name = "attention" if number == "1" else "feed-forward"
            return Causes({"the residual connection": above, **norm_terms(norm, before, after, name)}, scales=scales)
        if number == "10" and i == self.subject.config.n_blocks - 1:
            terms = norm_terms(self.subject.ours.final_norm, a("10"), self._signals("11")("11"), "readout")
            return Causes(terms, scales=scales)
        if number == "2":
            mistakes, fitted = self._heads(i, lambda found: self._rows(found.delta_2), d("3", padded=True), d("2"))
            return Causes(mistakes=mistakes, scales=scales, fitted=fitted)
        if number in ("3", "8"):
            layer = block.attn.out if number == "3" else block.mlp.contract
            return Causes(_backward_terms({"": layer}, {"": d("5" if number == "3" else "10")}), scales=scales)
        if number in ("7", "gate", "up"):
            terms, mistakes = slope_causes(block.mlp, number, a, d("8"))
            return Causes(terms, mistakes, scales)
        if number == "6":
            layers = {x: getattr(block.mlp, x) for x in block.mlp.inputs}
            names = {"gate": "gate", "expand": "up" if block.mlp.gated else "7"}
            if "gate_expand" not in layers:
                return Causes(_backward_terms(layers, {x: d(names[x]) for x in layers}), scales=scales)
        return Causes(scales=scales)

    # ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────

    def of_gradient(self, tracked: Tracked) -> Causes:
        """Causes of a wrong parameter gradient, in the orientation of the audited parameter."""
        ours, c = self.subject.ours, self.subject.config
        name = tracked.ours
        mistakes, fitted = self.averaged(tracked), dict[str, Tensor]()
        names = c.table.names
        sequences = weights.parts_of_sequences(self.subject, self.batch, name)
        terms = {part: _turned(x, tracked) for part, x in sequences.items()}
        if len(terms) > 2:
            mistakes |= {f"only {part.removeprefix('the part of ')} contributed": x for part, x in terms.items()}
        if c.tied and name == self._embed_name():
            terms |= self._tied_terms()
        path = name.rpartition(".")[0].removesuffix(".base")
        layer = layers_of(ours).get(path)
        parts = self._parts(layer, tracked) if layer is not None else {}
        inside = path.removeprefix(f"{names['blocks']}.").partition(".")
        if inside[2].startswith(f"{names['attn']}.") and not inside[2].endswith(f".{names['attn.out']}"):
            own = name.removeprefix(f"{names['blocks']}.{inside[0]}.{names['attn']}.")
            i = int(inside[0])
            signal = self._signals(f"blocks.{i}.3")("3", padded=True)
            known, fitted = self._heads(
                i, lambda found: _turned(found.grads[own], tracked), signal, self.seen.grads[tracked.name]
            )
            mistakes |= known
        mistakes |= {what: _turned(x, tracked) for what, x in self._wrong_rows(name, layer).items()}
        if path in (adapters := adapters_of(ours)):
            norms = weights.with_undetached_norms(adapters[path], path, name.rpartition(".")[2], self.right.grads)
            mistakes |= {what: _turned(x, tracked) for what, x in norms.items()}
        if layer is not None and layer.adapted:
            return Causes(terms, mistakes, {**self.scales(), **self._adapter_scale(layer)}, parts, fitted)
        return Causes(terms, mistakes, self.scales(), parts, fitted)

    def _wrong_rows(self, name: str, layer: Affine | None) -> dict[str, Tensor]:
        """A weight's gradient from rows that do not belong together; those of q, k and v are in `heads.py`."""
        ours, batch = self.subject.ours, self.batch
        if name == self._embed_name():
            signal = self._signals("blocks.0.1")("1", padded=True)
            found = weights.into_other_rows(ours.embed.w.detach(), batch.inputs["input_ids"], signal)
            if not self.subject.config.tied:
                return found
            of_embed, of_head = self._tied_terms().values()
            found = {what: x + of_head for what, x in found.items()}
            return found | {what: x + of_embed for what, x in self._head_from_other_rows().items()}
        if layer is None or layer.adapted or not name.endswith(".weight"):
            return {}
        if layer is ours.head:
            return self._head_from_other_rows()
        for i, block in enumerate(ours.blocks):
            for number in ("4", "9", *(("gate", "up") if block.mlp.gated else ("7",))):
                other, read = self._layer_into(block, number)
                if other is layer and not layer.plain().parts:
                    a = self._values(f"blocks.{i}.1")(read, padded=True)
                    delta = self._signals(f"blocks.{i}.1")({"4": "5", "9": "10"}.get(number, number), padded=True)
                    return weights.from_other_rows(layer.plain(), a, delta, batch.shape)
        return {}

    def _head_from_other_rows(self) -> dict[str, Tensor]:
        a_11, head = self._values("11")("11", padded=True), self.subject.ours.head
        delta_12 = weights.delta_of_logits(head, a_11, self.batch)
        return weights.from_other_rows(head.plain(), a_11, delta_12, self.batch.shape)

    @staticmethod
    def _adapter_scale(layer: Affine) -> dict[str, float]:
        scale = getattr(layer, "scale", 1.0)
        return {f"the adapter's scale {scale:g}": scale} if scale != 1 else {}

    def _parts(self, layer: Affine, tracked: Tracked) -> dict[str, Part]:
        """Where q, k and v, or gate and up, are in a gradient that holds them side by side."""
        plain = layer.plain()
        shape = list(_turned(dict(self.subject.ours.named_parameters())[tracked.ours], tracked).shape)
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
        part.index_add_(0, self.batch.tokens[kept], self.right.signals["blocks.0.1"][kept])
        return {"the embedding's part": part, "the head's part": self.right.grads[self._embed_name()] - part}

    def _embed_name(self) -> str:
        return f"{self.subject.config.table.names['embed']}.weight"

    def scales(self) -> dict[str, float]:
        """Numbers that are easily a factor too many or too few."""
        c, batch = self.subject.config, self.batch
        rows, width = batch.shape
        found = {
            "√d_head": c.query_width**0.5, "d_head": c.query_width, "the number of sequences": rows,
            "the number of targets": batch.n_targets, "the number of tokens": rows * width,
            "tokens per target": (rows * width) / batch.n_targets,
            "predictions per target": rows * (width - 1) / batch.n_targets, "the number of heads": c.n_heads,
            "√d_model": c.d_model**0.5, "queries per key": c.n_heads / c.kv_heads,
        }  # fmt: skip
        return {name: float(x) for name, x in found.items() if x != 1}

    def averaged(self, tracked: Tracked) -> dict[str, Tensor]:
        """A gradient with wrong averages over the sequences."""
        return self._averaged(lambda x: _turned(x.grads[tracked.ours], tracked))

    def _averaged(self, of: Callable[[Expected], Tensor]) -> dict[str, Tensor]:
        """What wrong averages over the sequences would have given."""
        each = self.batch.targets_of_each
        if len(each) < 2:
            return {}
        if self._averages is None:
            self._averages = {
                "every sequence were averaged by itself, and then all sequences, instead of summed over all targets": expect(
                    self.subject, self.batch, [n * len(each) for n in each]
                ),
                "the averages of the sequences were added, instead of all targets averaged": expect(
                    self.subject, self.batch, each
                ),
            }
        return {name: of(found) for name, found in self._averages.items()}

    # ── what the audited model computed ─────────────────────────────────────────────────────────────────────────────

    def _heads(
        self, i: int, of: Callable[[heads.Result], Tensor], delta_3: Tensor | None, seen: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What every known mistake of attention would have given, and the scale that explains best what was seen."""
        block, c = self.subject.ours.blocks[i], self.subject.config
        a_2 = self._values(f"blocks.{i}.2")("2", padded=True)

        def made(choices: heads.Heads) -> Tensor:
            return of(heads.compute(block, c, self.batch, a_2, choices, delta_3))

        known = heads.known_mistakes(c, i, block, self.batch.padded)
        found = {name: made(x) for name, x in known.items()}
        right = heads.right_choices(c, i)
        if seen is None or not torch.isfinite(seen).all():
            return found, {}
        scale = heads.fitted_scale(lambda x: made(replace(right, scale=x)) - seen, right.scale)
        if scale is None:
            return found, {}
        text = f"the scores were multiplied by {formatted(scale)}, not by 1/√d_head = {formatted(right.scale)}"
        return found, {text: made(replace(right, scale=scale))}

    def _block(self, point: str) -> tuple[Block | None, str]:
        parts = point.split(".")
        return (self.subject.ours.blocks[int(parts[1])], parts[2]) if len(parts) == 3 else (None, point)

    def _layer_into(self, block: Block, number: str) -> tuple[Affine | None, str]:
        """The linear layer that computes a point, and the point it reads."""
        if number == "4":
            return block.attn.out, "3"
        if number == "9":
            return block.mlp.contract, "8"
        if number in ("7", "gate", "up"):
            name = "gate_expand" if block.mlp.has("gate_expand") else "gate" if number == "gate" else "expand"
            return getattr(block.mlp, name), "6"
        return None, ""

    @staticmethod
    def _part(layer: Affine, number: str) -> slice:
        """The columns of a layer that computes gate and up at once."""
        if not layer.plain().parts:
            return slice(None)
        half = sum(layer.plain().widths) // 2
        return slice(0, half) if number == "gate" else slice(half, None)

    def _values(self, point: str) -> Callable[..., Tensor]:
        return self._reader(point, self.seen.values, self.right.values)

    def _signals(self, point: str) -> Callable[..., Tensor]:
        return self._reader(point, self.seen.signals, self.right.signals)

    def _reader(self, point: str, seen: dict[str, Tensor], right: dict[str, Tensor]) -> Callable[..., Tensor]:
        """Tensors of the same block: as the audited model computed them, or ours where it showed none."""
        block = point.rpartition(".")[0]

        def read(number: str, *, padded: bool = False, last: bool = False) -> Tensor:
            prefix = f"blocks.{self.subject.config.n_blocks - 1}" if last else block
            name = f"{prefix}.{number}" if prefix else number
            if name in seen:
                return seen[name] if padded else self._rows(seen[name])
            if not padded:
                return right[name]
            whole = right[name].new_zeros(len(self.batch.rows), right[name].shape[1])
            whole[self.batch.rows] = right[name]
            return whole

        return read

    def _rows(self, x: Tensor | None) -> Tensor:
        assert x is not None
        return x[self.batch.rows]


def _turned(x: Tensor, tracked: Tracked) -> Tensor:
    return x.detach().t() if tracked.transposed else x.detach()


@torch.no_grad()
def _layer_mistakes(layer: Affine, a: Tensor, columns: slice) -> dict[str, Tensor]:
    plain = layer.plain()
    w, b = layer.effective_weight()[:, columns], plain.added_bias()
    found = {}
    if layer.adapted:
        base = a @ plain.effective_weight()[:, columns]
        found["the adapter were bypassed"] = base if b is None else base + b[columns]
    if getattr(layer, "magnitude", None) is not None:
        branch: Any = layer
        plain_sum = a @ (plain.effective_weight() + branch.scale * branch.down @ branch.up)[:, columns]
        found["the magnitude were ignored"] = plain_sum if b is None else plain_sum + b[columns]
    if b is not None:
        found["the bias were left out"] = a @ w
    return found


@torch.no_grad()
def _adapter_term(layer: Affine, a: Tensor, columns: slice) -> dict[str, Tensor]:
    if not layer.adapted:
        return {}
    return {"the adapter's part": a @ (layer.effective_weight() - layer.plain().effective_weight())[:, columns]}


@torch.no_grad()
def _backward_terms(layers: dict[str, Affine], signals: dict[str, Tensor]) -> dict[str, Tensor]:
    """What each layer, and within it the adapter, adds to the error signal of their common input."""
    terms: dict[str, Tensor] = {}
    for name, layer in layers.items():
        whole = signals[name] @ layer.effective_weight().t()
        if len(layers) > 1:
            terms[f"the {name} branch"] = whole
        if layer.adapted:
            of = f" of {name}" if name else ""
            terms[f"the adapter's part{of}"] = whole - signals[name] @ layer.plain().effective_weight().t()
    return terms

"""A recorded pass in which tensors are replaced: the pass behind `hg.trace(..., edit={name: function})`.

The same layers as in `block.py`, one at a time and with ρ as a matrix, so that every tensor has a place where it can be
edited. What uses a tensor uses the edited one:

    activation   everything after it. For the backward pass the edit is an added constant: Δ passes it unchanged.
    Δ            everything below it, the gradients of the parameters of its layer included. The loss stays.

Besides the names of a trace there are the skip connections (skip_5 is a_1 on its way to a_5, skip_10 is a_5 on its way to
a_10; delta_skip_5 and delta_skip_10) and the signals inside attention (delta_rho, delta_q, delta_k, delta_v).
"""

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import HandgradError, shown
from ..ops import attention
from .attention import Attention, Projected
from .batch import Piece
from .block import Block
from .branches import ErrorSignals
from .gpt import GPT, Finished, no_hook
from .objective import MEAN_LOSS, Objective
from .passes import Pass, Record, no_record

Edits = Mapping[str, Callable[[Tensor], Tensor]]
At = Callable[[str, Tensor], Tensor]  # records a tensor under its name, and returns the edited one


class BlockState(NamedTuple):
    """What the backward pass of a block needs, as edited."""

    norm_1: Any
    a_2: Tensor
    projected: Projected
    heads: tuple[Tensor, Tensor, Tensor]  # q, k, v as edited, (h, n, d_ρ) and (h_kv, n, d_ρ), (h_kv, n, d_h)
    softmax: Tensor  # (h, n, n), ρ before its edit: the derivative of the softmax is taken there
    rho: Tensor
    a_3: Tensor
    norm_5: Any
    a_6: Tensor
    a_7: list[Tensor]
    a_8: Tensor


class EditedPass:
    """One forward and one backward pass of a piece, with edits."""

    def __init__(self, model: GPT, piece: Piece, edits: Edits, record: Record = no_record):
        self.model, self.piece, self.record = model, piece, record
        self.edits = _checked(edits)
        self.seen: set[str] = set()
        self.run = Pass(attention.spans_of(piece.lengths), rotation=model.rotation(piece.positions))
        self.blocks: list[BlockState] = []

    def at(self, name: str, x: Tensor) -> Tensor:
        """Record a tensor, edited if there is an edit of that name, and return it."""
        self.seen.add(name)
        if name in self.edits:
            edited = self.edits[name](x.clone())
            if not isinstance(edited, Tensor) or edited.shape != x.shape:
                raise HandgradError(
                    f"the edit of {name} must return a tensor of shape {tuple(x.shape)}, not {shown(edited)[:80]}"
                )
            x = edited.to(x)
        self.record(name, x)
        return x

    def forward(self, objective: Objective = MEAN_LOSS) -> tuple[float, Tensor]:
        """a_0 → the value of the objective, and its Δ_12."""
        model, piece = self.model, self.piece
        self.record("a_0", piece.ids)
        a = model.embeddings(piece.ids, piece.positions)
        for i, block in enumerate(model.blocks):
            with model.unpacked(block):
                a = self._forward_block(block, a, self._within(i))
        a_11, self.norm_10 = model.final_norm.forward(a)
        for name, x in model.final_norm.statistics(self.norm_10).items():
            self.record(f"{name}_10", x)
        self.a_11 = self.at("a_11", a_11)
        with model.unpacked(model.head):
            a_12 = self.at("a_12", model.head.forward(self.a_11, self.run))
        self.record("y_pred", torch.softmax(a_12, 1))
        weight = 1 / len(piece.targets)
        value, rows = objective.forward_and_delta(a_12[piece.rows].clone(), piece.targets, weight)
        return model.check_finite(value).item() * weight, torch.zeros_like(a_12).index_copy_(0, piece.rows, rows)

    def backward(self, delta_12: Tensor, finished: Finished = no_hook) -> None:
        """Δ_12 → every error signal and every parameter's gradient, which is added into `.grad`. `finished` is called with
        the parameters of a layer as soon as theirs are final."""
        model, piece = self.model, self.piece
        layers = iter(model.layers())
        delta_12 = self.at("delta_12", delta_12)
        with model.unpacked(model.head):
            delta_11 = self.at("delta_11", model.head.backward(delta_12, self.run))
            model.head.accumulate(delta_12, self.a_11, self.run)
        if not model.config.tied:
            finished(next(layers))
        a_bar_10, _ = model.final_norm.rebuild_output(self.norm_10)
        delta = model.final_norm.backward(delta_11, a_bar_10, self.norm_10)
        finished(next(layers))
        for i, block in reversed(list(enumerate(model.blocks))):
            with model.unpacked(block):
                delta = self._backward_block(block, delta, self.blocks.pop(), self._within(i))
            finished(next(layers))
        model.embed.backward(delta, piece.ids)
        if model.has("positions"):
            model.positions.backward(delta, piece.positions)
        finished(next(layers))

    def check_names(self) -> None:
        """Raise if an edit has a name that the pass did not meet."""
        for name in self.edits:
            if name not in self.seen:
                near = get_close_matches(name, self.seen, 3) or sorted(self.seen)[:3]
                raise HandgradError(f"there is nothing to edit at {name!r}; the closest names are {', '.join(near)}")

    def _within(self, i: int) -> At:
        return lambda name, x: self.at(f"blocks.{i}.{name}", x)

    def _forward_block(self, block: Block, a_1: Tensor, at: At) -> Tensor:
        attn, mlp, run = block.attn, block.mlp, self.run
        a_1 = at("a_1", a_1)
        a_2, norm_1 = block.norm_1.forward(a_1)
        a_2 = at("a_2", a_2)
        projected = attn.project(a_2, run)
        q, k, v = (at(name, x.transpose(0, 1)) for name, x in zip("qkv", projected[:3], strict=True))
        softmax = _softmax(attn, q, k, self.piece.lengths)
        rho = at("rho", softmax)
        a_3 = at("a_3", (rho @ _per_query(v, rho)).transpose(0, 1).flatten(1))
        a_4 = at("a_4", attn.out.forward(a_3, run))
        a_5 = at("a_5", at("skip_5", a_1) + a_4)
        a_6, norm_5 = block.norm_2.forward(a_5)
        a_6 = at("a_6", a_6)
        a_7 = [at(f"a_{letter}", x) for letter, x in zip(mlp.letters(), mlp.forward(a_6, run), strict=True)]
        a_8 = at("a_8", mlp.activate(a_7))
        a_9 = at("a_9", mlp.contract.forward(a_8, run))
        number = len(self.blocks)
        for i, norm, saved in ((1, block.norm_1, norm_1), (5, block.norm_2, norm_5)):
            for name, x in norm.statistics(saved).items():
                self.record(f"blocks.{number}.{name}_{i}", x)
        self.blocks.append(BlockState(norm_1, a_2, projected, (q, k, v), softmax, rho, a_3, norm_5, a_6, a_7, a_8))
        return at("a_10", at("skip_10", a_5) + a_9)

    def _backward_block(self, block: Block, delta_10: Tensor, s: BlockState, at: At) -> Tensor:
        attn, mlp, run = block.attn, block.mlp, self.run
        delta_10 = at("delta_10", delta_10)
        delta_9 = at("delta_9", delta_10)
        delta_8 = at("delta_8", mlp.contract.backward(delta_9, run))
        mlp.contract.accumulate(delta_9, s.a_8, run)
        parts = mlp.backward_activation(delta_8, s.a_7)[0].parts
        parts = [at(f"delta_{letter}", x) for letter, x in zip(mlp.letters(), parts, strict=True)]
        delta_6 = ErrorSignals(mlp.projections(), parts).backward(s.a_6, run)
        assert delta_6 is not None
        delta_6 = at("delta_6", delta_6)
        a_bar_5, _ = block.norm_2.rebuild_output(s.norm_5)
        skipped = at("delta_skip_10", delta_10)
        delta_5 = at("delta_5", block.norm_2.backward(delta_6, a_bar_5, s.norm_5) + skipped)
        delta_4 = at("delta_4", delta_5)
        delta_3 = at("delta_3", attn.out.backward(delta_4, run))
        attn.out.accumulate(delta_4, s.a_3, run)
        delta_2 = at("delta_2", self._backward_heads(attn, delta_3, s, at))
        a_bar_1, _ = block.norm_1.rebuild_output(s.norm_1)
        skipped = at("delta_skip_5", delta_5)
        return at("delta_1", block.norm_1.backward(delta_2, a_bar_1, s.norm_1) + skipped)

    def _backward_heads(self, attn: Attention, delta_3: Tensor, s: BlockState, at: At) -> Tensor:
        """Δ_3 → Δ_2 by equations 22–33, with ρ, Δ_causal and Δ_raw as matrices."""
        q, k, v = s.heads
        delta = delta_3.view(len(delta_3), len(q), -1).transpose(0, 1).to(s.rho.dtype)  # (h, n, d_h)
        delta_v = at("delta_v", _per_key(s.rho.mT @ delta, v))  # (22)
        delta_rho = at("delta_rho", delta @ _per_query(v, s.rho).mT)
        correction = (delta_rho * s.softmax).sum(2, keepdim=True)
        causal = at("delta_causal", (delta_rho - correction) * s.softmax)  # (25)
        raw = at("delta_raw", causal / math.sqrt(q.shape[2]))  # (28)
        delta_q = at("delta_q", raw @ _per_query(k, raw))
        delta_k = at("delta_k", _per_key(raw.mT @ q.to(raw.dtype), k))  # (30)
        signals = ErrorSignals.buffers(attn.projections(), len(delta_3), delta_3)
        for part, x in zip(signals.parts, (delta_q, delta_k, delta_v), strict=True):
            part.copy_(x.transpose(0, 1).flatten(1))
        found = attn.backward_projections(signals, s.projected.q_norm, s.projected.k_norm, s.a_2, self.run)
        assert found is not None
        return found


def _checked(edits: Edits) -> Edits:
    if not isinstance(edits, Mapping) or not all(isinstance(k, str) and callable(f) for k, f in edits.items()):
        raise HandgradError("edit must be a dict of functions by name: edit={'blocks.0.a_3': lambda a: 0 * a}")
    return edits


def _softmax(attn: Attention, q: Tensor, k: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """ρ = softmax(mask(q kᵗ/√d_ρ)) (h, n, n); 0 between sequences   (14)"""
    n, device = q.shape[1], q.device
    sequence = torch.repeat_interleave(torch.tensor(lengths, device=device))
    visible = sequence[:, None] == sequence
    distance = torch.arange(n, device=device)[:, None] - torch.arange(n, device=device)
    if attn.causal:
        visible &= distance >= 0
    if attn.window is not None:
        visible &= distance < attn.window
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    scores = wide @ _per_query(k, wide).mT / math.sqrt(q.shape[2])
    return torch.softmax(scores.masked_fill_(~visible, -math.inf), 2)


def _per_query(x: Tensor, like: Tensor) -> Tensor:
    """Keys or values (h_kv, n, w) → (h, n, w): each head of queries with the keys that it reads"""
    return x.repeat_interleave(len(like) // len(x), 0).to(like.dtype)


def _per_key(x: Tensor, like: Tensor) -> Tensor:
    """Signals per head of queries (h, n, w) → (h_kv, n, w), summed over the heads that share keys and values"""
    return x.view(len(like), -1, *x.shape[1:]).sum(1)

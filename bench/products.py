"""The matrix products of a step and nothing else: a bound on its speed."""

import math
from typing import Any

import torch
from torch import Tensor

import handgrad as hg
from handgrad.model.passes.readout import rows_at_once

LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
ROWS = 128  # of a tile of attention
PIECE = 1024  # tokens; larger batches are processed in pieces


class MatmulsOnly:
    """The matrix products of a step, into preallocated buffers. With a rank, those of a step that trains adapters: every
    layer's forward product and error signal, no gradient of a frozen matrix, and the adapters' own products."""

    def __init__(self, model: hg.GPT, tokens: Tensor, rank: int = 0):
        c = model.config
        self.model, self.n, self.t, self.rank, self.dtype = model, tokens.numel(), tokens.shape[1], rank, model.dtype
        n = min(self.n, max(PIECE, self.t))
        self.times = self.n // n
        d, hidden, g = c.d_model, c.hidden_width, n // self.t * c.n_heads
        self.stream, self.wide = self._new(n, d), self._new(n, hidden)
        self.out_d, self.out_qkv, self.out_wide = self._new(n, d), self._new(n, 3 * d), self._new(n, hidden)
        self.rows = min(n, rows_at_once(c.n_vocab, head_trains=not rank))
        self.logits = self._new(self.rows, c.n_vocab)
        named = {name: p for name, p in model.named_parameters() if p.ndim == 2}
        self.grads = {} if rank else {name: torch.empty_like(p) for name, p in named.items()}
        self.down = {f: (self._new(f, rank), self._new(f, rank)) for f in (d, hidden)}  # a factor and its gradient
        self.up = {f: (self._new(rank, f), self._new(rank, f)) for f in (d, 3 * d, hidden)}
        self.h, self.g = self._new(n, rank), self._new(n, rank)
        self.heads = [self._new(g, self.t, c.query_width) for _ in range(3)]
        self.scores = {e: self._new(g, min(ROWS, self.t), e) for e in self._ends()}
        self.out_heads = self._new(g, self.t, c.query_width)

    def _new(self, *shape: int) -> Tensor:
        return torch.randn(shape).mul_(0.01).to(self.dtype)

    def _ends(self) -> list[int]:
        return [min(i + ROWS, self.t) for i in range(0, self.t, ROWS)]

    def gradients(self) -> float:
        with torch.no_grad():
            for _ in range(self.times):
                self._step()
        return math.nan

    def _step(self) -> None:
        for i, block in enumerate(self.model.blocks):
            for w, a, out in self._layers(block):
                torch.mm(a, w, out=out)
                if self.rank:
                    torch.mm(a, self.down[a.shape[1]][0], out=self.h)
                    out.addmm_(self.h, self.up[out.shape[1]][0])
            self._attention(2)
            for (w, a, out), name in zip(self._layers(block), LAYERS, strict=True):
                below = self.out_d if a.shape[1] == self.out_d.shape[1] else self.out_wide
                if self.rank:
                    self._adapter(w, a, out, None if i == 0 and name == LAYERS[0] else below)
                else:
                    torch.mm(out, w.t(), out=below)
                    torch.mm(a.t(), out, out=self.grads[f"transformer.h.{i}.{name}.weight"])
            self._attention(5)
        self._head()

    def _adapter(self, w: Tensor, a: Tensor, out: Tensor, below: Tensor | None) -> None:
        """The backward products of a frozen layer with an adapter; `below` is None where no layer below trains."""
        (down, grad_down), (up, grad_up) = self.down[a.shape[1]], self.up[out.shape[1]]
        torch.mm(out, up.t(), out=self.g)
        torch.mm(a.t(), self.g, out=grad_down)
        torch.mm(self.h.t(), out, out=grad_up)
        if below is not None:
            torch.mm(out, w.t(), out=below)
            below.addmm_(self.g, down.t())

    def _head(self) -> None:
        w = self.model.transformer.wte.weight
        for i in range(0, len(self.stream), self.rows):
            a = self.stream[i : i + self.rows]
            out = self.logits[: len(a)]
            torch.mm(a, w.t(), out=out)
            torch.mm(out, w, out=self.out_d[: len(a)])
            if not self.rank:
                torch.mm(out.t(), a, out=self.grads["transformer.wte.weight"])

    def _layers(self, block: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [
            (block.attn.c_attn.weight, self.stream, self.out_qkv),
            (block.attn.c_proj.weight, self.stream, self.out_d),
            (block.mlp.c_fc.weight, self.stream, self.out_wide),
            (block.mlp.c_proj.weight, self.wide, self.out_d),
        ]

    def _attention(self, products: int) -> None:
        q, k, v = self.heads
        for e in self._ends():
            rows = slice(e - min(ROWS, self.t) if e % ROWS == 0 or e < ROWS else e - e % ROWS, e)
            m = rows.stop - rows.start
            scores = self.scores[e][:, :m]
            for kind in range(products):
                if kind in (0, 2):
                    torch.bmm(q[:, rows], k[:, :e].transpose(1, 2), out=scores)
                elif kind in (1, 3):
                    torch.bmm(scores, v[:, :e], out=self.out_heads[:, rows])
                else:
                    torch.bmm(scores.transpose(1, 2), q[:, rows], out=self.out_heads[:, :e])

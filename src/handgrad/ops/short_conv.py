"""The short causal convolution of every channel alone, over sequences packed end to end: c(t) = Σ_j w_j ∘ z(t − j) + b.

    z, c, Δ  (n, d)      weight  (d, 1, L) as files hold it, w_j = weight[:, 0, L − 1 − j]      b  (d)

Every tap is a product of all rows with all rows j before them, without those that lie in another sequence. bfloat16 is
computed in float32, so that only results are rounded.
"""

import torch
from torch import Tensor

from .attention import Spans


class Borders:
    """Where sequences begin. A row outside of the spans is in a sequence without queries: what it gets is not read."""

    def __init__(self, spans: Spans, taps: int, device: torch.device):
        starts = [row for span in spans for row in range(span.keys.start, span.keys.stop, span.length)]
        self.first = torch.tensor(starts, dtype=torch.int64, device=device)
        self.taps = taps

    def cut(self, products: Tensor, j: int) -> Tensor:
        """(n − j, d): row i is of tokens i and i + j. Clear those of two sequences by writing: NaN must not pass."""
        across = (self.first[:, None] + torch.arange(-j, 0, device=self.first.device)).flatten()
        return products.index_fill_(0, across[(across >= 0) & (across < len(products))], 0)


def product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x ∘ y, rounded once"""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * y).to(dtype)


def forward(z: Tensor, weight: Tensor, b: Tensor | None, borders: Borders) -> Tensor:
    """c(t) = Σ_j w_j ∘ z(t − j) + b"""
    wide, w = _wide(z), _wide(weight)[:, 0]
    c = wide * w[:, -1]
    for j in range(1, min(borders.taps, len(z))):
        c[j:] += borders.cut(wide[:-j] * w[:, -1 - j], j)
    return (c if b is None else c.add_(b)).to(z.dtype)


def backward(delta: Tensor, weight: Tensor, borders: Borders) -> Tensor:
    """Δ_z(t) = Σ_j w_j ∘ Δ_c(t + j)"""
    wide, w = _wide(delta), _wide(weight)[:, 0]
    signal = wide * w[:, -1]
    for j in range(1, min(borders.taps, len(delta))):
        signal[:-j] += borders.cut(wide[j:] * w[:, -1 - j], j)
    return signal.to(delta.dtype)


def grad_w(delta: Tensor, z: Tensor, borders: Borders, into: Tensor | None) -> Tensor:
    """∂w_j += Σ_t z(t − j) ∘ Δ_c(t), in the weight's shape (d, 1, L)"""
    sums = [x.sum(0) for x in _by_tap(delta, z, borders)]
    grad = torch.stack(sums[::-1], 1)[:, None].to(delta.dtype)
    return grad if into is None else into.add_(grad)


def products(delta: Tensor, z: Tensor, borders: Borders) -> Tensor:
    """What every token adds to ∂w, (n, d L), in the order of the weight"""
    rows = [torch.cat([x.new_zeros(min(j, len(z)), x.shape[1]), x]) for j, x in enumerate(_by_tap(delta, z, borders))]
    return torch.stack(rows[::-1], 2).flatten(1)


def _by_tap(delta: Tensor, z: Tensor, borders: Borders) -> list[Tensor]:
    """z(t − j) ∘ Δ_c(t) for each tap j, from token j on"""
    delta, z, n = _wide(delta), _wide(z), len(z)
    return [borders.cut(z[: max(0, n - j)] * delta[j:], j) for j in range(borders.taps)]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x

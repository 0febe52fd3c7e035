"""Attention on random masks: compiled kernels, torch's tiles and the plain formula agree.

    python tests/kernels/random_masks.py 2000
    HANDGRAD_MASKS=2000 make kernels-check    with kernels that report reads and writes outside of a tensor

A case has sequences with queries in all rows, in some, or in rows that do not follow each other; padding on the left, on the
right or both, rows that see no key, and keys that no row sees; windows, groups of queries, odd widths.
"""

import argparse
import random

import torch
from torch import Tensor

from handgrad.kernels import library
from handgrad.nn.heads import Layout, layout_of_mask
from handgrad.ops import attention

LIMIT = {torch.float64: 1e-11, torch.float32: 1e-4}
WIDTHS = [1, 2, 5, 8, 16, 17, 33]


def check_case(seed: int) -> str:
    """Raises AssertionError if two of the three differ; returns what kind of case it was."""
    chance = random.Random(seed)
    spans, m, n, seen, window, causal, kind = chance.choice([random_spans, random_mask])(chance)
    dtype = chance.choice([torch.float64, torch.float64, torch.float32])
    key_heads = chance.choice([1, 2, 3])
    heads = key_heads * chance.choice([1, 1, 2, 3])
    d_rho, d_h = chance.choice(WIDTHS), chance.choice(WIDTHS)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    if chance.random() < 0.5:
        q, k, v = draw(m, heads, d_rho), draw(n, key_heads, d_rho), draw(n, key_heads, d_h)
    else:  # as a fused layer returns them
        q, both = draw(m, heads * d_rho + 3)[:, 2:-1].view(m, heads, d_rho), draw(n, key_heads, d_rho + d_h)
        k, v = both.split([d_rho, d_h], 2)
    delta = draw(m, heads, d_h)

    def run() -> list[Tensor]:
        a, saved = attention.forward(q, k, v, spans, attention.Scores(causal, window))
        into = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
        attention.backward(delta, saved, spans, into, attention.Scores(causal, window))
        return [a, *into]

    found = run()
    with library.disabled():
        plain = run()
    expected = by_formula(q.double(), k.double(), v.double(), delta.double(), seen)
    for name, one, other, right in zip(("a", "Δ_q", "Δ_k", "Δ_v"), found, plain, expected, strict=True):
        for path, x in (("kernels", one), ("torch", other)):
            error = (x.double() - right).abs().max().item() if x.numel() else 0.0
            assert error <= LIMIT[dtype] * (1 + right.abs().max().item() if x.numel() else 1), (
                f"seed {seed}, {kind}: {name} of {path} differs by {error:.1e}; {spans}, window {window}"
            )
    return kind


def by_formula(q: Tensor, k: Tensor, v: Tensor, delta: Tensor, seen: Tensor) -> list[Tensor]:
    """(18) and (22) to (35) with matrices of all rows; seen (m, n). A row that sees no key is 0."""
    repeat = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, wide_k) / q.shape[2] ** 0.5
    rho = torch.softmax(scores.masked_fill(~seen, -torch.inf), 2).nan_to_num(0.0) * seen
    a = torch.einsum("hqk,khd->qhd", rho, wide_v)
    signal = torch.einsum("qhd,khd->hqk", delta, wide_v)
    raw = (signal - (signal * rho).sum(2, keepdim=True)) * rho / q.shape[2] ** 0.5
    grads = [torch.einsum(f"hqk,{x}", y, z) for x, y, z in (("qhd->khd", raw, q), ("qhd->khd", rho, delta))]
    summed = [x.unflatten(1, (k.shape[1], repeat)).sum(2) for x in grads]
    return [a, torch.einsum("hqk,khd->qhd", raw, wide_k), *summed]


Case = tuple[attention.Spans, int, int, Tensor, int | None, bool, str]


def random_spans(chance: random.Random) -> Case:
    """Spans with gaps between their rows, as a caller of `ops` may give them."""
    spans: list[attention.Span] = []
    visible: list[tuple[int, int, int]] = []  # row of q, first key, end
    causal = chance.random() < 0.85
    window = chance.choice([None, 1, 2, 5, 70]) if causal else None
    m = n = 0
    for _ in range(chance.randint(0, 5)):
        n, m = n + chance.choice([0, 0, 1, 3]), m + chance.choice([0, 0, 1, 4])
        length, count = chance.choice([1, 2, 7, 63, 64, 65, 130]), chance.choice([1, 1, 2])
        positions = None
        if chance.random() < 0.6:
            positions = sorted(chance.choices(range(length), k=chance.randint(1, length + 2)))
        queries = length if positions is None else len(positions)
        keys = slice(n, n + count * length)
        spans.append(attention.Span(keys, slice(m, m + count * queries), count, positions))
        for s in range(count):
            for i, t in enumerate(range(length) if positions is None else positions):
                first = 0 if window is None else max(0, t - window + 1)
                start = n + s * length
                visible.append((m + s * queries + i, start + first, start + (t + 1 if causal else length)))
        n, m = n + count * length, m + count * queries
    n, m = n + chance.choice([0, 2]), m + chance.choice([0, 2])
    seen = torch.zeros(m, n, dtype=torch.bool)
    for row, first, end in visible:
        seen[row, first:end] = True
    return tuple(spans), m, n, seen, window, causal, "spans"


def random_mask(chance: random.Random) -> Case:
    """A batch with padding, as transformers hands its mask over; one without a layout is drawn again."""
    while True:
        batch, length = chance.randint(1, 4), chance.choice([1, 3, 12, 40, 66])
        window = chance.choice([None, None, 1, 3, 20])
        window = None if window is None or window >= length else window
        kept, kinds = torch.ones(batch, length, dtype=torch.bool), set()
        packed = torch.zeros(batch, length, dtype=torch.int64)
        for b in range(batch):
            kind = chance.choice(["none", "left", "right", "both", "hole", "empty", "packed"])
            kinds.add(kind)
            cut, end = sorted(chance.choices(range(length + 1), k=2))
            if kind in ("left", "both"):
                kept[b, :cut] = False
            if kind in ("right", "both"):
                kept[b, end:] = False
            if kind == "hole":
                kept[b, cut:end] = False
            if kind == "empty":
                kept[b] = False
            if kind == "packed":
                packed[b, cut:] += 1
                packed[b, end:] += 1
        mask = kept[:, None, :] & torch.ones(length, length, dtype=torch.bool).tril()
        mask &= packed[:, :, None] == packed[:, None, :]
        if window is not None:
            mask &= ~torch.ones(length, length, dtype=torch.bool).tril(-window)
        if chance.random() < 0.5:  # the rows of padding see nothing either
            mask &= kept[:, :, None]
        layout = layout_of_mask(mask[:, None], batch, window)
        if isinstance(layout, Layout):
            seen = torch.block_diag(*mask.float()).bool()
            return (
                layout.spans,
                batch * length,
                batch * length,
                seen,
                window,
                layout.scores.causal,
                ", ".join(sorted(kinds)),
            )


def check_cases(count: int, first: int = 0) -> dict[str, int]:
    """The number of cases of each kind."""
    kinds: dict[str, int] = {}
    for seed in range(first, first + count):
        for kind in check_case(seed).split(", "):
            kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    assert library.load(torch.float64) is not None, "no kernels: is there a C compiler?"
    print(f"{options.count:,} cases agree:", check_cases(options.count, options.first))

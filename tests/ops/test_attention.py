"""ops.attention, tiled and packed, against paper.attention, one head and one sequence at a time."""

import math

import pytest
import torch

from handgrad.ops import attention as fast
from handgrad.paper import attention as plain
from handgrad.paper.attention import Head
from handgrad.verify import relative_error

SHAPES = [
    # lengths, heads, d_ρ, d_h
    ([1], 1, 1, 1),
    ([7], 1, 3, 3),
    ([5, 5, 5], 3, 4, 4),
    ([2, 1, 9, 9, 4], 2, 3, 5),
    ([130, 257], 2, 8, 8),  # across the edges of tiles
    ([131], 2, 2, 7),
]


def judge(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, delta: torch.Tensor, causal: bool) -> list[torch.Tensor]:
    """paper/ on projections that are the identity: its Δ_q, Δ_k, Δ_v are then those of q, k and v themselves."""
    d_rho, d_h = q.shape[1], v.shape[1]
    width = 2 * d_rho + d_h
    eye = torch.eye(width).double()
    cut = [eye[:, :d_rho], eye[:, d_rho : 2 * d_rho], eye[:, 2 * d_rho :]]
    zeros = torch.zeros(width).double()
    head = Head(cut[0], zeros[:d_rho], cut[1], zeros[:d_rho], cut[2], zeros[:d_h])
    stream = torch.cat([q, k, v], 1)
    f = plain.forward(stream, head, causal)
    b = plain.backward(delta, stream, head, f)
    return [f.a, f.rho, b.delta_causal, b.delta[:, :d_rho], b.delta[:, d_rho : 2 * d_rho], b.delta[:, 2 * d_rho :]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("lengths", "heads", "d_rho", "d_h"), SHAPES)
def test_equal_to_the_paper(lengths: list[int], heads: int, d_rho: int, d_h: int, causal: bool) -> None:
    n, sizes = sum(lengths), tuple(lengths)
    q, k, v = (torch.randn(n, heads, w).double() for w in (d_rho, d_rho, d_h))
    delta = torch.randn(n, heads, d_h).double()
    before = [x.clone() for x in (q, k, v, delta)]
    a, saved = fast.forward(q, k, v, sizes, causal)
    grads = fast.backward(delta, saved, sizes, causal)
    rho, signal = fast.maps(delta, saved, sizes, causal)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, delta), before, strict=True))
    start = 0
    for length in lengths:
        s = slice(start, start + length)
        for h in range(heads):
            expected = judge(q[s, h], k[s, h], v[s, h], delta[s, h], causal)
            found = [a[s, h], rho[h, s, s], signal[h, s, s], *(g[s, h] for g in grads)]
            for x, y in zip(found, expected, strict=True):
                assert relative_error(x, y, floor=1.0) <= 1e-12
        start += length
    across = torch.ones(n, n, dtype=torch.bool)
    start = 0
    for length in lengths:
        across[start : start + length, start : start + length] = False
        start += length
    assert rho[:, across].abs().sum() == 0, "a token looked into another sequence"


def test_both_forward_kernels_agree() -> None:
    q, k, v = (torch.randn(2, 3, 200, 8).double() for _ in range(3))
    for causal in (True, False):
        one, two = fast._forward_by_library(q, k, v, causal), fast._forward_in_tiles(q, k, v, causal)
        assert relative_error(one[0], two[0]) <= 1e-12 and relative_error(one[1], two[1]) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    lengths = (33, 100)
    wide = [torch.randn(133, 2, 16).to(dtype).double() for _ in range(4)]
    narrow = [x.to(dtype) for x in wide]
    truth = fast.backward(wide[3], fast.forward(*wide[:3], lengths, True)[1], lengths, True)
    found = fast.backward(narrow[3], fast.forward(*narrow[:3], lengths, True)[1], lengths, True)
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    for x, y in zip(found, truth, strict=True):
        assert x.dtype == dtype and relative_error(x, y) < limit


def test_large_scores_do_not_overflow() -> None:
    q = 1e3 * torch.randn(9, 1, 4)
    a, saved = fast.forward(q, q, q, (9,), True)
    grads = fast.backward(torch.randn(9, 1, 4), saved, (9,), True)
    assert all(torch.isfinite(x).all() for x in (a, *grads))


def test_memory_is_linear_in_the_tokens() -> None:
    """What is kept for the way back grows by the same amount for every token more."""

    def kept(n: int) -> int:
        q, k, v = (torch.randn(n, 2, 4) for _ in range(3))
        _, saved = fast.forward(q, k, v, (n,), True)
        return sum(x.numel() for x in saved)

    assert kept(512) - kept(256) == 2 * (kept(256) - kept(128))
    assert math.isclose(kept(256) / kept(128), 2)

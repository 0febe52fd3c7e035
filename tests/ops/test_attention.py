"""ops.attention, tiled and packed, against paper.attention, one head and one sequence at a time."""

import math

import pytest
import torch

from conftest import ATTENTION_ROUNDING, ROUNDING, SCALES, rounded
from handgrad.ops import attention as fast
from handgrad.paper import attention as plain
from handgrad.paper.attention import Head
from handgrad.proof.oracles import relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE

SHAPES = [
    # lengths, heads, d_ρ, d_h
    ([1], 1, 1, 1),
    ([7], 1, 3, 3),
    ([5, 5, 5], 3, 4, 4),
    ([2, 1, 9, 9, 4], 2, 3, 5),
    ([130, 257], 2, 8, 8),  # across the edges of tiles
    ([131], 2, 2, 7),
]


def by_paper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, delta: torch.Tensor, causal: bool
) -> list[torch.Tensor]:
    """paper/ with projections that select q, k and v from their concatenation: its Δ_{i−1} is then that of q, k and v."""
    d_rho, d_h = q.shape[1], v.shape[1]
    width = 2 * d_rho + d_h
    eye = torch.eye(width).double()
    select = [eye[:, :d_rho], eye[:, d_rho : 2 * d_rho], eye[:, 2 * d_rho :]]
    zeros = torch.zeros(width).double()
    head = Head(select[0], zeros[:d_rho], select[1], zeros[:d_rho], select[2], zeros[:d_h])
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
    spans = fast.spans_of(sizes)
    a, saved = fast.forward(q, k, v, spans, fast.Scores(causal))
    grads = tuple(torch.full_like(x, float("nan")) for x in (q, k, v))
    fast.backward(delta, saved, spans, grads, fast.Scores(causal))
    rho, signal, _ = fast.maps(delta, saved, sizes, fast.Scores(causal))
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, delta), before, strict=True))
    start = 0
    for length in lengths:
        s = slice(start, start + length)
        for h in range(heads):
            expected = by_paper(q[s, h], k[s, h], v[s, h], delta[s, h], causal)
            found = [a[s, h], rho[h, s, s], signal[h, s, s], *(g[s, h] for g in grads)]
            for x, y in zip(found, expected, strict=True):
                assert relative_error(x, y, floor=1.0) <= IDENTITY_TOLERANCE
        start += length
    across = torch.ones(n, n, dtype=torch.bool)
    start = 0
    for length in lengths:
        across[start : start + length, start : start + length] = False
        start += length
    assert rho[:, across].abs().sum() == 0, "a token attends to another sequence"


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 1), (True, 60), (True, 150)])
@pytest.mark.parametrize("key_heads", [6, 2])
def test_both_forward_kernels_agree(key_heads: int, causal: bool, window: int | None) -> None:
    q, k, v = (torch.randn(2 * 200, heads, 8).double() for heads in (6, key_heads, key_heads))
    (span,) = fast.spans_of((200, 200))
    by_head = [fast._by_head(x, span.keys, span) for x in (q, k, v)]
    stacked = [fast._stack(x, span.keys, span, key_heads, torch.float64) for x in (q, k, v)]
    out, lse = fast._forward_by_library(*by_head, fast.Scores(causal, window))
    found = torch.empty_like(q), torch.empty(400, 6).double()
    for x, target in zip(fast._forward_in_tiles(*stacked, None, fast.Scores(causal, window), None), found, strict=True):
        fast._unstack(x, target, span.queries, span, key_heads)
    for x, y in zip((out, lse), found, strict=True):
        assert relative_error(fast._by_head(y, span.queries, span), x) <= IDENTITY_TOLERANCE


def signals(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, delta: torch.Tensor, spans: fast.Spans
) -> list[torch.Tensor]:
    """The output and the error signals of q, k and v, causal."""
    a, saved = fast.forward(q, k, v, spans)
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    fast.backward(delta, saved, spans, grads)
    return [a, *grads]


@pytest.mark.parametrize("lengths", [(9,), (5, 1, 7), (140, 300, 3), (4, 4, 4)])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_queries_in_some_rows_only(lengths: tuple[int, ...], share: float) -> None:
    """Outputs equal those with queries in all rows; error signals equal those with Δ = 0 on the other rows."""
    n = sum(lengths)
    q, k, v, delta = (torch.randn(n, 2, 4).double() for _ in range(4))
    rows = torch.nonzero(torch.rand(n) < share).squeeze(1)
    rows = rows if len(rows) else torch.tensor([n // 2])
    padded = torch.zeros_like(delta)
    padded[rows] = delta[rows]
    a, grad_q, grad_k, grad_v = signals(q, k, v, padded, fast.spans_of(lengths))
    some = signals(q[rows], k, v, delta[rows], fast.spans_of(lengths, rows))
    for x, y in zip(some, (a[rows], grad_q[rows], grad_k, grad_v), strict=True):
        assert relative_error(x, y) <= IDENTITY_TOLERANCE


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", [*SCALES, 3.0, 10.0, 30.0, 1e2, 1e4])
@pytest.mark.parametrize("kind", ["all rows", "some rows", "d_ρ ≠ d_h"])
@pytest.mark.some_cases(5)
def test_every_dtype_and_scale(kind: str, scale: float, dtype: torch.dtype) -> None:
    """From uniform to saturated softmax, by every code path. A saturated softmax gives q and k almost no gradient, so their
    errors are relative to at least the largest term of the sum."""
    lengths = (33, 100, 150)
    n, d_h = sum(lengths), 16 if kind != "d_ρ ≠ d_h" else 12
    rows = torch.arange(0, n, 3) if kind == "some rows" else None
    q, k = (rounded(n, 2, 16, dtype=dtype, scale=scale) for _ in range(2))
    v, delta = rounded(n, 2, d_h, dtype=dtype), rounded(n, 2, d_h, dtype=dtype, scale=1e-3)
    wide = [q, k, v, delta] if rows is None else [q[rows], k, v, delta[rows]]
    spans = fast.spans_of(lengths, rows)
    expected, found = signals(*wide, spans), signals(*(x.to(dtype) for x in wide), spans)
    limit = (ROUNDING if dtype == torch.float32 and scale <= 1 else ATTENTION_ROUNDING)[dtype]
    product = 1e-3 * scale * torch.finfo(dtype if dtype != torch.bfloat16 else torch.float32).eps
    for x, y, floor in zip(found, expected, (0.0, product, product, 0.0), strict=True):
        assert x.dtype == dtype and relative_error(x, y, floor) <= limit


def test_scores_beyond_float32() -> None:
    """One key dominates: ρ is exactly 0 or 1, although scores of 1e9 are rounded by 64."""
    q = 1e5 * torch.randn(9, 1, 4)
    delta = torch.randn(9, 1, 4)
    spans = fast.spans_of((9,))
    found, expected = signals(q, q, q, delta, spans), signals(*(x.double() for x in (q, q, q, delta)), spans)
    assert all(relative_error(x, y, floor=1e-3) <= 1e-6 for x, y in zip(found, expected, strict=True))
    _, saved = fast.forward(q, q, q, spans)
    rho, _, _ = fast.maps(delta, saved, (9,))
    assert torch.allclose(rho.sum(-1), torch.ones(1, 9), atol=1e-6)


def test_memory_is_linear_in_the_tokens() -> None:
    """The saved tensors grow by the same amount per token."""

    def saved_numbers(n: int) -> int:
        q, k, v = (torch.randn(n, 2, 4) for _ in range(3))
        _, saved = fast.forward(q, k, v, fast.spans_of((n,)))
        return sum(x.numel() for x in saved if x is not None)

    assert saved_numbers(512) - saved_numbers(256) == 2 * (saved_numbers(256) - saved_numbers(128))
    assert math.isclose(saved_numbers(256) / saved_numbers(128), 2)


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e5, 1e7, 1e9])
def test_the_output_is_an_average_of_values_at_any_scale(scale: float) -> None:
    """Scores as large as 1e18, whose rounding errors are larger than what exp can represent."""
    q, k, v = (torch.randn(100, 3, 7) for _ in range(3))
    spans = fast.spans_of((80, 20))
    a, saved = fast.forward(q * scale, k * scale, v, spans)
    assert torch.isfinite(saved.lse).all()
    assert (a.abs() <= 1.0001 * v.abs().amax()).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize("window", [None, 3])
def test_scores_that_overflow_are_not_hidden(bad: float, window: int | None) -> None:
    """torch's kernel, which bfloat16 uses, gives such rows 0."""
    q, k, v = (torch.ones(6, 2, 8, dtype=torch.bfloat16) for _ in range(3))
    q[4, 1], k[:, 1] = bad, 1e30 if bad == 1e38 else 1
    a, saved = fast.forward(q, k, v, fast.spans_of([6]), fast.Scores(True, window))
    assert torch.isnan(a[4, 1]).all() and torch.isnan(saved.lse[4, 1])
    assert torch.isfinite(a[:, 0]).all()
    q.zero_()  # the log-sum-exp of the first row is 0, and right
    k.fill_(1)
    assert torch.isfinite(fast.forward(q, k, v, fast.spans_of([6]), fast.Scores(True, window))[0]).all()
